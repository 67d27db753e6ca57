"""Which vLLM versions the connector accepts."""

from __future__ import annotations

import logging

import pytest

from kvferry.connectors.vllm.compat import HOOKS, TESTED_VERSIONS, check_version
from kvferry.errors import InputError

Complete = type("Complete", (), dict.fromkeys(HOOKS))


@pytest.mark.parametrize("release", TESTED_VERSIONS)
def test_a_tested_version_is_accepted_without_a_word(
    release: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(f"{release}.1+cpu", object)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0rc1", "dev"])
def test_another_version_with_all_hooks_runs_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version, Complete)
    assert f"untested-version vllm={version}" in caplog.text


@pytest.mark.parametrize("hook", HOOKS)
def test_a_missing_hook_is_named(hook: str) -> None:
    lacking = type("Lacking", (), dict.fromkeys(set(HOOKS) - {hook}))
    with pytest.raises(InputError, match=rf"no connector hook {hook}\(\); install a tested"):
        check_version("0.99.0", lacking)


@pytest.mark.parametrize("version", ["0.30.0", "0.9.2+cpu"])
def test_an_older_version_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="is too old; install a tested version"):
        check_version(version, Complete)
