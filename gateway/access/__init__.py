"""API keys, callers and their classes, fair shares, and where listeners may be exposed."""
