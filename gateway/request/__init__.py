"""A request as it came: its head and body read within limits, and the `Request` made of it."""
