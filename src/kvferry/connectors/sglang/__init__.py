"""SGLang's transfer backend ``kvferry``: rooms of kvferry behind SGLang's own method names.

``plugin`` offers it to SGLang (``--disaggregation-transfer-backend kvferry``), ``facts`` reads
what the engine knows of itself and ``support`` refuses what can't be carried; nothing else here
imports SGLang or torch. ``pools``, ``geometry``, ``index_keys``, ``states``, ``windows``,
``instances``, ``metadata`` and ``prompts`` decide and are pure.
``managers``, ``sender`` and ``receiver`` act: one endpoint a rank, one handle a room.
``docs/connectors/sglang.md`` is for who runs it.
"""
