"""Connections to nodes: our own pool for the relay, and plain httpx on top of it for all else."""
