"""The scheduling benchmark: how soon requests are answered, beside nginx and HAProxy.

`python -m tests.bench.scheduling` (`make bench-scheduling`). Who is what: `fleet.py` the emulated
nodes, `trace.py` the conversations, `capacity.py` what the fleet can do and no scheduler can beat,
`fronts.py` what is compared, `client.py` one request, `play.py` all of them, `results.py` figures
and targets, `report.py` the tables, `real.py` the same with real servers,
`virtual.py` the same in virtual time.
"""
