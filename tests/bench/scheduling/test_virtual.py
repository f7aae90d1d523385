"""The running gateway in virtual time: what it believes cached when it places a request.

With edges it believes, and decides, the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.lease import LeaseRequest, UsageReport
from gateway.schedule.core.demand_model import DemandModel
from gateway.schedule.core.requests import QueuedRequest
from tests.bench.scheduling.fronts import FLEET, nodes
from tests.bench.scheduling.play import Record
from tests.bench.scheduling.trace import Shape, make, session_rate
from tests.bench.scheduling.virtual import behind_gateway
from tests.virtual import VirtualLoop, now

SEED = "2"
SHAPE = Shape(sessions=16)
NEAR = 100.0  # tokens by which a belief may be wrong: less than the shortest turn has


@dataclass(slots=True)
class Belief:
    """Prompt tokens that a node was believed to have cached, and those that it had."""

    believed: float
    found: float


async def _played(folder: Path, edges: int = 0) -> list[Record]:
    rate = 1.5 * session_rate(make(SEED, 1.0, SHAPE), FLEET)
    async with (
        nodes(FLEET, 1.0, now) as fleet,
        behind_gateway(folder, fleet, 1.0, 1, known=True, edges=edges) as player,
    ):
        return await player.play(make(SEED, rate, SHAPE))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nodes_have_cached_what_they_are_believed_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above capacity conversations wait for busy nodes, and go as soon as an answer has ended."""
    beliefs: list[Belief] = []
    learn = DemandModel.learn

    def noting(
        self: DemandModel,
        placement: QueuedRequest | None,
        request: LeaseRequest,
        report: UsageReport,
        learn_sizes: bool = True,
    ) -> None:
        reported = report.reported
        assert reported is not None
        assert placement is not None
        believed = placement.cached.get(placement.row.index, 0.0)
        beliefs.append(Belief(believed, reported.cached_tokens))
        learn(self, placement, request, report, learn_sizes)

    monkeypatch.setattr(DemandModel, "learn", noting)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        records = runner.run(_played(tmp_path))
    assert [record.problem for record in records if record.problem] == []
    assert len(beliefs) == len(records) == 64
    assert [one for one in beliefs if abs(one.believed - one.found) > NEAR] == []
    # It is about caches only where most prompts are found in one, and under load where some wait.
    assert sum(one.found > NEAR for one in beliefs) > 32
    assert sum(record.ttft > 1.0 for record in records) > 16


@pytest.mark.timeout(180)
def test_three_edges_answer_each_request_as_one_process_does(tmp_path: Path) -> None:
    """Who waits gets a slot as it comes free, when it must be known what is cached there by now."""
    runs = []
    for edges in (0, 3):
        (tmp_path / str(edges)).mkdir()
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            records = runner.run(_played(tmp_path / str(edges), edges))
        runs.append([(r.session, r.turn, r.cached, round(r.took, 3), r.problem) for r in records])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 64
