"""Copies of bound pieces: gather, scatter and direct copies, on the CPU and on GPUs."""
