"""Limits of a server: how many connections it holds, and for how long when idle."""

from __future__ import annotations

import resource

import msgspec

# Connections that the kernel queues until they are accepted. All may be accepted at once.
BACKLOG = 256
# Open files that are not connections (libraries, pipes, weights, logs), and those just accepted.
RESERVED_FILES = 256 + BACKLOG
MOST_CONNECTIONS = 8192
# Used if the process may open any number of files.
MOST_FILES = 65536


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Connection limits of one server.

    ``header_s``: for a request's headers to be complete, from the start of the connection or the
    request's first byte. ``keepalive_s``: for the next request to begin.
    """

    connections: int = MOST_CONNECTIONS
    header_s: float = 15.0
    # Longer than the minute that proxies use, so that they close idle connections first.
    keepalive_s: float = 75.0


def connections_for(open_files: int, files_each: int) -> int:
    """Return how many connections fit if each needs ``files_each`` open files."""
    return max(16, min(MOST_CONNECTIONS, (open_files - RESERVED_FILES) // files_each))


def limits_here(files_each: int) -> HttpLimits:
    """Return the limits that fit this process's current limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return HttpLimits(connections=connections_for(open_files, files_each))


def raise_open_files() -> None:
    """Raise this process's limit of open files to its maximum. For programs, not libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
