"""Liveness ports and probes: how an endpoint proves that a peer's process is dead."""
