"""Runs a protocol machine against its ports: the same code in endpoints, simulator, explorer."""
