"""Connections to nodes, links between processes, resolved names, and coroutines without a task."""
