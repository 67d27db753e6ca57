"""A worker's HTTP API, as OpenAI's clients expect it. Knows the engine's loop, not the engine."""
