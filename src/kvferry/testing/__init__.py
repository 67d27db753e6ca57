"""Public test support for authors of engines, transports and other implementations.

``strategies`` draws caches and layouts for Hypothesis, ``sim`` plays the real
machines through faults in simulated time and memory, ``explore`` walks every
interleaving of one small room, and ``transports`` and ``discovery`` are conformance suites.
"""
