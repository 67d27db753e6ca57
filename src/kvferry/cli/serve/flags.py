"""The flags of ``kvferry serve`` and ``kvferry demo``, and the cluster that they describe.

A flag that is not given is None, so that ``--config`` can refuse flags beside it.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli.needs import demand_installed
from kvferry.cli.parsing import given, number, whole
from kvferry.cli.sides import read_side
from kvferry.errors import InputError
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoveryOptions,
    DiscoverySection,
    NamedWorker,
    WorkerSection,
    check,
    read_cluster,
    router_options,
    worker_options,
)
from kvferry.reference.models.find import find_model
from kvferry.reference.options import InstanceOptions
from kvferry.router.options import (
    BalancePolicy,
    EngineName,
    FirstTokenFrom,
    OnFailure,
    PullOptions,
    RouterOptions,
)
from kvferry.router.worker_pool import WorkerRole

PREFILL, DECODE = "tp=3", "tp=1"
MAX_DEADLINE_S = 86400
STATUS_PORT = 7078
# Entries of the namespace that are no flags of a cluster.
NO_FLAGS = ("run", "json", "config", "kind", "part", "name", "print_config")
SIDES, ENGINE = ("prefill", "decode"), ("model", "tiny", "transport", "device")
ROUTING = ("policy", "on_failure", "deadline")
# Flags of the whole cluster that a part alone does not use.
FOREIGN = {
    "discovery": ("discovery", *SIDES, *ENGINE, *ROUTING),
    "worker": (*SIDES, *ROUTING),
    "router": (*SIDES, *ENGINE),
    "status": (*SIDES, *ENGINE, *ROUTING),
}


FLAGS: dict[str, dict[str, Any]] = {
    "config": {"metavar": "FILE", "help": "the cluster's TOML file, instead of the other flags"},
    "model": {
        "metavar": "PATH",
        "help": "a Hugging Face folder of the Llama or Qwen3 family (SmolLM2-135M-Instruct)",
    },
    "tiny": {
        "action": "store_const",
        "const": True,
        "help": "a small random model, whose answers are nonsense",
    },
    "prefill": {
        "metavar": "SIDE",
        "help": f"tp, page, order, dtype, and dp for the number of instances ({PREFILL})",
    },
    "decode": {"metavar": "SIDE", "help": f"the same for decode ({DECODE})"},
    "transport": {
        "metavar": "NAME",
        "help": "auto: the best for each pair of workers; or shm, cuda, nixl, mooncake, or several "
        "as in shm,nixl (auto)",
    },
    "device": {"metavar": "NAME", "help": "cpu, or cuda with one GPU for each rank (cpu)"},
    "policy": {"choices": list(BalancePolicy), "help": "how workers are chosen"},
    "on-failure": {
        "choices": list(OnFailure),
        "help": "if a transfer fails: ask another prefill worker, let decode compute the prompt "
        "(default), or answer with the reason",
    },
    "deadline": {"metavar": "S", "help": "seconds for a whole request (600)"},
    "host": {"help": "where to listen (127.0.0.1)"},
    "port": {"metavar": "N", "help": "0 for any"},
    "key": {"metavar": "FILE", "help": "the cluster key (KVFERRY_KEY_FILE, or none)"},
    "json": {"action": "store_true", "help": "print one JSON document"},
    "print-config": {
        "action": "store_const",
        "const": True,
        "help": "print the resulting configuration as JSON, and start nothing",
    },
    "name": {"help": "the worker's name, unique in the cluster (prefill-0, decode-0)"},
    "layout": {"metavar": "SIDE", "help": "as in tp=3,page=16 (tp=1)"},
    "discovery": {
        "metavar": "URL",
        "help": "where workers register and are found: the URL of "
        "a discovery service that runs already, or etcd://HOST:PORT/PREFIX",
    },
    "advertise": {"metavar": "HOST", "help": "where others reach it, if not --host"},
    "engine": {"choices": list(map(str, EngineName)), "help": "what the workers run (kvferry)"},
    "decode-engine": {
        "choices": [str(EngineName.VLLM), str(EngineName.SGLANG)],
        "help": "what the decode workers run, if prefill runs the other of vllm and sglang",
    },
    "max-in-flight": {
        "metavar": "N",
        "help": "requests at a decode worker that reports no limit, such as vLLM's (no limit)",
    },
    "pull": {
        "choices": ["on", "off"],
        "help": "whether prefill pulls a conversation's cache from who last held it (on)",
    },
    "first-token": {
        "choices": list(map(str, FirstTokenFrom)),
        "help": "which of vLLM's workers sends a stream's first token, where prefill can (prefill)",
    },
}


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add some of the flags above."""
    for name in names:
        parser.add_argument(f"--{name}", **FLAGS[name])


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model."""
    add_flags(parser, "model", "tiny")


# ---------------------------------------------------------------- reading


def cluster_of(args: argparse.Namespace) -> ClusterDescription:
    """Return a whole cluster, from a file or from flags."""
    cluster = _from_file(args)
    if cluster is None:
        cluster = _described(args)
    elif not cluster.decode:
        raise InputError(f"{args.config} has no [[decode]] worker to answer requests; add one")
    demand_installed(cluster.model, cluster.transport)
    return cluster


def _from_file(args: argparse.Namespace) -> ClusterDescription | None:
    """Return the cluster of ``--config``, if it is given; flags beside it are refused."""
    path = given("--config", getattr(args, "config", None))
    if path is None:
        return None
    for name, value in vars(args).items():
        if name not in NO_FLAGS and value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"--config says what {flag} would; put it into the file")
    return read_cluster(path)


def _described(args: argparse.Namespace, **fields: Any) -> ClusterDescription:
    if not fields:
        device = _words(args, "device")
        fields = {
            "discovery": DiscoverySection(
                port=0, existing=given("--discovery", args.discovery) or ""
            ),
            "router": _router(args),
            "prefill": (_section(args.prefill, "--prefill", PREFILL, device),),
            "decode": (_section(args.decode, "--decode", DECODE, device),),
        }
    return ClusterDescription(
        model=_model(args),
        transport=given("--transport", args.transport) or "auto",
        key=given("--key", args.key),
        **fields,
    )


def discovery_of(args: argparse.Namespace) -> DiscoveryOptions:
    """Return the options of a discovery service."""
    cluster = _from_file(args)
    if cluster is None:
        section = DiscoverySection(**_listening(args))
        cluster = ClusterDescription(discovery=section, key=given("--key", args.key))
    return DiscoveryOptions(section=cluster.discovery, key=cluster.key)


def status_of(args: argparse.Namespace) -> DiscoveryOptions:
    """Return the options of a status service."""
    advertise = given("--advertise", args.advertise) or ""
    cluster = _from_file(args)
    if cluster is None:
        existing = given("--discovery", args.discovery) or ""
        section = DiscoverySection(existing=existing, **{"port": STATUS_PORT} | _listening(args))
        cluster = ClusterDescription(discovery=section, key=given("--key", args.key))
    if not cluster.discovery.needs_status:
        raise InputError(
            "a status service is for a cluster on etcd; give --discovery etcd://HOST:PORT/PREFIX"
        )
    return DiscoveryOptions(section=cluster.discovery, key=cluster.key, advertise=advertise)


def router_of(args: argparse.Namespace) -> RouterOptions:
    """Return the options of a router."""
    cluster = _from_file(args)
    if cluster is not None:
        return router_options(cluster, cluster.discovery.address)
    fields: dict[str, Any] = {
        f"{name}_urls": tuple(getattr(args, f"{name}_url") or ()) for name in WorkerRole
    }
    if args.engine is not None:
        fields["engine"] = EngineName(args.engine)
    if args.decode_engine is not None:
        fields["decode_engine"] = EngineName(args.decode_engine)
    if args.first_token is not None:
        fields["first_token"] = FirstTokenFrom(args.first_token)
    if args.pull is not None:
        fields["pull"] = PullOptions(enabled=args.pull == "on")
    if given("--max-in-flight", args.max_in_flight) is not None:
        fields["max_in_flight"] = whole("--max-in-flight", least=1)(args.max_in_flight)
    discovery = given("--discovery", args.discovery)
    if discovery is None and not fields["decode_urls"]:
        raise InputError("a router without workers; give --discovery or --decode-url")
    key = given("--key", args.key)
    return router_options(ClusterDescription(router=_router(args, **fields), key=key), discovery)


def worker_of(args: argparse.Namespace) -> InstanceOptions:
    """Return the options of a worker."""
    part, name = WorkerRole(args.part), given("--name", args.name)
    cluster = _from_file(args)
    if cluster is not None:
        discovery: str | None = cluster.discovery.address
    else:
        fields = _listening(args) | _words(args, "device", "advertise") | {"name": name or ""}
        section = _section(args.layout, "--layout", "tp=1", fields)
        if section.instances != 1:
            raise InputError(
                "one process runs one instance; start dp of them, each with its --name"
            )
        cluster = _described(args, **{str(part): (section,)})
        discovery = given("--discovery", args.discovery)
    worker = _picked(cluster, part, name, getattr(args, "config", None) or "--layout")
    demand_installed(cluster.model, cluster.transport)
    model = find_model(cluster.model)
    check(cluster, model)
    return worker_options(cluster, worker, model, discovery)


def _picked(
    cluster: ClusterDescription, part: WorkerRole, name: str | None, path: str
) -> NamedWorker:
    """Return the worker of that name; without a name, the only one."""
    workers = [worker for worker in cluster.workers() if worker.role is part]
    fitting = [worker for worker in workers if name in (None, worker.name)]
    if len(fitting) == 1:
        return fitting[0]
    if not workers:
        raise InputError(f"{path} has no [[{part}]] worker; add one")
    names = ", ".join(worker.name for worker in workers)
    raise InputError(f"{path} has the {part} workers {names}; pick one with --name")


def _section(text: str | None, flag: str, default: str, fields: dict[str, Any]) -> WorkerSection:
    """Return a worker's section from a side such as ``tp=3,page=16``."""
    side = read_side(default if text is None else text, flag)
    sharding = side.layout["sharding"]
    for name in ("pp", "cp"):
        if getattr(sharding, name) != 1:
            raise InputError(f"{flag}: this engine shards by tp only; leave {name} out")
    read = {
        "tp": sharding.tp,
        "instances": side.layout.get("dp"),
        "page": side.layout.get("page_tokens"),
        "order": side.layout.get("order"),
        "dtype": side.dtype,
    }
    stated = {key: value for key, value in read.items() if value is not None}
    return WorkerSection(**stated, **fields)


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
        fields["deadline_s"] = number("--deadline", 0.1, MAX_DEADLINE_S)(args.deadline)
    return RouterOptions(**fields)


def _listening(args: argparse.Namespace) -> dict[str, Any]:
    fields = _words(args, "host")
    if given("--port", args.port) is not None:
        port = whole("--port", least=0)(args.port)
        if port >= 1 << 16:
            raise InputError(f"a port is between 0 and 65535, not {port}; 0 takes any that is free")
        fields["port"] = port
    return fields


def _words(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: given(f"--{name}", getattr(args, name, None)) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def demand_own(args: argparse.Namespace) -> None:
    """Refuse flags of the whole cluster that the part ``args.kind`` does not use."""
    for name in FOREIGN[args.kind]:
        if getattr(args, name) is not None:
            raise InputError(f"a {args.kind} has no use for --{name.replace('_', '-')}; drop it")
