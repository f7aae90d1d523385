"""Measures any OpenAI-compatible server under load.

In the order of a run: `load` (which loads are put on it, in closed and open loop), `target` (what
the server is, and prompts of a given length), `exchange` (one request and the times of its events),
`report` (figures, what limits, tables, pages, comparisons). `session` puts it together.
"""
