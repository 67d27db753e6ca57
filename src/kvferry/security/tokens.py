"""Tokens that let somebody look and change nothing, made from the cluster key, until a time.

Who has one can read what the page shows, and whoever overhears it can too: it is sent as it
is (``Authorization: Bearer TOKEN``) and is good as often as one likes. Pure; time is given.
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
    """Good for looking, until that time of day."""
    end = str(int(until))
    return f"kvr1.{end}.{mac(key, _PURPOSE, end)}"


def token_problem(key: bytes, header: str, now: float) -> str | None:
    """Why whoever sends this ``Authorization`` may not look; None if they may."""
    scheme, _, token = header.partition(" ")
    if scheme != SCHEME:
        return f"this needs a token that lets you look; {HOW_TO_MAKE_ONE}"
    parts = TOKEN.fullmatch(token.strip())
    if parts is None:
        return f"that is no token for looking; {HOW_TO_MAKE_ONE}"
    end, given = parts.groups()
    if not hmac.compare_digest(given, mac(key, _PURPOSE, end)):
        return f"the token was made with another cluster key; {HOW_TO_MAKE_ONE}"
    if now > int(end):
        return f"the token has expired; {HOW_TO_MAKE_ONE}"
    return None
