"""What nodes are, can do and remember: health, circuits, leases, speed, and the set of them."""
