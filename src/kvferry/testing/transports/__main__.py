"""Entry point of the suite's processes; see ``host``."""

from kvferry.testing.transports.host import main

main()
