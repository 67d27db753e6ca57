"""The flags of ``kvferry serve`` and ``kvferry demo``, and what they make of a cluster.

A flag that is not given is None, so that a file can be told from flags.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli.parsing import given, number, whole
from kvferry.cli.sides import read_side
from kvferry.errors import InputError
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    NamedProcess,
    WorkerSection,
    check,
    discovery_options,
    read_cluster,
    router_options,
    worker_options,
)
from kvferry.reference.cluster.needs import demand_installed
from kvferry.reference.models.find import find_model
from kvferry.router.options import BalancePolicy, EngineName, OnFailure, RouterOptions
from kvferry.router.worker_pool import WorkerRole

PREFILL, DECODE = "tp=3", "tp=1"
MOST_S = 86400
# Of the namespace, but no flags of a cluster.
OTHER = ("run", "json", "config", "part", "name", "print_config")
ROUTING = ("policy", "on_failure", "deadline")
FOREIGN = {
    "discovery": ("prefill", "decode", "model", "tiny", "transport", "device", *ROUTING),
    "worker": ("prefill", "decode", *ROUTING),
    "router": ("prefill", "decode", "model", "tiny", "transport", "device"),
}


def add_cluster_flags(parser: argparse.ArgumentParser, *, config: bool = False) -> None:
    """What describes a whole cluster."""
    if config:
        parser.add_argument("--config", metavar="FILE", help="a TOML file instead of the flags")
    add_model(parser)
    for name, default in (("prefill", PREFILL), ("decode", DECODE)):
        parser.add_argument(
            f"--{name}",
            metavar="SIDE",
            help=f"tp, pp, page, order, dtype, and dp for the number of instances ({default})",
        )
    add_transport(parser)
    add_device(parser)
    add_routing(parser)
    add_listening(parser, "8000")
    add_key_and_json(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder of the Llama or Qwen3 family (SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--tiny",
        action="store_const",
        const=True,
        help="a small random model, which talks nonsense",
    )


def add_transport(parser: argparse.ArgumentParser) -> None:
    """What carries the cache."""
    parser.add_argument(
        "--transport",
        metavar="NAME",
        help="auto: the best for each pair of workers; or shm, cuda, nixl, mooncake, or several "
        "as in shm,nixl (auto)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """What computes."""
    parser.add_argument("--device", metavar="NAME", help="cpu, or cuda with a GPU a rank (cpu)")


def add_routing(parser: argparse.ArgumentParser) -> None:
    """How requests are spread, and what happens when a worker fails."""
    parser.add_argument("--policy", choices=list(BalancePolicy), help="how workers are chosen")
    parser.add_argument(
        "--on-failure",
        choices=list(OnFailure),
        help="when a cache does not come: ask another prefill, let decode compute the prompt "
        "(default), or answer with the reason",
    )
    parser.add_argument("--deadline", metavar="S", help="seconds for a whole request (600)")


def add_listening(parser: argparse.ArgumentParser, port: str) -> None:
    """Where."""
    parser.add_argument("--host", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", metavar="N", help=f"0 for any ({port})")


def add_key_and_json(parser: argparse.ArgumentParser) -> None:
    """What every part has."""
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster key (what KVFERRY_KEY_FILE names, or none)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_print_config(parser: argparse.ArgumentParser) -> None:
    """For who wants to know before anything starts."""
    parser.add_argument(
        "--print-config",
        action="store_const",
        const=True,
        help="print what would hold and where each value came from, and start nothing",
    )


# ---------------------------------------------------------------- reading


def cluster_of(args: argparse.Namespace) -> ClusterDescription:
    """A whole cluster, out of a file or out of flags, of which this machine has every part."""
    path = given("--config", getattr(args, "config", None))
    if path is not None:
        demand_no_flags(args)
        cluster = read_cluster(path)
        if not cluster.decode:
            raise InputError(f"{path} has no [[decode]] worker, and nobody could answer; add one")
    else:
        cluster = _described(args)
    demand_installed(cluster.model, cluster.transport)
    return cluster


def _described(args: argparse.Namespace) -> ClusterDescription:
    return ClusterDescription(
        model=_model(args),
        transport=given("--transport", args.transport) or "auto",
        key=given("--key", args.key),
        discovery=DiscoverySection(port=0),
        router=_router(args),
        prefill=(_section(args.prefill, "--prefill", PREFILL, _words(args, "device")),),
        decode=(_section(args.decode, "--decode", DECODE, _words(args, "device")),),
    )


def discovery_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a discovery service."""
    path = given("--config", args.config)
    if path is not None:
        demand_no_flags(args)
        return discovery_options(read_cluster(path))
    section = DiscoverySection(**_listening(args))
    return discovery_options(ClusterDescription(discovery=section, key=given("--key", args.key)))


def router_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a router."""
    path = given("--config", args.config)
    if path is not None:
        demand_no_flags(args)
        cluster = read_cluster(path)
        return router_options(cluster, cluster.discovery.address)
    urls = {f"{name}_urls": tuple(getattr(args, f"{name}_url") or ()) for name in WorkerRole}
    engine = {} if args.engine is None else {"engine": EngineName(args.engine)}
    discovery = given("--discovery", args.discovery)
    if discovery is None and not urls["decode_urls"]:
        raise InputError("a router without workers; give --discovery or --decode-url")
    cluster = ClusterDescription(
        router=_router(args, **urls, **engine), key=given("--key", args.key)
    )
    return router_options(cluster, discovery)


def worker_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a worker."""
    path = given("--config", args.config)
    part, name = WorkerRole(args.part), given("--name", args.name)
    if path is not None:
        demand_no_flags(args)
        cluster = read_cluster(path)
        discovery: str | None = cluster.discovery.address
    else:
        cluster = _single(args, part, name)
        discovery = given("--discovery", args.discovery)
    worker = _picked(cluster, part, name, path or "--layout")
    demand_installed(cluster.model, cluster.transport)
    model = find_model(cluster.model)
    check(cluster, model)
    return worker_options(cluster, worker, model, discovery)


def _single(args: argparse.Namespace, part: WorkerRole, name: str | None) -> ClusterDescription:
    """A cluster of one worker, which knows of no other."""
    fields = _listening(args) | _words(args, "device", "advertise") | {"name": name or ""}
    section = _section(args.layout, "--layout", "tp=1", fields)
    if section.instances != 1:
        raise InputError("one process runs one instance; start dp of them, each with its --name")
    return ClusterDescription(
        model=_model(args),
        transport=given("--transport", args.transport) or "auto",
        key=given("--key", args.key),
        prefill=(section,) if part is WorkerRole.PREFILL else (),
        decode=(section,) if part is WorkerRole.DECODE else (),
    )


def _picked(
    cluster: ClusterDescription, part: WorkerRole, name: str | None, path: str
) -> NamedProcess:
    """The worker that is meant among those of a file."""
    workers = [worker for worker in cluster.workers() if worker.part is part]
    fitting = [worker for worker in workers if name in (None, worker.name)]
    if len(fitting) == 1:
        return fitting[0]
    if not workers:
        raise InputError(f"{path} has no [[{part}]] worker; add one")
    names = ", ".join(worker.name for worker in workers)
    raise InputError(f"{path} has the {part} workers {names}; pick one with --name")


def _section(
    text: str | None, flag: str, default: str, fields: dict[str, Any] | None = None
) -> WorkerSection:
    """A side as the user typed it."""
    side = read_side(default if text is None else text, flag)
    sharding = side.layout["sharding"]
    if sharding.cp != 1:
        raise InputError(f"{flag}: this engine has no context parallelism; leave cp out")
    read = {
        "tp": sharding.tp,
        "pp": sharding.pp,
        "stages": sharding.stages,
        "instances": side.layout.get("dp"),
        "page": side.layout.get("page_tokens"),
        "order": side.layout.get("order"),
        "dtype": side.dtype,
    }
    stated = {key: value for key, value in read.items() if value is not None}
    return WorkerSection(**stated, **(fields or {}))


def _model(args: argparse.Namespace) -> str:
    name = given("--model", args.model)
    if args.tiny and name:
        raise InputError("--tiny is a model already; drop it or --model")
    return "tiny" if args.tiny else name or ""


def _router(args: argparse.Namespace, **more: Any) -> RouterOptions:
    fields = _listening(args) | more
    if args.policy is not None:
        fields["policy"] = BalancePolicy(args.policy)
    if args.on_failure is not None:
        fields["on_failure"] = OnFailure(args.on_failure)
    if given("--deadline", args.deadline) is not None:
        fields["deadline_s"] = number("--deadline", 0.1, MOST_S)(args.deadline)
    return RouterOptions(**fields)


def _listening(args: argparse.Namespace) -> dict[str, Any]:
    fields = _words(args, "host")
    if given("--port", args.port) is not None:
        fields["port"] = _port(args.port)
    return fields


def _port(text: str) -> int:
    port = whole("--port", least=0)(text)
    if port >= 1 << 16:
        raise InputError(f"a port is between 0 and 65535, not {port}; 0 takes any that is free")
    return port


def _words(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: given(f"--{name}", getattr(args, name, None)) for name in names}
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- what goes together


def demand_no_flags(args: argparse.Namespace) -> None:
    """A file says it all: a flag beside it would be a riddle."""
    for name, value in vars(args).items():
        if name not in OTHER and value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"--config says what {flag} would; put it into the file")


def demand_own(args: argparse.Namespace, part: str) -> None:
    """Refuse flags of the whole cluster that this part has no use for."""
    for name in FOREIGN[part]:
        if getattr(args, name) is not None:
            raise InputError(f"a {part} has no use for --{name.replace('_', '-')}; drop it")
