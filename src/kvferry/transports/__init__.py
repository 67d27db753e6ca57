"""Transports: how bytes get into a peer's memory. ``base`` is the whole interface."""
