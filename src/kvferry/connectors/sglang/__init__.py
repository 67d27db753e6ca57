"""SGLang's transfer backend ``kvferry``: kvferry's rooms behind SGLang's interface.

``plugin`` registers it (``--disaggregation-transfer-backend kvferry``), ``compat`` knows the
versions of SGLang, ``server_args`` reads the scheduler's configuration, and ``unsupported`` rejects
what the backend does not support; only these import SGLang or torch. ``pools``, ``geometry``,
``index_keys``, ``states``, ``windows``, ``instances`` and ``prompts`` are pure. ``managers`` holds
the endpoint of a rank, ``sender`` and ``receiver`` one room each. Users read
``docs/connectors/sglang.md``.
"""
