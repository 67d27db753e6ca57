"""Public test support: Hypothesis strategies for caches and layouts."""
