"""Which vLLM versions the connector accepts."""

from __future__ import annotations

import logging

import pytest

from kvferry.connectors.vllm.compat import (
    HOOKS,
    STEP_FIELDS,
    TESTED_VERSIONS,
    check_version,
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
