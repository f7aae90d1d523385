"""Traces of requests, made afterwards from their records and the decision log, and exported."""
