"""``kvferry bench transfer --inject``: one transfer with damaged content, which must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvferry.cli.printing import print_document
from kvferry.errors import InputError
from kvferry.protocol.outcome import Failure
from kvferry.testing.faulty_transport import ContentFault
from kvferry.testing.fleet import Fleet, FleetSide

if TYPE_CHECKING:
    from kvferry.cli.bench.transfer import TransferJob

TIMEOUT_S = 120.0
ROOM = "bench-injected"


class InjectionReport(msgspec.Struct, kw_only=True):
    """How a transfer with damaged content ended. ``code`` is empty if it was taken for right."""

    injected: str
    proof: str
    code: str
    message: str


def run_injected(job: TransferJob, fault: ContentFault, *, as_json: bool) -> int:
    """Damage one transfer, print how it ended, and return the exit status, which is never 0."""
    report = _carry(job, fault)
    if as_json:
        print_document(msgspec.to_builtins(report))
    elif report.code:
        print(f"{report.code}: {report.message}")
    else:
        print(f"{fault} was not noticed with --proof {report.proof}: BYTES WERE WRONG")
    return 1


def _carry(job: TransferJob, fault: ContentFault) -> InjectionReport:
    tokens = job.request.num_tokens
    prefill, decode = (
        FleetSide(name, layout, 2 * (-(-tokens // layout.smallest_page)), job.config)
        for name, layout in (("prefill", job.plan.source), ("decode", job.plan.target))
    )
    damaged = prefill._replace(fault=fault)
    with Fleet(damaged, decode, transport=job.transport, device=job.device) as fleet:
        targets = fleet.targets["decode"]
        fleet.fill(ROOM, 0, tokens)
        fleet.receive(ROOM, "decode", job.request, TIMEOUT_S)
        fleet.send(ROOM, tokens, chunk=job.chunk, deadline_s=TIMEOUT_S)
        outcomes = fleet.outcomes(ROOM, targets, TIMEOUT_S)
        if not sum(fleet.all(fleet.sources, "num_faults")):
            raise InputError(
                f"{fault} is impossible in this transfer; choose sides whose ranks send several "
                f"layers, tensors of one shape, or states"
            )
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    code, message = (failures[0].code, failures[0].message) if failures else ("", "")
    return InjectionReport(
        injected=str(fault), proof=str(job.config.proof), code=str(code), message=message
    )
