"""Which settings serve a model best on this machine, by measuring the real server."""
