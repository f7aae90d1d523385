from __future__ import annotations

from typing import Any

from gateway.local.server import claim_port, claimed_port
from tests.bench.load import Address
from tests.bench.scheduling import trace
from tests.bench.scheduling.fronts import FAST, nodes
from tests.bench.scheduling.play import Player, as_emulated, ask
from tests.bench.scheduling.trace import Shape
from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time, now

TALK = [{"role": "user", "content": "hello there"}]
BODY: dict[str, Any] = {
    "messages": TALK,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
}


def address(node: EmulatedNode) -> Address:
    return node.host, node.port


@in_virtual_time
async def test_errors_are_reported() -> None:
    async with EmulatedNode() as node:
        node.faults.next("status", status=503)
        assert (await ask(address(node), BODY, 5, now)).problem.startswith("status 503")
        node.faults.next("cut", after_events=2)
        assert "connection lost" in (await ask(address(node), BODY, 5, now)).problem
        node.faults.next("hang")
        assert (await ask(address(node), BODY, 0.05, now)).problem == "no end after 0 s"
        plain = BODY | {"stream_options": None}
        assert (await ask(address(node), plain, 5, now)).problem == "a stream without usage"
    with claim_port(node.host) as nobody:
        assert "Connect" in (await ask((node.host, claimed_port(nobody)), BODY, 5, now)).problem


@in_virtual_time
async def test_a_trace_is_played_to_its_end_and_conversations_hit_their_cache() -> None:
    shape = Shape(sessions=3, turns=2, tenants=1, system_tokens=200)
    small = trace.make("1", 5.0, shape)
    async with nodes([FAST], 40, now) as [node]:
        player = Player(address(node), 40, known=False, clock=now)
        records = await player.play(small)
    assert [(r.session, r.turn) for r in records] == [(s, t) for s in range(3) for t in range(2)]
    assert not any(record.problem for record in records)
    assert all(record.cached > 200 for record in records if record.turn)
    lengths = [turn.answer_tokens for session in small.sessions for turn in session.turns]
    assert [record.completion for record in records] == lengths
    assert all(0 < record.ttft < record.took for record in records)


@in_virtual_time
async def test_a_wrong_answer_is_reported() -> None:
    async with EmulatedNode() as node:
        answer = await ask(address(node), BODY, 5, now)
    [turn] = trace.make("1", 1.0, Shape(sessions=1, turns=1)).sessions[0].turns
    assert as_emulated(TALK, turn, answer) == f"5 tokens, not {turn.answer_tokens}"
    answer.completion_tokens = turn.answer_tokens
    assert as_emulated(TALK, turn, answer) == "another text"
