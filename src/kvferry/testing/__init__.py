"""Public test support for authors of engines, transports and discovery services.

- ``transports`` and ``discovery`` are conformance suites: subclass them in a test module.
- ``strategies`` draws caches and layouts for Hypothesis.
- ``fleet`` starts real processes with real endpoints, and checks every byte that they carry.
- ``sim`` runs the real machines with faults in simulated time and memory.
- ``explore`` visits every interleaving of one small room.
- ``ports`` reserves ports for servers that start slowly.
"""
