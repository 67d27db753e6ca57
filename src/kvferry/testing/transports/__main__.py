"""Entry point of the suite's own processes; see ``host``."""

from kvferry.testing.transports.host import main

main()
