"""Validation of server URLs that users enter."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvferry.errors import InputError


def checked_address(url: str, what: str, example: str) -> str:
    """Return ``url`` without a trailing slash. Raises ``InputError`` unless it is HOST:PORT only.

    ``what`` names the kind of URL in the error, and ``example`` shows one.
    """
    try:
        parts = urlsplit(url)
        plain = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        plain = None
    if not plain or parts.path.strip("/") or parts.query or parts.fragment or "@" in url:
        raise InputError(f"{url!r:.200} is not a {what}; give one such as {example}")
    return url.rstrip("/")
