"""Which vLLM versions the connector accepts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm.compat import (
    HOOKS,
    STEP_FIELDS,
    TESTED_VERSIONS,
    check_version,
    engine_waker,
    missing_import,
)
from kvferry.errors import InputError


def with_names(*names: str) -> type:
    return type("Complete", (), dict.fromkeys(names))


@pytest.mark.parametrize("release", TESTED_VERSIONS)
def test_a_tested_version_is_accepted_without_a_word(
    release: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(f"{release}.1+cpu", object, object)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.29.1", "0.33.0", "1.0.0rc1", "dev"])
def test_another_version_with_all_hooks_runs_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version, with_names(*HOOKS), with_names(*STEP_FIELDS))
    assert f"untested-version vllm={version}" in caplog.text


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("version", ["0.9.2+cpu", "0.99.0"])
def test_a_missing_hook_is_named(version: str, hook: str) -> None:
    lacking = with_names(*set(HOOKS) - {hook})
    with pytest.raises(InputError, match=rf"no connector hook {hook}\(\); install a tested"):
        check_version(version, lacking, with_names(*STEP_FIELDS))


@pytest.mark.parametrize("field", STEP_FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    lacking = with_names(*set(STEP_FIELDS) - {field})
    with pytest.raises(InputError, match=rf"no SchedulerOutput\.{field}; install a tested"):
        check_version("0.99.0", with_names(*HOOKS), lacking)


def test_a_name_that_can_not_be_imported_is_reported() -> None:
    error = missing_import("0.9", ImportError("cannot import name 'SupportsHMA'"))
    assert "'SupportsHMA'); install a tested version" in str(error)


class EngineCore:
    """Makes its scheduler in its constructor, as vLLM's core does."""

    def __init__(self, *, has_queue: bool) -> None:
        if has_queue:
            self.input_queue: Queue[object] = Queue()
        self.wake = self._make_scheduler()

    def _make_scheduler(self) -> Callable[[], None] | None:
        return engine_waker()


def test_an_idle_engine_is_woken_by_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(WAKEUP=b"wake")
    engine = SimpleNamespace(EngineCoreRequestType=kinds)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", engine)
    core = EngineCore(has_queue=True)
    assert core.wake is not None
    core.wake()
    assert core.input_queue.get_nowait() == (b"wake", None)


def test_an_engine_without_a_queue_is_not_woken(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineCore(has_queue=False).wake is None
    assert "pulls-not-answered" in caplog.text
