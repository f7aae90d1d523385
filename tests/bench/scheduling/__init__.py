"""The scheduling benchmark: how soon requests are answered, beside nginx and HAProxy.

`python -m tests.bench.scheduling` (`make bench-scheduling`). Who is what: `fronts.py` the emulated
nodes and what is compared, `trace.py` the conversations, what the fleet can do and no scheduler can
beat, `play.py` one request and all of them, `rounds.py` in which order, `report.py` figures,
targets and tables.
"""
