"""Tokens and cost in the record of a request, and the speed that is learnt of its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.proxy.proxy_over_nodes import GENERATION_PATHS, MESSAGES, proxy_over
from tests.virtual import in_virtual_time


@pytest.mark.parametrize(
    ("path", "stream"), [*((path, True) for path in GENERATION_PATHS), (GENERATION_PATHS[0], False)]
)
@in_virtual_time
async def test_tokens_are_those_that_the_node_reports(
    tmp_path: Path, path: str, stream: bool
) -> None:
    one = EmulatedNode(answer_tokens=9, decode_tps=100)
    async with proxy_over(tmp_path, one) as proxy:
        reply = await proxy.ask(path, stream=stream)
        assert reply.status_code == 200
        await proxy.settled()
        (record,) = proxy.finished
        assert record.completion_tokens == 9
        assert record.prompt_tokens == one.engine.prompt_tokens
        assert (record.status, record.reason, record.attempts) == (200, None, 1)
        assert record.duration_seconds == pytest.approx(0.09)
        assert (record.ttft is not None) is stream
        assert proxy.outcomes == [("a", "ok")]


@in_virtual_time
async def test_usage_in_the_stream_does_not_change_the_count(tmp_path: Path) -> None:
    one = EmulatedNode(answer_tokens=9)
    async with proxy_over(tmp_path, one) as proxy:
        await proxy.stream(stream_options={"include_usage": True})
        await proxy.settled()
        assert proxy.finished[0].completion_tokens == 9


@in_virtual_time
async def test_a_nodes_speed_is_learnt_from_its_timings(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=200, prefill_tps=400, answer_tokens=30)
    async with proxy_over(tmp_path, one) as proxy:
        await proxy.stream()
        await proxy.settled()
        speed = proxy.node("a").speed
        assert speed.decode_tps == pytest.approx(200, rel=0.5)
        assert speed.prefill_tps == pytest.approx(400, rel=0.5)


@pytest.mark.parametrize(
    "timings",
    [
        '{"predicted_n":1e308,"predicted_ms":-1,"prompt_n":-5,"prompt_ms":0}',
        '{"predicted_n":"many","predicted_ms":null}',
        '{"predicted_n":%s}' % ("9" * 400),
        "7",
    ],
)
@in_virtual_time
async def test_implausible_timings_are_ignored(tmp_path: Path, timings: str) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one) as proxy:
        body = f'{{"choices":[{{"message":{{"content":"x"}}}}],"timings":{timings}}}'
        one.faults.set("status", status=200, body=body)
        assert (await proxy.ask()).json()["choices"]
        await proxy.settled()
        speed = proxy.node("a").speed
        assert (speed.decode_tps, speed.prefill_tps) == (None, None)
        assert proxy.finished[0].completion_tokens <= 1 << 31


@in_virtual_time
async def test_an_aborted_stream_is_counted_by_its_events(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=100, answer_tokens=1000)
    async with proxy_over(tmp_path, one) as proxy:
        body = {"messages": MESSAGES, "stream": True}
        got = b""
        async with proxy.running.client.stream("POST", GENERATION_PATHS[0], json=body) as reply:
            async for chunk in reply.aiter_bytes():
                got += chunk
                if got.count(b"\n\n") > 10:
                    break
        await proxy.settled()
        (record,) = proxy.finished
        assert record.status == 499
        assert 10 <= record.completion_tokens <= 1000
        assert record.prompt_tokens > 0


@in_virtual_time
async def test_a_request_costs_its_share_of_the_node_or_its_tokens(tmp_path: Path) -> None:
    one, two = EmulatedNode(slots=2, decode_tps=100, answer_tokens=20), EmulatedNode()
    nodes = (
        {"cost_per_hour": 3600.0, "model": "rented"},
        {"cost_per_million_tokens": {"prompt": 1e6, "completion": 2e6}, "model": "bought"},
    )
    async with proxy_over(tmp_path, one, two, nodes=nodes) as proxy:
        await proxy.ask(model="rented")
        await proxy.ask(model="bought", max_tokens=5)
        await proxy.settled()
        rented, bought = proxy.finished
        assert rented.cost == pytest.approx(rented.duration_seconds / 2, rel=0.5)
        assert bought.cost == bought.prompt_tokens + 2 * bought.completion_tokens


@in_virtual_time
async def test_a_request_without_a_slot_is_not_in_the_completion_rate(tmp_path: Path) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one) as proxy:
        scheduler = proxy.app.scheduler
        for _ in range(3):
            assert (await proxy.ask("/tokenize", content="a")).status_code == 200
        assert scheduler.completion_rate.total == 0
        await proxy.ask()
        await until(lambda: scheduler.completion_rate.total == 1)
