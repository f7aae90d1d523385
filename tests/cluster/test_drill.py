"""A cluster of real processes goes through the drill's faults, in small."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.drill import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can run"),
]


def test_one_gateway_of_two_edges_goes_through_faults_of_edges_and_database() -> None:
    command = [
        *(sys.executable, "-m", "tests.cluster.drill", "--one", "--edges", "2", "--clients", "8"),
        *("--faults", "kill-edge,stop-edge,terminate-backends", "--settle", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
