"""Checksums of cache content in host memory."""
