"""A cluster: as its user describes it, started and watched over on this machine."""
