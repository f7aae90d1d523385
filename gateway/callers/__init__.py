"""API keys, callers and their classes, and what callers use, may use and pay."""
