"""A cluster as described in a TOML file or by flags, and the options of its parts.

What cannot work is refused here, before anything is started. Imports no torch, so that
mistakes are reported at once.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvferry import DType, InputError, Layout, Order, Parallel, Refused, TransferMode, reshard
from kvferry.reference.models.config import ModelConfig, layout_for
from kvferry.router.options import RouterOptions
from kvferry.router.worker_pool import WorkerRole

DISCOVERY_PORT = 7077
MAX_FILE_BYTES = 1 << 20
SEE = "see examples/cluster.toml"
DEVICES = ("cpu", "cuda")
# Keys of a worker's section that are options of its engine.
ENGINE_OPTIONS = (
    *("order", "dtype", "device", "threads"),
    *("cache_tokens", "max_requests", "step_tokens", "prefix_cache"),
)

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]


class DiscoverySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The discovery service. ``url`` is how others reach it, if not at ``host``."""

    host: str = "127.0.0.1"
    port: Port = DISCOVERY_PORT
    url: str = ""

    @property
    def address(self) -> str:
        """The URL for workers and routers."""
        return self.url or f"http://{self.host}:{self.port}"


class TransferSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prefill workers push: a number of layers at a time, as many as pay, or all."""

    layers: Count | Literal["auto", "all"] = "auto"


class WorkerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker, or ``instances`` of the same kind, each of ``tp`` × ``pp`` ranks.

    ``advertise`` is the address at which other hosts reach a worker that listens on all
    addresses. ``mode`` forces a transfer mode; without it a prefill worker chooses.
    """

    name: str = ""
    instances: Count = 1
    tp: Count = 1
    pp: Count = 1
    stages: tuple[int, ...] = ()
    page: Count = 16
    order: Order = Order.NHD
    dtype: DType = DType.FLOAT32
    device: str = "cpu"
    threads: Count = 1
    cache_tokens: Count = 8192
    max_requests: Count = 32
    step_tokens: Count = 256
    prefix_cache: bool = True
    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str = ""
    mode: TransferMode | None = None

    def __str__(self) -> str:
        pipeline = f"·PP{self.parallel.pp}" if self.parallel.pp > 1 else ""
        instances = f" × {self.instances}" if self.instances > 1 else ""
        return f"TP{self.tp}{pipeline}{instances}, page {self.page}"

    @property
    def parallel(self) -> Parallel:
        """The sharding."""
        return Parallel(tp=self.tp, pp=len(self.stages) or self.pp, stages=self.stages)

    def layout(self, config: ModelConfig) -> Layout:
        """Return the layout of the model's cache."""
        return layout_for(
            config, self.parallel, page_tokens=self.page, order=self.order, dtype=self.dtype
        )


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster. An empty ``model`` is the default one."""

    model: str = ""
    transport: str = "auto"
    key: str | None = None
    discovery: DiscoverySection = DiscoverySection()
    router: RouterOptions = RouterOptions()
    transfer: TransferSection = TransferSection()
    prefill: tuple[WorkerSection, ...] = ()
    decode: tuple[WorkerSection, ...] = ()

    def workers(self) -> list[NamedProcess]:
        """Return every worker; ``prefill-0``, ``prefill-1``, … unless it has a name."""
        workers: list[NamedProcess] = []
        sides = (WorkerRole.PREFILL, self.prefill), (WorkerRole.DECODE, self.decode)
        for part, sections in sides:
            before = len(workers)
            for section in sections:
                for i in range(section.instances):
                    name = section.name or f"{part}-{len(workers) - before}"
                    if section.name and section.instances > 1:
                        name = f"{section.name}-{i}"
                    # Only one instance can have the port; the others take any.
                    own = section if i == 0 else msgspec.structs.replace(section, port=0)
                    workers.append(NamedProcess(name, part, own))
        return workers


class ModelFolder(NamedTuple):
    """A model's folder and the name under which it is served."""

    folder: Path
    name: str


class NamedProcess(NamedTuple):
    """One worker of a section."""

    name: str
    part: WorkerRole
    section: WorkerSection


def read_cluster(name: str) -> ClusterDescription:
    """Read a description from a file; paths in it are relative to the file."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            data = tomllib.loads(file.read(MAX_FILE_BYTES).decode())
        cluster = msgspec.convert(data, ClusterDescription)
    except OSError as error:
        raise InputError(f"cannot read {name!r}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name} is not TOML: {error}; {SEE}") from None
    except (msgspec.ValidationError, InputError) as error:
        raise InputError(f"{name}: {error}; {SEE}") from None
    if cluster.router.discovery or cluster.router.key:
        raise InputError(f"{name}: [router] takes discovery and key from the whole file; {SEE}")
    key = str(path.parent / cluster.key) if cluster.key else None
    model = str(path.parent / cluster.model) if "/" in cluster.model else cluster.model
    return msgspec.structs.replace(cluster, key=key, model=model)


def check(cluster: ClusterDescription, model: ModelFolder) -> None:
    """Refuse a cluster that cannot work."""
    workers = cluster.workers()
    names = [worker.name for worker in workers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"two workers have the name {min(twice)!r}; give each its own")
    for section in (*cluster.prefill, *cluster.decode):
        if section.device not in DEVICES:
            raise InputError(f"device is {' or '.join(DEVICES)}, not {section.device!r:.40}")
    if any(section.mode for section in cluster.decode):
        raise InputError("prefill chooses the transfer mode; put it into a [[prefill]] section")
    try:
        config = ModelConfig.load(model.folder)
        sources = [section.layout(config) for section in cluster.prefill]
        targets = [section.layout(config) for section in cluster.decode]
        for source in sources:
            for target in targets:
                reshard(source, target)
    except Refused as refused:
        raise InputError("; ".join(reason.message for reason in refused.reasons)) from None


# ---------------------------------------------------------------- options of ``run_part``


def discovery_options(cluster: ClusterDescription) -> dict[str, Any]:
    """Return the options of the discovery service."""
    section = cluster.discovery
    return {"host": section.host, "port": section.port, "key": cluster.key}


def router_options(cluster: ClusterDescription, discovery: str | None) -> dict[str, Any]:
    """Return the options of the router."""
    own = msgspec.structs.replace(cluster.router, discovery=discovery, key=cluster.key)
    fields: dict[str, Any] = msgspec.to_builtins(own)
    return fields


def worker_options(
    cluster: ClusterDescription, worker: NamedProcess, model: ModelFolder, discovery: str | None
) -> dict[str, Any]:
    """Return the options of a worker; its deadlines are the router's."""
    section = worker.section
    engine = {name: getattr(section, name) for name in ENGINE_OPTIONS} | {
        "parallel": section.parallel,
        "page_tokens": section.page,
        "lost_s": cluster.router.lost_s,
    }
    fields: dict[str, Any] = msgspec.to_builtins(
        {
            "role": worker.part,
            "name": worker.name,
            "folder": str(model.folder),
            "model": model.name,
            "engine": engine,
            "transport": cluster.transport,
            "discovery": discovery,
            "key_file": cluster.key,
            "host": section.host,
            "port": section.port,
            "advertise": section.advertise,
            "layers": cluster.transfer.layers,
            "endpoint": {"mode": section.mode},
            "deadline_s": cluster.router.room_s,
            "request_s": cluster.router.deadline_s,
        }
    )
    return fields
