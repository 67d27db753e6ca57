"""Read-only bearer tokens, made from the cluster key, with an expiry time.

A token opens what the status page shows and nothing else. It travels in the clear
(``Authorization: Bearer TOKEN``) and can be used any number of times, so anybody who reads it on
the wire can use it too. Pure; the time is an argument.
"""

from __future__ import annotations

import hmac
import re

from kvferry.security.signing import mac

SCHEME = "Bearer"
TOKEN = re.compile(r"kvr1\.([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)
_PURPOSE = "read only"
HOW_TO_MAKE_ONE = "make one with `kvferry key FILE --token`"


def make_token(key: bytes, until: float) -> str:
    """Return a token that expires at ``until`` (Unix seconds)."""
    end = str(int(until))
    return f"kvr1.{end}.{mac(key, _PURPOSE, end)}"


def token_problem(key: bytes, header: str, now: float) -> str | None:
    """Return why this ``Authorization`` header is not a valid token; None if it is."""
    scheme, _, token = header.partition(" ")
    if scheme != SCHEME:
        return f"this needs a token with read access; {HOW_TO_MAKE_ONE}"
    parts = TOKEN.fullmatch(token.strip())
    if parts is None:
        return f"that is not a read-only token; {HOW_TO_MAKE_ONE}"
    end, given = parts.groups()
    if not hmac.compare_digest(given, mac(key, _PURPOSE, end)):
        return f"the token was made with another cluster key; {HOW_TO_MAKE_ONE}"
    if now > int(end):
        return f"the token has expired; {HOW_TO_MAKE_ONE}"
    return None
