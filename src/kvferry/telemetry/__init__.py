"""Telemetry of an endpoint: the observer interface, and metrics, traces and spans behind it."""
