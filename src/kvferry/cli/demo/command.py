"""``kvferry demo``: a cluster on this machine, a few questions, and a proof of the answers."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.cli.files import last_log_line
from kvferry.cli.parsing import whole
from kvferry.cli.serve.flags import add_flags, cluster_of

EXAMPLE = """example:
  kvferry demo                                 prefill TP3, decode TP1, shared memory
  kvferry demo --prefill tp=1 --decode tp=3
  kvferry demo --prefill tp=3 --decode tp=9    three ranks for each of three heads
  kvferry demo --transport nixl --json
  kvferry demo --discovery etcd://127.0.0.1:2379/k     over an etcd cluster that runs already

exit status: 0 if every token is the same as in a single process, 1 if not, 2 bad input.
"""
EXIT_NOT_EXACT = 1
# Enough for the questions, and small beside the model.
CACHE_TOKENS = 2048


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "demo",
        help="prefill in one process, decode in another, prove the answers",
        description="Start discovery, a prefill and a decode worker and a router, ask a few "
        "questions at once, and compare the answers token by token with a single process.",
        epilog=EXAMPLE,
    )
    add_flags(parser, "model", "tiny", "prefill", "decode", "transport", "device", "discovery")
    add_flags(parser, "json")
    parser.add_argument("--tokens", default="32", metavar="N", help="longest answer (32)")
    # Flags of ``serve`` that the cluster's description reads.
    parser.set_defaults(run=run, host=None, port="0", key=None)
    parser.set_defaults(policy=None, on_failure=None, deadline=None)


def run(args: argparse.Namespace) -> int:
    """Start a cluster, ask, stop it, compare, and print the results."""
    from kvferry.cli.carried import carried_by_mode  # noqa: PLC0415
    from kvferry.cli.demo.ask import ask_all  # noqa: PLC0415
    from kvferry.cli.demo.check import compare  # noqa: PLC0415
    from kvferry.cli.demo.output import DemoOutput, as_document  # noqa: PLC0415
    from kvferry.reference.cluster.description import check  # noqa: PLC0415
    from kvferry.reference.cluster.launch import ClusterLaunch, PartFailed  # noqa: PLC0415
    from kvferry.reference.models.find import find_model  # noqa: PLC0415

    max_tokens = whole("--tokens")(args.tokens)
    cluster = cluster_of(args)
    prefill, decode = (
        replace(section, cache_tokens=CACHE_TOKENS)
        for section in (*cluster.prefill, *cluster.decode)
    )
    cluster = replace(cluster, prefill=(prefill,), decode=(decode,))
    output = DemoOutput(quiet=args.json)
    output.step("preparing the model")
    model = find_model(cluster.model)
    check(cluster, model)
    began = time.monotonic()
    parts = ", ".join(f"{one.name} ({one.section})" for one in cluster.workers())
    first = "" if cluster.discovery.existing else "discovery, "
    output.step(f"starting {first}{parts}, router; transport {cluster.transport}")
    with tempfile.TemporaryFile() as log:
        try:
            with ClusterLaunch(output=log) as launch:
                url = launch.start_all(
                    cluster, model, lambda name, url: output.step(f"{name} is ready on {url}")
                )
                output.step("asking, all at once")
                answers = ask_all(url, max_tokens, output.answer)
                carried = carried_by_mode(launch)
        except PartFailed as error:
            raise PartFailed(f"{error}{last_log_line(log)}") from None
    # Only now, so that decode cannot have its answers from the single process.
    output.step("everything is stopped; now the same in a single process")
    results = compare(model.folder, answers, max_tokens, decode.dtype, decode.device)
    document = as_document(cluster, model, results, carried, time.monotonic() - began)
    output.results(results, document)
    if args.json:
        print(msgspec.json.encode(document).decode())
    return 0 if document["token_exact"] else EXIT_NOT_EXACT
