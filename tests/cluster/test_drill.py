"""A cluster of real processes goes through the drill's faults, in small."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.drill import missing
from tests.processes import ran

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can run"),
]


def drill(*words: str) -> None:
    """Run it; a machine that others use too may pause for longer than a drill may."""
    command = [sys.executable, "-m", "tests.cluster.drill", "--settle", "2", "--pause", "20"]
    ran(*command, "--clients", "8", *words, limit=500)


def test_three_members_go_through_faults_of_processes_network_and_database() -> None:
    faults = "kill-leader,stop-leader,part-leader,stop-database,restart-leader,upgrade"
    drill("--faults", faults, "--lines", "20")


def test_whatever_happens_to_the_database_somebody_leads_again() -> None:
    drill("--faults", "slow-database,halt-database,stale-standby")


def test_one_gateway_of_two_edges_goes_through_faults_of_edges_and_database() -> None:
    drill("--one", "--edges", "2", "--faults", "kill-edge,terminate-backends")
