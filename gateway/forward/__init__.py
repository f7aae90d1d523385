"""Forwards requests to nodes: attempts, retries, streams, resumed ones, and the account of each."""
