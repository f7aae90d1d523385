"""Measures any OpenAI-compatible server under load.

In the order of a run: `load.py` (which loads are put on it), `prompts.py` (texts of a given
length), `endpoint.py` (bodies, and how events read), `exchange.py` (one request and the times of
its events), `target.py` (what the server is; calibration), `runner.py` (closed and open loop, with
`client_lag.py`), `figures.py` and `limiting.py` (what came of a load, and what limits it),
`report.py`, `comparison.py`, `drawing.py` and `page.py` (the results).
"""
