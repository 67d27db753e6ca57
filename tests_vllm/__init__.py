"""Real vLLM engines with kvferry between them, in an environment of their own: make test-vllm."""
