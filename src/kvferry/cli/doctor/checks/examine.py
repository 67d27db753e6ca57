"""The examination: all looks in order. What takes long begins first; what is timed goes alone."""

from __future__ import annotations

from kvferry.cli.doctor.checks import (
    control,
    copies,
    fit,
    gpus,
    machine,
    memory,
    rdma,
    rights,
    transports,
)
from kvferry.cli.doctor.checks.check import Asked, Check, Look, findings
from kvferry.cli.doctor.checks.children import Children
from kvferry.cli.doctor.checks.fit import Pairing
from kvferry.errors import Reason


def examine(asked: Asked, pairing: Pairing | tuple[Reason, ...] | None) -> list[Check]:
    """Look at everything. Raises ``InputError`` for a transport that nobody knows."""
    with Children() as children:
        return [check for look in _looks(asked, pairing, children) for check in findings(look)]


def _looks(
    asked: Asked, pairing: Pairing | tuple[Reason, ...] | None, children: Children
) -> list[Look]:
    begun = transports.begin(asked, children)
    cards = children.start("gpus", limit_s=gpus.LIMIT_S)
    ports = rdma.ports()
    fits = pairing if isinstance(pairing, Pairing) else None
    num_peers, request_bytes = (fits.num_peers, fits.request_bytes) if fits else (None, None)
    return [
        Look(machine.AREA, "system", machine.system),
        Look(machine.AREA, "clock", machine.clock),
        Look(machine.AREA, "files", lambda: machine.files(num_peers)),
        Look(transports.AREA, "start", lambda: transports.started(asked, begun)),
        Look(memory.AREA, "shared memory", lambda: memory.shared_memory(asked, request_bytes)),
        Look(memory.AREA, "pinned memory", lambda: memory.pinned_memory(asked, bool(ports))),
        Look(memory.AREA, "huge pages", memory.huge_pages),
        Look(memory.AREA, "leftovers", memory.left_over),
        Look(rights.AREA, rights.NAME, rights.other_processes),
        Look(gpus.AREA, "cards", lambda: gpus.cards(asked, cards, bool(ports))),
        Look(rdma.AREA, "devices", lambda: rdma.devices(ports)),
        Look(rdma.AREA, rdma.LIBRARY, lambda: rdma.library(asked)),
        Look(control.AREA, "channel", lambda: control.channel(asked)),
        Look(control.AREA, "cluster", lambda: control.cluster(asked)),
        # Behind the other probes, which would take its memory bandwidth.
        Look(copies.AREA, "loop", lambda: copies.host(asked, children)),
        *_layouts(pairing),
    ]


def _layouts(pairing: Pairing | tuple[Reason, ...] | None) -> list[Look]:
    if pairing is None:
        return []
    if isinstance(pairing, Pairing):
        return [Look(fit.AREA, "plan", lambda: fit.fitting(pairing))]
    return [Look(fit.AREA, "reasons", lambda: fit.refused(pairing))]
