"""HTTP of the listeners: protocol, connections, TLS, heads and bodies within their limits."""
