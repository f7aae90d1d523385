"""Watches event loops in tests: turns that take long, and waits that stop them."""
