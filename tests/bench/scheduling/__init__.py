"""The scheduling benchmark: how soon requests are answered, beside nginx and HAProxy.

`python -m tests.bench.scheduling` (`make bench-scheduling`). Who is what: `fronts.py` the emulated
nodes and what is compared, `trace.py` the conversations and what the fleet can do, `play.py` one
request, all of them and in which order, `report.py` figures, targets and tables.
"""
