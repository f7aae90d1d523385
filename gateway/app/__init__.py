"""Builds the gateway's objects, starts and ends them, and runs them as a process."""
