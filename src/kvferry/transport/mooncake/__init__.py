"""Mooncake behind the transport interface: its engine, and a courier for calls that wait."""

from kvferry.transport.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
