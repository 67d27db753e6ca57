"""GPU memory of other processes, mapped: what a target exports and what a source writes into."""

from kvferry.transports.cuda.transport import CudaTransport

__all__ = ["CudaTransport"]
