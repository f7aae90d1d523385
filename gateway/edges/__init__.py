"""Edges: processes that relay connections, and the brain, the one process that decides."""
