"""Models as files: which is meant, what its configuration says, weights and tokenizer."""
