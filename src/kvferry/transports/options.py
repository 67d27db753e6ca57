"""A transport's own options: known by name, with a default each."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.errors import TransportError
from kvferry.transports.base import TransportSetup


def chosen(name: str, setup: TransportSetup, defaults: Mapping[str, str]) -> dict[str, str]:
    """What was asked for, and the default of all else."""
    unknown = sorted(set(setup.options) - set(defaults))
    if unknown:
        raise TransportError(
            f"the {name} transport has no option {unknown[0]!r}; it has {', '.join(defaults)}"
        )
    return {**defaults, **setup.options}
