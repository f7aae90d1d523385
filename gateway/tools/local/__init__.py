"""This machine as a fleet: its topology, llama.cpp servers on it, a demo model."""
