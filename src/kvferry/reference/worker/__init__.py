"""A worker: one instance with its endpoints, its rooms and its jobs, as one process."""
