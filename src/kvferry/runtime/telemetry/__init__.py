"""Telemetry of an endpoint: what it counts, how long its stages took, whose rooms they were."""
