"""Metrics and logs for operators, both fed by the events of `gateway.events`."""
