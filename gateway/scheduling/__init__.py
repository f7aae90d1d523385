"""Who goes where, and when: the queue, the choice of a node, the lease on its slots."""
