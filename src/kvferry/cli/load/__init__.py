"""Load on any endpoint with OpenAI's API, and its measurements.

Knows nothing of kvferry's server but the ``kvferry`` field of a reply, so that it measures other
servers in the same way.
"""
