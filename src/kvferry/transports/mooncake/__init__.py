"""Mooncake behind the transport interface: its engine, and a courier for calls that wait."""

from kvferry.transports.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
