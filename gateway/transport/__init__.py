"""Connections to nodes: a pool of our own for proxied requests, and httpx on top for the rest."""
