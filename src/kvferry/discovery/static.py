"""Discovery by a static list of instances with fixed addresses and layouts.

It needs no service. Incarnations become known at the handshake, and only the link to a rank
detects that the rank has restarted.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvferry.discovery.base import Discovery
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    RankView,
    Summaries,
    Summary,
    demand_name,
)
from kvferry.errors import InputError, KvferryError
from kvferry.layout.hf import spec_from_config
from kvferry.layout.layout import Layout, Order, Parallel
from kvferry.layout.spec import DType
from kvferry.model_config import read_config
from kvferry.security.keys import resolve_ip

MAX_FILE_BYTES = 16 << 20
# A static list never changes, so its views have one version.
VERSION = "static"


class StaticInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance, with the control addresses of its ranks in their order, as ``HOST:PORT``.

    ``model`` is the ``model`` argument of its endpoints. Without it, only the handshake compares
    the models.
    """

    name: str
    ranks: tuple[str, ...]
    layout: Layout
    model: str | None = None

    def view(self) -> InstanceView:
        """Return the view of it. Raises ``InputError`` if the entry is inconsistent."""
        demand_name(self.name)
        if len(self.ranks) != self.layout.num_ranks:
            raise InputError(
                f"{self.name} has {len(self.ranks)} addresses, but its layout "
                f"{self.layout.num_ranks} ranks; give one for each rank, in their order"
            )
        ranks = tuple(
            RankView(rank, None, _control(address)) for rank, address in enumerate(self.ranks)
        )
        return InstanceView(self.name, VERSION, self.model, self.layout, "", ranks)


class StaticDiscovery(Discovery):
    """A fixed set of instances. Any number of endpoints may share it.

    A rank that registers is compared with its entry and refused if it differs. The list does not
    know whether a rank runs: a room for one that does not answer fails with ``unreachable``.
    """

    def __init__(self, instances: Iterable[StaticInstance], source: str = "static list") -> None:
        self._source = source
        self._views: dict[str, InstanceView] = {}
        for each in instances:
            if each.name in self._views:
                raise InputError(f"{source} names {each.name!r:.100} twice; remove one")
            self._views[each.name] = each.view()

    @staticmethod
    def read(path: str | Path) -> StaticDiscovery:
        """Read a TOML file, or a JSON file if its name ends in .json."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES).decode()
            content = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
            document = msgspec.convert(content, _Document)
            instances = [_instance(entry, path.parent) for entry in document.instances]
            return StaticDiscovery(instances, f"static:{path}")
        except (OSError, KvferryError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"the static list {str(path)!r:.400} cannot be used: {why}")

    def __str__(self) -> str:
        return self._source

    def check(self, record: RankRecord) -> None:
        """Raise ``InputError`` unless the list has this rank, address, layout and model."""
        view = self._views.get(record.instance)
        if view is None:
            raise InputError(
                f"{self} has no instance {record.instance!r:.100}, only {self._names()}; add it"
            )
        if record.layout != view.layout:
            raise InputError(
                f"{record.peer} has another layout ({record.layout}) than {self} says "
                f"({view.layout}), or another cache specification; correct the list"
            )
        if view.fingerprint not in (None, record.fingerprint):
            raise InputError(
                f"{record.peer} has the model {record.fingerprint!r:.100}, but {self} says "
                f"{view.fingerprint!r:.100}; correct one of them"
            )
        listed = view.ranks[record.rank].control
        if listed != record.control != _resolved(listed):
            raise InputError(
                f"{record.peer} listens on {record.control}, but {self} says {listed}; set host "
                f"and port in EndpointConfig, or correct the list"
            )

    async def register(self, record: RankRecord, lease_s: float) -> None:
        """Compare the rank with its entry. Stores nothing."""
        try:
            self.check(record)
        except InputError as error:
            raise DiscoveryError(DiscoveryFault.MALFORMED, str(error)) from None

    async def renew(self, record: RankRecord, lease_s: float) -> float:
        """Do nothing, as entries have no lease. Refuses a rank without an entry."""
        self._demand_listed(record)
        return lease_s / 3

    async def withdraw(self, record: RankRecord) -> None:
        """Do nothing, as the list is fixed. Refuses a rank without an entry."""
        self._demand_listed(record)

    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """Return the view at once to a caller that has none. It never changes."""
        view = self._views.get(name)
        if view is not None and version != view.version:
            return view
        await asyncio.sleep(wait_s)
        if view is None:
            raise DiscoveryError(
                DiscoveryFault.INCOMPLETE,
                f"{self} has no instance {name!r:.100}, only {self._names()}; check the name",
            )
        return None

    async def list(self) -> Summaries:
        """Return every instance of the list."""
        return Summaries(tuple(map(_summary, self._views.values())))

    def _names(self) -> str:
        return f"{', '.join(sorted(self._views)) or 'none'!s:.300}"

    def _demand_listed(self, record: RankRecord) -> None:
        view = self._views.get(record.instance)
        if view is None or record.rank >= len(view.ranks):
            raise DiscoveryError(
                DiscoveryFault.NO_LEASE, f"{self} does not have {record.peer}; add it"
            )


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    instances: tuple[dict[str, Any], ...]


class _ModelLayout(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A layout as a Hugging Face configuration and its sharding."""

    config: str
    dtype: DType | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    stages: tuple[int, ...] = ()
    dcp: int = 1
    interleave: int = 1
    page_tokens: int = 16
    group_pages: dict[str, int] = {}
    order: Order = Order.NHD

    def layout(self, folder: Path) -> Layout:
        spec = spec_from_config(read_config(folder / self.config), self.dtype)
        sharding = Parallel(self.tp, self.pp, self.cp, self.stages, self.dcp, self.interleave)
        return Layout(
            spec,
            sharding,
            page_tokens=self.page_tokens,
            order=self.order,
            group_pages=tuple(self.group_pages.items()),
        )


def _instance(entry: dict[str, Any], folder: Path) -> StaticInstance:
    """Parse an entry of the file, whose layout is either complete or a ``_ModelLayout``."""
    layout = entry.get("layout")
    if isinstance(layout, dict) and "config" in layout:
        entry = entry | {"layout": msgspec.convert(layout, _ModelLayout).layout(folder)}
    return msgspec.convert(entry, StaticInstance)


def _summary(view: InstanceView) -> Summary:
    ranks = tuple(range(len(view.ranks)))
    about = view.transport, view.fingerprint or "", str(view.layout)
    return Summary(view.name, True, view.version, len(ranks), ranks, *about, "")


def _control(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError(
            f"{address!r:.200} is not a control address; give one such as 10.0.0.2:7100"
        )
    return f"tcp://{host}:{port}"


def _resolved(control: str) -> str:
    """Return a control address with the host as an IP address, as ranks register it."""
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    address = resolve_ip(host.strip("[]"))
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
