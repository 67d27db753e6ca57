"""The Mooncake transport: one transfer engine, and a thread for its writes."""

from kvferry.transports.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
