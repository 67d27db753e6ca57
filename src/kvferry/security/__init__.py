"""Cluster keys, signed requests and bearer tokens."""
