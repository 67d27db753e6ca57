"""kvferry carries a request's KV cache between workers that shard it differently."""

__version__ = "0.1.0"
