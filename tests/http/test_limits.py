"""The number of connections that a process may hold."""

from __future__ import annotations

import pytest

from kvferry.http.limits import MOST_CONNECTIONS, RESERVED_FILES, connections_for


@pytest.mark.parametrize(
    ("open_files", "files_each", "expected"),
    [
        (1024, 2, 256),
        (1024, 4, 128),
        (20_000, 4, 4872),
        (20_000, 1, MOST_CONNECTIONS),
        (1 << 30, 1, MOST_CONNECTIONS),
        (64, 1, 16),
    ],
)
def test_connections_stay_below_open_files(open_files: int, files_each: int, expected: int) -> None:
    assert connections_for(open_files, files_each) == expected
    if open_files > RESERVED_FILES:
        assert expected * files_each + RESERVED_FILES <= open_files or expected == 16
