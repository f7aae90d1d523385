"""Several machines as one gateway: who leads, and which requests may start when leaders change."""
