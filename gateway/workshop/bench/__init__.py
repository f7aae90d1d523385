"""Measures any OpenAI-compatible server under load.

In the order of a run: `exchange` (what the server is, prompts of a given length, one request and
the times of its events), `load` (which loads are put on it, in closed and open loop), `report` (a
run put together: figures, what limits, tables, pages, comparisons).
"""
