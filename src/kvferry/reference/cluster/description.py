"""A cluster as described in a TOML file or by flags, and the options of its parts.

What cannot work is refused here, before anything is started. Imports no torch, so that
mistakes are reported at once.
"""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from kvferry import EndpointConfig, InputError, Refused, TransferMode, check_discovery_url, reshard
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.options import Count, EngineOptions, InstanceOptions, Port
from kvferry.router.options import RouterOptions
from kvferry.router.worker_pool import WorkerRole

DISCOVERY_PORT = 7077
MAX_FILE_BYTES = 1 << 20
SEE = "see examples/cluster.toml"


class DiscoverySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The discovery service. ``url`` is how others reach it, if not at ``host``.

    ``existing`` is the URL of a service that runs already, such as etcd. The cluster then starts
    none, but its status service at ``host`` and ``port`` if the existing one has no page.
    """

    host: str = "127.0.0.1"
    port: Port = DISCOVERY_PORT
    url: str = ""
    existing: str = ""

    def __post_init__(self) -> None:
        if self.existing:
            check_discovery_url(self.existing)

    @property
    def address(self) -> str:
        """The URL for workers and routers."""
        return self.existing or self.url or f"http://{self.host}:{self.port}"

    @property
    def needs_status(self) -> bool:
        """Whether a status service must show the cluster."""
        return self.existing.startswith(("etcd://", "etcds://"))


class WorkerSection(EngineOptions, frozen=True, kw_only=True):
    """One worker, or ``instances`` of the same kind, each of ``tp`` ranks.

    ``advertise`` is the address at which other hosts reach a worker that listens on all
    addresses. ``mode`` forces a transfer mode; without it a prefill worker chooses.
    """

    name: str = ""
    instances: Count = 1
    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str = ""
    mode: TransferMode | None = None

    def __str__(self) -> str:
        instances = f" × {self.instances}" if self.instances > 1 else ""
        return f"TP{self.tp}{instances}, page {self.page}"


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster. An empty ``model`` is the default one.

    ``layers``: prefill workers push so many layers at a time, as many as pay, or all.
    """

    model: str = ""
    transport: str = "auto"
    layers: Count | Literal["auto", "all"] = "auto"
    key: str | None = None
    discovery: DiscoverySection = DiscoverySection()
    router: RouterOptions = RouterOptions()
    prefill: tuple[WorkerSection, ...] = ()
    decode: tuple[WorkerSection, ...] = ()

    def workers(self) -> list[NamedWorker]:
        """Return every worker; ``prefill-0``, ``prefill-1``, … unless it has a name."""
        workers: list[NamedWorker] = []
        for role, sections in (WorkerRole.PREFILL, self.prefill), (WorkerRole.DECODE, self.decode):
            instances = [(one, i) for one in sections for i in range(one.instances)]
            for number, (section, i) in enumerate(instances):
                name = section.name or f"{role}-{number}"
                if section.name and section.instances > 1:
                    name = f"{section.name}-{i}"
                # Only one instance can have the port; the others take any.
                own = section if i == 0 else replace(section, port=0)
                workers.append(NamedWorker(name, role, own))
        return workers


class NamedWorker(NamedTuple):
    """One worker of a section."""

    name: str
    role: WorkerRole
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
    return replace(cluster, key=key, model=model)


def check(cluster: ClusterDescription, model: ModelFolder) -> None:
    """Refuse a cluster that cannot work."""
    names = [worker.name for worker in cluster.workers()]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"two workers have the name {min(twice)!r}; give each its own")
    if any(section.mode for section in cluster.decode):
        raise InputError("prefill chooses the transfer mode; put it into a [[prefill]] section")
    try:
        config = ModelConfig.load(model.folder)
        sides = [[one.layout(config) for one in side] for side in (cluster.prefill, cluster.decode)]
        for source, target in product(*sides):
            reshard(source, target)
    except Refused as refused:
        raise InputError("; ".join(reason.message for reason in refused.reasons)) from None


class DiscoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A discovery service, or the status service of an existing one."""

    section: DiscoverySection
    key: str | None = None
    advertise: str = ""


PartOptions = DiscoveryOptions | RouterOptions | InstanceOptions


def router_options(cluster: ClusterDescription, discovery: str | None) -> RouterOptions:
    """Return the options of the router."""
    return replace(cluster.router, discovery=discovery, key=cluster.key)


def worker_options(
    cluster: ClusterDescription, worker: NamedWorker, model: ModelFolder, discovery: str | None
) -> InstanceOptions:
    """Return the options of a worker."""
    section, router = worker.section, cluster.router
    return InstanceOptions(
        role=worker.role,
        name=worker.name,
        folder=str(model.folder),
        model=model.name,
        engine=replace(section, lost_s=router.lost_s),
        transport=cluster.transport,
        discovery=discovery,
        key_file=cluster.key,
        host=section.host,
        port=section.port,
        advertise=section.advertise,
        deadline_s=router.room_s,
        # No request lasts longer.
        drain_s=router.deadline_s,
        layers=cluster.layers,
        endpoint=EndpointConfig(mode=section.mode),
    )
