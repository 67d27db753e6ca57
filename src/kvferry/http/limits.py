"""Limits on connections: how many a server holds, and for how long when idle. Pure but for one."""

from __future__ import annotations

import resource

import msgspec

# As many as the kernel keeps for us until we accept them; all may be accepted in one go.
BACKLOG = 256
# Open files that are no connections: libraries, pipes, weights, the log; and those just accepted.
RESERVED_FILES = 256 + BACKLOG
MOST_CONNECTIONS = 8192
# A limit without bound is no reason for a table without bound.
MOST_FILES = 65536


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``header_s`` is for a request's headers to be complete, from the connection's beginning or
    the request's first byte; ``keepalive_s`` for the next request to begin.
    """

    connections: int = MOST_CONNECTIONS
    header_s: float = 15.0
    # Above the minute for which proxies keep a connection, so that they close it and not we.
    keepalive_s: float = 75.0


def connections_for(open_files: int, files_each: int) -> int:
    """How many connections fit if each may need that many open files in all."""
    return max(16, min(MOST_CONNECTIONS, (open_files - RESERVED_FILES) // files_each))


def limits_here(files_each: int) -> HttpLimits:
    """For this process, as it may open files now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return HttpLimits(connections=connections_for(open_files, files_each))


def raise_open_files() -> None:
    """Allow this process as many open files as its user may have. For programs, not libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
