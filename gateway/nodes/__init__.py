"""Nodes: their health, circuits, leases, speed and prompt caches, and the fleet of all of them."""
