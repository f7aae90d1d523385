"""Forwards requests to nodes: attempts, retries, resumed streams, and one module for each API."""
