"""Finds the settings that serve a model best on this machine, by measuring real servers."""
