"""Load on any endpoint that speaks OpenAI's API, and what is measured of it.

Knows HTTP and nothing of kvferry's own server but the ``kvferry`` field of an answer, so it
measures others in the same way.
"""
