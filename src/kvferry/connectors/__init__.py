"""Connectors: kvferry inside other engines, one package for each.

What belongs here is what an engine's own plug-in interface asks for, and
nothing else: where its cache lies as a ``Layout`` and pools, which of its hooks opens,
pushes and closes a room, and how its ranks agree. ``reference/transfer`` does the same for the
reference engine. A connector imports its engine and ``kvferry`` itself, never a module
inside it (``pyproject.toml``, ``[tool.importlinter]``), so what it needs is public.
"""
