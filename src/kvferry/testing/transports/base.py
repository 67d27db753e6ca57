"""The base of all cases of the conformance suite: hooks for subclasses, and a crew per test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from kvferry.testing.transports.crew import Crew, Pool
from kvferry.testing.transports.process import TransportKind
from kvferry.transports.base import Transport
from kvferry.transports.registry import load


class Cases:
    """Set ``transport`` to the name of an entry point; the rest is optional.

    ``options`` go into the transport's ``Setup``; ``environment`` is added to that of
    every process. ``device`` is where memory is. ``patience_s`` is how long a write to a
    dead peer may take to end.
    """

    transport: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    device: ClassVar[str] = "cpu"
    patience_s: ClassVar[float] = 30.0

    pool: ClassVar[Pool]
    kind: ClassVar[type[Transport]]

    @classmethod
    def setup_class(cls) -> None:
        """Skip everything if the transport's own needs are not met."""
        cls.kind = load(cls.transport)
        missing = cls.kind.missing()
        if missing:
            pytest.skip(missing)
        cls.pool = Pool(TransportKind(cls.transport, cls.options, cls.environment, cls.device))

    @classmethod
    def teardown_class(cls) -> None:
        """End the processes; each must end by itself and without a crash."""
        statuses = cls.pool.close()
        assert not any(statuses), f"a process ended with a status other than 0: {statuses}"

    @pytest.fixture
    def crew(self) -> Iterator[Crew]:
        """The processes of one test."""
        crew = Crew(self.pool)
        yield crew
        crew.dismiss()
