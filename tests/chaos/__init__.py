"""Chaos tests: a whole gateway under mixed load while seeded faults hit everything around it.

`python -m tests.chaos --runs 20 --seconds 10` (`make chaos`); what is checked: docs/chaos.md.
"""
