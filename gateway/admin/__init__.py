"""The admin listener: what the fleet does and why, and the few things an operator may order."""
