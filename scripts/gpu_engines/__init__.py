"""Run real vLLM and SGLang servers with kvferry on a GPU machine that cannot install packages.

``pack`` makes a payload on a machine with network access; ``run`` unpacks it beside a checkout,
starts the servers, checks the cases of an engine and measures it beside the engine's own transfer.
"""
