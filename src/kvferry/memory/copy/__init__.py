"""Copies: gather and scatter of bound pieces."""
