"""Connections to nodes: the pool of each, names resolved once, and coroutines without a task."""
