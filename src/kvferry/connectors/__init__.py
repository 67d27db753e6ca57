"""Connectors for inference engines, one package per engine.

A connector implements the engine's plug-in interface: it describes the engine's caches as a layout
and pools, maps the engine's hooks to opening, pushing and closing rooms, and combines the results
of its ranks. It imports its engine and the public names of ``kvferry``, but no submodule
(``pyproject.toml``, ``[tool.importlinter]``). ``reference/transfer`` does the same for the
reference engine.
"""
