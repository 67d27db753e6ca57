"""The console script, and ``python -m kvferry``.

Imports the commands only where an interrupt is already caught.
"""

from __future__ import annotations

import sys


def entry() -> None:
    """Run one command."""
    try:
        from kvferry.cli.main import entry as run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        print("kvferry: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    entry()
