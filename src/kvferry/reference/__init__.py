"""The reference engine: what an integration of kvferry looks like, small enough to read.

Needs the extra ``kvferry[serve]``. Importing this package imports no torch; its
modules do.
"""
