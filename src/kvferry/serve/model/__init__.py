"""Models: their configuration, one rank's share of them, and the arithmetic."""
