"""Metrics, logs, problems, history and traces for operators, fed by the gateway's events."""
