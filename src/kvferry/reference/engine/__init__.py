"""The engine: what runs next, the pages it runs in, one step on every rank, tokens and text."""
