"""The cuda transport: a target exports its GPU memory, and a source maps it and writes into it."""

from kvferry.transports.cuda.transport import CudaTransport

__all__ = ["CudaTransport"]
