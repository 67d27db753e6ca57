"""The arithmetic of a model: one rank's share of it, its layers, a step's work as tensors."""
