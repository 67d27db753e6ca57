"""Discovery: where ranks register, and where others find their instances.

``base`` is the interface. The built-in HTTP service is in ``http``, a static list in ``static``.
"""
