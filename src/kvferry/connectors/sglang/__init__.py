"""SGLang's transfer backend ``kvferry``: kvferry's rooms behind SGLang's interface.

``plugin`` registers it (``--disaggregation-transfer-backend kvferry``), ``server_args`` reads the
scheduler's configuration, and ``compat`` rejects unsupported ones; only these import SGLang or
torch. ``pools``, ``geometry``, ``index_keys``, ``states``, ``windows``, ``instances`` and
``prompts`` are pure. ``managers`` holds the endpoint of a rank, ``sender`` and ``receiver`` one
room each. Users read ``docs/connectors/sglang.md``.
"""
