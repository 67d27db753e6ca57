"""``kvferry demo``: a cluster on this machine, a few questions, and the proof of the answers."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.cli.files import last_log_line
from kvferry.cli.parsing import whole
from kvferry.cli.serve.flags import (
    DECODE,
    PREFILL,
    add_device,
    add_model,
    add_transport,
    cluster_of,
)

if TYPE_CHECKING:
    from kvferry.cli.demo.ask import Answer
    from kvferry.cli.demo.output import Show
    from kvferry.reference.cluster.description import ClusterDescription, ModelFolder

EXAMPLE = """example:
  kvferry demo                                 prefill TP3, decode TP1, shared memory
  kvferry demo --prefill tp=1 --decode tp=3
  kvferry demo --prefill tp=3 --decode tp=9    three ranks for each of three heads
  kvferry demo --transport nixl --json

exit status: 0 if every token is the same as in a single process, 1 if not, 2 bad input.
"""
EXIT_NOT_EXACT = 1
# Enough for the questions, and small beside the model.
CACHE_TOKENS = 2048


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "demo",
        help="prefill here, decode there, one answer, proven",
        description="Start discovery, a prefill and a decode worker and a router, ask a few "
        "questions at once, and compare the answers token by token with a single process.",
        epilog=EXAMPLE,
    )
    add_model(parser)
    for name, default in (("prefill", PREFILL), ("decode", DECODE)):
        parser.add_argument(
            f"--{name}", metavar="SIDE", help=f"tp, pp, page, order, dp ({default})"
        )
    add_transport(parser)
    add_device(parser)
    parser.add_argument("--tokens", default="32", metavar="N", help="longest answer (32)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    # A demo has no need of these; the cluster's description has.
    parser.set_defaults(run=run, host=None, port="0", key=None)
    parser.set_defaults(policy=None, on_failure=None, deadline=None)


def run(args: argparse.Namespace) -> int:
    """Serve, ask, stop, compare, show."""
    from kvferry.cli.demo.output import Show, as_document  # noqa: PLC0415
    from kvferry.reference.cluster.description import check  # noqa: PLC0415
    from kvferry.reference.models.find import find_model  # noqa: PLC0415

    max_tokens = whole("--tokens")(args.tokens)
    cluster = _small(cluster_of(args))
    with Show(quiet=args.json) as show:
        show.says("preparing the model")
        model = find_model(cluster.model)
        check(cluster, model)
        began = time.monotonic()
        answers = _serve_and_ask(cluster, model, max_tokens, show)
        show.says("everything is stopped; now the same in a single process")

        # The single process comes last, so that nothing of it can be what decode answers from.
        from kvferry.cli.demo.check import compare  # noqa: PLC0415

        alike = cluster.decode[0]
        results = compare(model.folder, answers, max_tokens, alike.dtype, alike.device)
        document = as_document(cluster, model, results, time.monotonic() - began)
        show.results(results, document)
    if args.json:
        print(msgspec.json.encode(document).decode())
    return 0 if document["token_exact"] else EXIT_NOT_EXACT


def _small(cluster: ClusterDescription) -> ClusterDescription:
    """The same with little memory: a demo should fit beside a browser."""
    replace = msgspec.structs.replace
    prefill = tuple(replace(one, cache_tokens=CACHE_TOKENS) for one in cluster.prefill)
    decode = tuple(replace(one, cache_tokens=CACHE_TOKENS) for one in cluster.decode)
    return replace(cluster, prefill=prefill, decode=decode)


def _serve_and_ask(
    cluster: ClusterDescription, model: ModelFolder, max_tokens: int, show: Show
) -> list[Answer]:
    from kvferry.cli.demo.ask import ask_all, questions  # noqa: PLC0415
    from kvferry.reference.cluster.launch import ClusterLaunch, PartFailed  # noqa: PLC0415

    parts = ", ".join(f"{one.name} ({one.section})" for one in cluster.workers())
    with tempfile.TemporaryFile() as log:
        try:
            with ClusterLaunch(stderr=log) as launch:
                show.says(f"starting discovery, {parts}, router; transport {cluster.transport}")
                url = launch.start_all(cluster, model, show.is_ready)
                show.says("asking, all at once")
                return ask_all(url, questions(), max_tokens, show)
        except PartFailed as error:
            raise PartFailed(f"{error}{last_log_line(log)}") from None
