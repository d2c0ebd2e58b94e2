"""Metrics for Prometheus, and spans of OpenTelemetry where it is on."""
