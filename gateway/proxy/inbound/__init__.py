"""From the bytes of a client to a `Request`."""
