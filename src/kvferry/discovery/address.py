"""Addresses of servers as users type them."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvferry.errors import InputError


def checked_address(url: str, what: str, example: str) -> str:
    """An address without a slash at its end; refused if it is none, or more than one."""
    try:
        parts = urlsplit(url)
        plain = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        plain = None
    if not plain or parts.path.strip("/") or parts.query or parts.fragment or "@" in url:
        raise InputError(f"{url!r:.200} is no {what}; give one such as {example}")
    return url.rstrip("/")
