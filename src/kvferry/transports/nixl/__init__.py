"""The NIXL transport: one agent, its peers, and writes in batches."""

from kvferry.transports.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
