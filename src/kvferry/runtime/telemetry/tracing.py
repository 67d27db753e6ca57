"""The thread that gives an endpoint's rooms to OpenTelemetry, once they have ended.

It runs only where somebody wants spans: the program has set up a tracer provider, or
OpenTelemetry's own environment variables name an exporter and the extra ``otel`` is there.
It asks the owner once a second for the stories of what has ended since, so the owner itself
makes no span.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from kvferry.observe.spans import TRACER, emit
from kvferry.observe.steps import RoomStory

log = logging.getLogger("kvferry.runtime")

EVERY_S = 1.0
VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
# The stories of rooms that have ended since a time, made on the owner's thread.
Ended = Callable[[float], "Future[list[RoomStory]]"]


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    named = [environment.get(name, "") for name in VARIABLES]
    return any(named) and environment.get("OTEL_TRACES_EXPORTER") != "none"


def find_tracer(environment: Mapping[str, str] = os.environ) -> Any | None:
    """Where spans go: to the program's own provider, or where the variables say; else nowhere."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - of the extra
    except ImportError:
        if wanted(environment):
            log.warning("no-spans problem=%r", "run pip install 'kvferry[otel]'")
        return None
    # What stands in for a provider before the program sets one up is of the API alone.
    provider = trace.get_tracer_provider()
    if hasattr(provider, "add_span_processor"):
        return provider.get_tracer(TRACER)
    return _by_environment() if wanted(environment) else None


def _by_environment() -> Any | None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        log.warning("no-spans problem=%r", "run pip install 'kvferry[otel]'")
        return None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer(TRACER)


class SpanThread:
    """From its making to ``close``, which gives away what has ended by then."""

    def __init__(self, tracer: Any, ended: Ended, name: str, every_s: float = EVERY_S) -> None:
        self._tracer = tracer
        self._ended = ended
        self._every_s = every_s
        self._since = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self._every_s)
            now = time.monotonic()
            try:
                stories = self._ended(self._since).result(self._every_s)
            except TimeoutError:
                # The owner has other things to do, or is gone.
                continue
            self._since = now
            day = time.time() - time.monotonic()
            for story in stories:
                emit(story, self._tracer, day)
