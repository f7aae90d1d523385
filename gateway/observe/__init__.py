"""What operators see: metrics and logs, both fed by the events of `gateway.events`."""
