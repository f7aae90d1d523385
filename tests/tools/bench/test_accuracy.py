"""In real time, against a server in another process. Exact, in virtual time: `test_session.py`."""

from __future__ import annotations

import statistics

import pytest

from gateway.tools.bench.load import closed_loads
from gateway.tools.bench.runner import Workload
from gateway.tools.bench.session import BenchSession
from tests.tools.bench.beside_guidellm import emulated_node
from tests.tools.bench.measuring import plan


@pytest.mark.slow
async def test_what_is_measured_is_what_the_server_did() -> None:
    """Beside the server's own clock, so that a slow machine makes both of them slow."""
    with emulated_node(slots=4, prefill_tps=128, decode_tps=20) as url:
        session = BenchSession(plan(url, closed_loads("4", 8, None), workload=Workload(256, 60)))
        await session.run()
    (run,) = session.runs
    assert [one.error for one in run.results] == [None] * 8
    ratios, gaps = [], []
    for one in run.results:
        assert one.ttft is not None
        assert one.inter_token is not None
        assert one.server.prefill_seconds is not None
        ratios.append(one.ttft / one.server.prefill_seconds)
        gaps.append(one.inter_token)
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.02)
    assert statistics.median(gaps) == pytest.approx(1 / 20, rel=0.02)
