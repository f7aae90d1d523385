"""Tests over real servers of what docs/reliability.md promises when nodes fail."""
