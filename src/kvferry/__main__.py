"""``python -m kvferry``."""

from kvferry.cli.main import entry

entry()
