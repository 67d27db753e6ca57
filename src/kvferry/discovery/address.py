"""Validation of server URLs that users enter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from kvferry.errors import InputError

STATIC = "static:"
ETCD = ("etcd://", "etcds://")
HTTP_EXAMPLE = "http://10.0.0.1:7077"
EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379/kvferry"
SCHEMES = ("etcd", "etcds")
TLS_FILES = ("ca", "cert", "key")


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


class EtcdAddress(NamedTuple):
    """A parsed ``etcd://`` URL."""

    members: tuple[str, ...]
    prefix: str
    user: str | None
    password: str | None
    # Paths of PEM files by name: ca, cert, key.
    tls: Mapping[str, str]

    def __str__(self) -> str:
        return f"etcd at {', '.join(self.members)}"


def parse_etcd_url(url: str) -> EtcdAddress:
    """Return the members, prefix and credentials of an ``etcd://`` or ``etcds://`` URL.

    ``etcds`` uses TLS; the query may name PEM files (``?ca=PATH&cert=PATH&key=PATH``).
    """
    try:
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        members = [urlsplit(f"//{host}") for host in hosts.split(",")]
        known = parts.scheme in SCHEMES and all(one.hostname and one.port for one in members)
        files = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    except ValueError:
        known = False
    if not known or not set(files) <= set(TLS_FILES):
        raise InputError(f"{url!r:.200} is not an etcd URL; give one such as {EXAMPLE}")
    if files and parts.scheme == "etcd":
        raise InputError("TLS files need TLS; write etcds:// instead of etcd://")
    scheme = "https" if parts.scheme == "etcds" else "http"
    user, _, password = login.partition(":")
    return EtcdAddress(
        tuple(f"{scheme}://{one.netloc}" for one in members),
        parts.path.strip("/") or "kvferry",
        unquote(user) or None,
        unquote(password) or None,
        files,
    )


def check_discovery_url(url: str) -> None:
    """Raise ``InputError`` unless ``url`` can name a discovery service. Connects to nothing."""
    if url.startswith(ETCD):
        parse_etcd_url(url)
    elif not url.startswith(STATIC):
        checked_address(url, "discovery URL", HTTP_EXAMPLE)
