"""Pulls between the prefix caches of vLLM engines. See ``docs/connectors/vllm.md``."""
