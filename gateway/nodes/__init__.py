"""Nodes: what is known and learnt of each, leases on their slots, and the fleet of all of them."""
