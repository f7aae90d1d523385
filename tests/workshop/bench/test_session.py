"""Whole runs against emulated nodes: what is measured, and what bad servers come to."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.local.energy import EnergyMeter, find_energy_domains
from gateway.workshop.bench.exchange import CHAT, ENDPOINTS, TargetError
from gateway.workshop.bench.load import (
    BenchPlan,
    Load,
    Loop,
    RequestGoal,
    RequestPattern,
    parse_loads,
)
from gateway.workshop.bench.report import BenchReport, BenchSession, FitError, Limit, LoadFigures
from gateway.workshop.simulate.simulation import read_trace
from tests.emulator import EmulatedNode
from tests.emulator.process import emulator_process
from tests.known import known
from tests.local.powercap import PowercapTree
from tests.transport.raw import Peer, once, raw_server
from tests.virtual import in_virtual_time, now

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.fixture(autouse=True)
def _heap_of_one_test() -> Iterator[None]:
    """Each load begins with a collection, which takes long where other tests have loaded much."""
    gc.freeze()
    yield
    gc.unfreeze()


def plan(url: str, loads: list[Load] | None = None, **options: Any) -> BenchPlan:
    """A plan of a few small requests."""
    usual: dict[str, Any] = {"pattern": RequestPattern(64, 8), "endpoint": CHAT, "warm_up": 1}
    loads = loads or parse_loads(Loop.CLOSED, "2", 4, None)
    return BenchPlan(url=url, loads=loads, **usual | options)


async def measure(url: str, loads: list[Load] | None = None, **options: Any) -> BenchReport:
    """Measure a server."""
    session = BenchSession(plan(url, loads, **options), clock=now)
    await session.run()
    return session.report()


def only(report: BenchReport) -> LoadFigures:
    (one,) = report.loads
    return one


# Against a server whose behaviour is known exactly, in virtual time.


@in_virtual_time
async def test_a_closed_loop_measures_what_the_server_does() -> None:
    async with EmulatedNode(slots=4, prefill_tps=1000, decode_tps=50) as node:
        loads = parse_loads(Loop.CLOSED, "1,4", 8, None)
        report = await measure(node.url, loads, pattern=RequestPattern(200, 40))
    for found in report.loads:
        assert (found.succeeded, found.failed) == (8, 0)
        assert found.prompt_tokens == pytest.approx(200, rel=0.02)
        assert found.completion_tokens == 40
        expected, completion = known(found.prompt_tokens) / 1000, known(found.completion).mean
        assert known(found.ttft).mean == pytest.approx(expected, rel=0.02)
        assert known(found.inter_token).p50 == pytest.approx(1 / 50, rel=0.02)
        assert completion == pytest.approx(expected + 39 / 50, rel=0.02)
        total = found.load.level * 40 / completion
        assert found.total_tokens_per_second == pytest.approx(total, rel=0.02)
        assert found.verdict.limit is Limit.DECODE


@in_virtual_time
async def test_waiting_for_a_slot_is_found_to_limit_and_the_goal_is_kept_by_some() -> None:
    async with EmulatedNode(slots=2, prefill_tps=1000, decode_tps=50) as node:
        loads, goal = parse_loads(Loop.CLOSED, "8", 24, None), RequestGoal(ttft=0.1)
        one = only(await measure(node.url, loads, goal=goal))
    assert one.verdict.limit is Limit.SLOTS
    assert "one of the 2 slots" in one.verdict.reason
    # Seven others, two at a time: three rounds of 0.064 + 7/50 s to wait.
    assert known(one.ttft).p50 == pytest.approx(3 * (0.064 + 0.14) + 0.064, rel=0.05)
    # Only the first two did not wait for those before.
    assert known(one.goodput)["share"] == pytest.approx(2 / 24)


@in_virtual_time
async def test_an_open_loop_counts_from_the_time_a_request_should_have_started() -> None:
    async with EmulatedNode(slots=1, prefill_tps=1000, decode_tps=10) as node:
        # A request takes 0.9 s or so, and three of them come each second.
        loads = parse_loads(Loop.POISSON, "3", 30, None)
        found = only(await measure(node.url, loads, most_in_flight=1))
    # The last of 30 starts about 10 s after the first, and is done after 30 * 0.77 s.
    assert known(found.completion).p95 > 10
    assert found.client.held_back > 20
    assert found.verdict.limit is Limit.CLIENT


@in_virtual_time
async def test_a_trace_is_played_and_a_later_turn_waits_for_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"time": 0, "prompt_tokens": 50, "output_tokens": 50, "session": "s"}\n'
        '{"time": 1, "prompt_tokens": 120, "output_tokens": 10, "session": "s"}\n'
        '{"time": 2, "prompt_tokens": 40, "output_tokens": 5}\n'
    )
    async with EmulatedNode(slots=4, decode_tps=10, cache_ram=100_000) as node:
        load = [Load(Loop.TRACE, 1.0, 3)]
        session = BenchSession(plan(node.url, load, trace=read_trace(path), warm_up=0), clock=now)
        await session.run()
    (run,) = session.runs
    by_number = {one.number: one for one in run.results}
    assert by_number[0].tokens == 50
    assert by_number[1].intended >= by_number[0].ended > by_number[0].intended + 4.8
    assert by_number[2].intended == pytest.approx(by_number[0].intended + 2, abs=0.01)
    assert known(by_number[1].cached_tokens) > 30


@in_virtual_time
async def test_completions_and_embeddings_which_have_no_tokens_but_a_time() -> None:
    async with EmulatedNode(prefill_tps=1000, decode_tps=50, embeddings=True) as node:
        found = only(await measure(node.url, endpoint=ENDPOINTS["completions"]))
        pattern = RequestPattern(100, 8)
        vectors = only(await measure(node.url, endpoint=ENDPOINTS["embeddings"], pattern=pattern))
    assert found.succeeded == vectors.succeeded == 4
    assert known(found.inter_token).p50 == pytest.approx(1 / 50, rel=0.02)
    assert vectors.ttft is None
    assert known(vectors.prompt_tokens) == pytest.approx(100, rel=0.03)
    expected = known(vectors.prompt_tokens) / 1000
    assert known(vectors.completion).mean == pytest.approx(expected, rel=0.02)
    assert vectors.verdict.limit is Limit.UNKNOWN


# Servers.


async def test_fields_that_a_server_refuses_are_left_out() -> None:
    """A server that knows neither `stream_options` nor `ignore_eos`, and has no usage."""
    async with EmulatedNode(answer_tokens=5) as node:
        node.faults.next("status", 2, status=400, path="/v1/chat/completions")
        found = only(await measure(node.url))
        bodies = [json.loads(one.body) for one in node.seen]
    assert "ignore_eos" in bodies[0]
    assert "stream_options" in bodies[1]
    assert all("stream_options" not in one and "ignore_eos" not in one for one in bodies[2:])
    assert (found.succeeded, found.completion_tokens) == (4, 5)


async def test_without_usage_words_are_taken_for_tokens_and_that_is_said() -> None:
    seen: list[int] = []

    async def answer(peer: Peer) -> None:
        head, _, body = (await peer.request()).partition(b"\r\n\r\n")
        if b"/chat/completions" in head:
            seen.append(len(json.loads(body)["messages"][0]["content"].split()))
            event = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
            await peer.say(STREAM_HEAD + event)
        else:
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    async with raw_server(answer) as server:
        report = await measure(f"http://127.0.0.1:{server.port}")
    assert report.client["prompt_lengths_by"] == "guessed: one token a word"
    assert seen[-4:] == [64] * 4
    for note in ("sends no usage", "tells no token counts"):
        assert any(note in one for one in report.notes)
    assert any("names no model" in note for note in report.server.notes)


async def test_what_can_not_be_measured_is_told_with_the_remedy_before_the_load() -> None:
    async with EmulatedNode(api_key="secret", context=100) as node:
        pattern = RequestPattern(40, 8)
        assert only(await measure(node.url, key="secret", pattern=pattern)).succeeded == 4
        with pytest.raises(TargetError, match="--key-file"):
            await measure(node.url)
        requests = node.requests
        with pytest.raises(FitError, match="do not fit into a slot of 100 tokens"):
            await measure(node.url, key="secret", pattern=RequestPattern(90, 20))
        assert node.requests == requests
        await node.refuse()
        with pytest.raises(TargetError, match="can't be reached"):
            await measure(node.url)
    missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    async with raw_server(once(missing)) as server:
        with pytest.raises(TargetError, match="refuses POST /v1/chat/completions"):
            await measure(f"http://127.0.0.1:{server.port}")


async def test_energy_is_counted_by_token(tmp_path: Path) -> None:
    tree = PowercapTree(tmp_path)
    tree.add("intel-rapl:0", "package-0", 1000)
    async with EmulatedNode() as node:
        session = BenchSession(plan(node.url, meter=EnergyMeter(find_energy_domains(tree.root))))
        # Ten joules for each request, those before the load too.
        session.on_request = lambda _: tree.use("intel-rapl:0", 10_000_000)
        await session.run()
    found = only(session.report())
    assert found.joules == pytest.approx(40)
    assert found.joules_per_token == pytest.approx(40 / 32)


# Bad servers are counted, with the reason; the run goes on to its end.


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("garbage", {}, "garbage"),
        ("reset", {}, "reset"),
        ("reset", {"after_events": 3}, "cut"),
        ("end", {"after_events": 3}, "cut"),
        ("error_event", {"after_events": 3}, "error_event"),
        ("insert", {"after_events": 3, "what": "not_json"}, "not_json"),
        ("garbage_body", {"after_events": 3}, "garbage"),
        ("head_bomb", {}, "garbage"),
        ("status", {"status": 503, "body": "<html>"}, "http_503"),
        ("hang", {}, "no_answer"),
        ("hang", {"after_events": 3}, "too_slow"),
    ],
)
@in_virtual_time
async def test_a_failure_is_counted_by_its_reason(
    kind: str, options: dict[str, Any], reason: str
) -> None:
    async with EmulatedNode() as node:
        node.faults.set(kind, **options)
        began = now()
        report = await measure(node.url, timeout=3.0)
    found = only(report)
    assert (found.requests, found.succeeded) == (4, 0)
    assert found.errors == {reason: 4}
    assert found.verdict.limit is Limit.ERRORS
    assert json.dumps(report.as_dict())
    # Of servers that hang: calibration, warm-up, and two by two.
    assert now() - began < 13


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("crlf", {}),
        ("comments", {}),
        ("split", {"size": 7}),
        ("no_done", {}),
        ("double_done", {}),
        ("interim", {"count": 3}),
        ("chunk_extensions", {}),
        ("insert", {"after_events": 2, "what": "fields"}),
    ],
)
@in_virtual_time
async def test_odd_streams_are_no_failures(kind: str, options: dict[str, Any]) -> None:
    async with EmulatedNode() as node:
        node.faults.set(kind, **options)
        found = only(await measure(node.url))
    assert (found.succeeded, found.errors) == (4, {})
    assert found.completion_tokens == 8


@pytest.mark.parametrize(
    ("seconds", "times", "pause", "lasts"),
    [(None, 2, "7", 14), (10.0, 1, "1000000", 0)],
    ids=["as long as it asks", "but not beyond the load"],
)
@in_virtual_time
async def test_a_refused_worker_pauses(
    seconds: float | None, times: int, pause: str, lasts: float
) -> None:
    async with EmulatedNode() as node:
        loads = parse_loads(Loop.CLOSED, "1", 3, seconds)
        session = BenchSession(plan(node.url, loads), clock=now)
        session.on_load = lambda _: node.faults.next(
            "status", times, status=429, headers={"retry-after": pause}
        )
        began = now()
        await session.run()
        assert now() - began == pytest.approx(lasts, abs=2)
    assert only(session.report()).errors == {"http_429": times}


@pytest.mark.parametrize(
    ("piece", "timeout", "reason"),
    [
        (b'data: {"choices":[{"delta":{"content":"more "}}]}\n\n' * 10, 20.0, "endless"),
        (b": still here\n\n", 0.5, "no_answer"),
    ],
    ids=["tokens", "comments"],
)
@in_virtual_time
async def test_a_stream_without_end_is_cut(piece: bytes, timeout: float, reason: str) -> None:
    async def talk(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD)
        while True:
            await peer.say(piece)
            await asyncio.sleep(0.01)

    async with raw_server(talk) as server:
        found = only(await measure(f"http://127.0.0.1:{server.port}", timeout=timeout))
    assert found.errors == {reason: 4}


@pytest.mark.slow
async def test_what_is_measured_is_what_the_server_did() -> None:
    """Beside the server's own clock, so that a slow machine makes both of them slow."""
    speeds = ("--slots", "4", "--prefill-tps", "128", "--decode-tps", "20")
    with emulator_process(*speeds, "--answer-tokens", "1000000") as node:
        loads = parse_loads(Loop.CLOSED, "4", 8, None)
        session = BenchSession(plan(node.url, loads, pattern=RequestPattern(256, 60)))
        await session.run()
    (run,) = session.runs
    assert [one.error for one in run.results] == [None] * 8
    ratios = [known(one.ttft) / known(one.prefill_seconds) for one in run.results]
    gaps = [known(one.inter_token) for one in run.results]
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.02)
    assert statistics.median(gaps) == pytest.approx(1 / 20, rel=0.02)
