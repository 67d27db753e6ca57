"""Options of a transport: known names, each with a default."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.errors import TransportError
from kvferry.transports.base import TransportSetup


def resolve_options(
    transport: str, setup: TransportSetup, defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the options of ``setup``, completed with ``defaults``. Unknown names are refused."""
    unknown = sorted(set(setup.options) - set(defaults))
    if unknown:
        known = f"it has {', '.join(defaults)}" if defaults else "it has none; remove the option"
        raise TransportError(f"the {transport} transport has no option {unknown[0]!r}; {known}")
    return {**defaults, **setup.options}
