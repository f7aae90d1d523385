"""Whole runs against emulated nodes: what is measured, and what bad servers come to."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from gateway.local.energy import EnergyMeter, find_energy_domains
from gateway.workshop.bench.exchange import ENDPOINTS, TargetError
from gateway.workshop.bench.load import (
    Load,
    Loop,
    RequestGoal,
    RequestPattern,
    parse_loads,
)
from gateway.workshop.bench.report import (
    BenchReport,
    BenchSession,
    FitError,
    Limit,
    LoadFigures,
)
from gateway.workshop.simulate.simulation import read_trace
from tests.emulator import EmulatedNode
from tests.known import known
from tests.local.powercap import PowercapTree
from tests.virtual import in_virtual_time, now
from tests.workshop.bench.beside_guidellm import emulated_node
from tests.workshop.bench.measuring import STREAM_HEAD, answers, measure, odd_server, plan


def only(report: BenchReport) -> LoadFigures:
    (one,) = report.loads
    return one


class TestAccuracy:
    """Against a server whose behaviour is known exactly, in virtual time."""

    @in_virtual_time
    async def test_a_closed_loop_measures_what_the_server_does(self) -> None:
        async with EmulatedNode(slots=4, prefill_tps=1000, decode_tps=50) as node:
            report = await measure(
                node.url, parse_loads(Loop.CLOSED, "1,4", 8, None), pattern=RequestPattern(200, 40)
            )
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
    async def test_waiting_for_a_slot_is_found_to_limit(self) -> None:
        async with EmulatedNode(slots=2, prefill_tps=1000, decode_tps=50) as node:
            report = await measure(node.url, parse_loads(Loop.CLOSED, "8", 24, None))
        one = only(report)
        assert one.verdict.limit is Limit.SLOTS
        assert "one of the 2 slots" in one.verdict.reason
        # Seven others, two at a time: three rounds of 0.064 + 7/50 s to wait.
        assert known(one.ttft).p50 == pytest.approx(3 * (0.064 + 0.14) + 0.064, rel=0.05)

    @in_virtual_time
    async def test_an_open_loop_counts_from_the_time_a_request_should_have_started(self) -> None:
        async with EmulatedNode(slots=1, prefill_tps=1000, decode_tps=10) as node:
            # A request takes 0.9 s or so, and three of them come each second.
            report = await measure(
                node.url,
                parse_loads(Loop.POISSON, "3", 30, None),
                most_in_flight=1,
                pattern=RequestPattern(64, 8),
            )
        (found,) = report.loads
        # The last of 30 starts about 10 s after the first, and is done after 30 * 0.77 s.
        assert known(found.completion).p95 > 10
        assert found.client.held_back > 20
        assert found.verdict.limit is Limit.CLIENT

    @in_virtual_time
    async def test_random_arrivals_have_the_rate_and_the_seed_decides_them(self) -> None:
        async with EmulatedNode(slots=64) as node:
            first = only(await measure(node.url, parse_loads(Loop.POISSON, "20", 200, None)))
            again = only(await measure(node.url, parse_loads(Loop.POISSON, "20", 200, None)))
            shorter = only(await measure(node.url, parse_loads(Loop.POISSON, "20", None, 5)))
        assert first.requests == 200
        assert first.requests / first.seconds == pytest.approx(20, rel=0.15)
        assert first.seconds == pytest.approx(again.seconds, abs=0.01)
        assert 70 <= shorter.requests <= 130

    @in_virtual_time
    async def test_a_trace_is_played_and_a_later_turn_waits_for_the_one_before(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "trace.jsonl"
        lines: list[dict[str, Any]] = [
            {"time": 0, "prompt_tokens": 50, "output_tokens": 50, "session": "s"},
            {"time": 1, "prompt_tokens": 120, "output_tokens": 10, "session": "s"},
            {"time": 2, "prompt_tokens": 40, "output_tokens": 5},
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        trace = read_trace(path)
        async with EmulatedNode(slots=4, decode_tps=10, cache_ram=100_000) as node:
            session = BenchSession(
                plan(node.url, [Load(Loop.TRACE, 1.0, 3)], trace=trace, warm_up=0), clock=now
            )
            await session.run()
        (run,) = session.runs
        by_number = {one.number: one for one in run.results}
        assert by_number[0].tokens == 50
        assert by_number[1].intended >= by_number[0].ended > by_number[0].intended + 4.8
        assert by_number[2].intended == pytest.approx(by_number[0].intended + 2, abs=0.01)
        assert known(by_number[1].cached_tokens) > 30

    @in_virtual_time
    async def test_a_common_prefix_is_common(self) -> None:
        async with EmulatedNode(slots=1, cache_ram=100_000) as node:
            shared = only(await measure(node.url, pattern=RequestPattern(200, 4, 150)))
            apart = only(await measure(node.url, pattern=RequestPattern(200, 4)))
        assert shared.cached_tokens == pytest.approx(150, rel=0.1)
        assert known(apart.cached_tokens) < 20

    @in_virtual_time
    async def test_several_tokens_in_a_segment_do_not_change_the_time_between_tokens(self) -> None:
        async with EmulatedNode(slots=2, decode_tps=50) as node:
            node.faults.set("merge", count=4, path="/v1/chat/completions")
            found = only(await measure(node.url, pattern=RequestPattern(64, 40)))
        assert known(found.inter_token).p50 == pytest.approx(1 / 50, rel=0.1)

    @in_virtual_time
    async def test_the_goal_is_kept_by_some(self) -> None:
        async with EmulatedNode(slots=1, prefill_tps=1000, decode_tps=100) as node:
            goal = RequestGoal(ttft=0.1)
            found = only(
                await measure(node.url, parse_loads(Loop.CLOSED, "2", 10, None), goal=goal)
            )
        # Only the first did not wait for the one before.
        assert known(found.goodput)["share"] == pytest.approx(0.1)


class TestEndpoints:
    @in_virtual_time
    async def test_completions(self) -> None:
        async with EmulatedNode(prefill_tps=1000, decode_tps=50) as node:
            found = only(await measure(node.url, endpoint=ENDPOINTS["completions"]))
        assert found.succeeded == 4
        assert known(found.inter_token).p50 == pytest.approx(1 / 50, rel=0.02)

    @in_virtual_time
    async def test_embeddings_have_no_tokens_but_a_time(self) -> None:
        async with EmulatedNode(prefill_tps=1000, embeddings=True) as node:
            report = await measure(
                node.url, endpoint=ENDPOINTS["embeddings"], pattern=RequestPattern(100, 8)
            )
        found = only(report)
        assert found.succeeded == 4
        assert found.ttft is None
        assert known(found.prompt_tokens) == pytest.approx(100, rel=0.03)
        expected = known(found.prompt_tokens) / 1000
        assert known(found.completion).mean == pytest.approx(expected, rel=0.02)
        assert found.verdict.limit is Limit.UNKNOWN


class TestServers:
    async def test_a_model_may_be_named_and_else_is_the_first(self) -> None:
        async with EmulatedNode(model="first") as node:
            assert (await measure(node.url)).server.model == "first"
            report = await measure(node.url, model="other")
            assert report.server.model == "other"
            assert "does not list other" in report.notes[0]
            assert json.loads(node.seen[-1].body)["model"] == "other"

    async def test_fields_that_a_server_refuses_are_left_out(self) -> None:
        """A server that knows neither `stream_options` nor `ignore_eos`, and has no usage."""
        async with EmulatedNode(answer_tokens=5) as node:
            node.faults.next("status", 2, status=400, path="/v1/chat/completions")
            report = await measure(node.url)
            bodies = [json.loads(one.body) for one in node.seen]
        assert "ignore_eos" in bodies[0]
        assert "stream_options" in bodies[1]
        assert all("stream_options" not in one and "ignore_eos" not in one for one in bodies[2:])
        assert only(report).succeeded == 4
        assert only(report).completion_tokens == 5

    async def test_a_key_is_sent_and_a_missing_one_is_told_with_the_remedy(self) -> None:
        async with EmulatedNode(api_key="secret") as node:
            assert only(await measure(node.url, key="secret")).succeeded == 4
            with pytest.raises(TargetError, match="--key-file"):
                await measure(node.url)

    async def test_requests_that_do_not_fit_into_a_slot_are_refused_before_the_load(self) -> None:
        async with EmulatedNode(context=100) as node:
            with pytest.raises(FitError, match="do not fit into a slot of 100 tokens"):
                await measure(node.url, pattern=RequestPattern(90, 20))
            assert node.requests == 0

    async def test_a_server_that_is_not_there(self) -> None:
        async with EmulatedNode() as node:
            await node.refuse()
            with pytest.raises(TargetError, match="can't be reached"):
                await measure(node.url)

    async def test_a_path_that_is_not_there(self) -> None:
        missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        async with odd_server(answers(missing)) as url:
            with pytest.raises(TargetError, match="refuses POST /v1/chat/completions"):
                await measure(url)

    async def test_energy_is_counted_by_token(self, tmp_path: Path) -> None:
        tree = PowercapTree(tmp_path)
        tree.add("intel-rapl:0", "package-0", 1000)
        async with EmulatedNode() as node:
            meter = EnergyMeter(find_energy_domains(tree.root))
            session = BenchSession(plan(node.url, meter=meter))
            # Ten joules for each request, those before the load too.
            session.on_request = lambda _: tree.use("intel-rapl:0", 10_000_000)
            await session.run()
        found = only(session.report())
        assert found.joules == pytest.approx(40)
        assert found.joules_per_token == pytest.approx(40 / 32)


class TestBadServers:
    """They are counted, with the reason; the run goes on to its end."""

    @pytest.mark.parametrize(
        ("kind", "options", "reason"),
        [
            ("garbage", {}, "garbage"),
            ("reset", {}, "reset"),
            ("reset", {"after_events": 3}, "cut"),
            ("close", {"after_events": 3}, "cut"),
            ("cut", {"after_events": 3}, "cut"),
            ("end", {"after_events": 3}, "cut"),
            ("error_event", {"after_events": 3}, "error_event"),
            ("insert", {"after_events": 3, "what": "not_json"}, "not_json"),
            ("garbage_body", {"after_events": 3}, "garbage"),
            ("head_bomb", {}, "garbage"),
            ("status", {"status": 500}, "http_500"),
            ("status", {"status": 503, "body": "<html>"}, "http_503"),
        ],
    )
    @in_virtual_time
    async def test_a_failure_is_counted_by_its_reason(
        self, kind: str, options: dict[str, Any], reason: str
    ) -> None:
        async with EmulatedNode() as node:
            node.faults.set(kind, **options)
            report = await measure(node.url)
        found = only(report)
        assert (found.requests, found.succeeded) == (4, 0)
        assert found.errors == {reason: 4}
        assert report.loads[0].verdict.limit is Limit.ERRORS
        assert json.dumps(report.as_dict())

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("crlf", {}),
            ("comments", {}),
            ("split", {"size": 7}),
            ("merge", {}),
            ("no_done", {}),
            ("double_done", {}),
            ("interim", {"count": 3}),
            ("chunk_extensions", {}),
            ("insert", {"after_events": 2, "what": "fields"}),
            ("insert", {"after_events": 2, "what": "empty"}),
        ],
    )
    @in_virtual_time
    async def test_odd_streams_are_no_failures(self, kind: str, options: dict[str, Any]) -> None:
        async with EmulatedNode() as node:
            node.faults.set(kind, **options)
            found = only(await measure(node.url))
        assert (found.succeeded, found.errors) == (4, {})
        assert found.completion_tokens == 8

    @in_virtual_time
    async def test_a_refused_worker_pauses_as_long_as_the_server_asks(self) -> None:
        async with EmulatedNode() as node:
            session = BenchSession(
                plan(node.url, parse_loads(Loop.CLOSED, "1", 3, None)), clock=now
            )
            session.on_load = lambda _: node.faults.next(
                "status", 2, status=429, headers={"retry-after": "7"}
            )
            await session.run()
            failing = BenchSession(
                plan(node.url, parse_loads(Loop.CLOSED, "1", 3, 10.0)), clock=now
            )
            failing.on_load = lambda _: node.faults.set(
                "status", status=429, headers={"retry-after": "1000000"}
            )
            began = now()
            await failing.run()
        found = only(session.report())
        assert found.errors == {"http_429": 2}
        assert found.seconds == pytest.approx(14, abs=0.5)
        assert now() - began < 12
        assert only(failing.report()).errors == {"http_429": 1}

    @pytest.mark.parametrize(
        ("options", "reason"),
        [({}, "no_answer"), ({"after_events": 3}, "too_slow")],
        ids=["before it answers", "amid its stream"],
    )
    @in_virtual_time
    async def test_a_server_that_hangs_costs_the_timeout(
        self, options: dict[str, Any], reason: str
    ) -> None:
        async with EmulatedNode() as node:
            node.faults.set("hang", **options)
            began = now()
            found = only(await measure(node.url, timeout=3.0))
        assert found.errors == {reason: 4}
        # Calibration, warm-up, and two by two.
        assert now() - began < 13

    @pytest.mark.parametrize(
        ("piece", "timeout", "reason"),
        [
            (b'data: {"choices":[{"delta":{"content":"more "}}]}\n\n' * 10, 20.0, "endless"),
            (b": still here\n\n", 0.5, "no_answer"),
        ],
        ids=["tokens", "comments"],
    )
    @in_virtual_time
    async def test_a_stream_without_end_is_cut(
        self, piece: bytes, timeout: float, reason: str
    ) -> None:
        async def talk(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD)
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

        async with odd_server(talk) as url:
            found = only(await measure(url, timeout=timeout))
        assert found.errors == {reason: 4}

    async def test_a_page_instead_of_a_stream(self) -> None:
        page = b"<html>log in</html>"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n"
        async with odd_server(answers(head % len(page) + page)) as url:
            report = await measure(url)
        found = only(report)
        assert found.errors == {"no_stream": 4}
        assert found.details == {"no_stream": "content type text/html"}


@pytest.mark.slow
async def test_what_is_measured_is_what_the_server_did() -> None:
    """Beside the server's own clock, so that a slow machine makes both of them slow."""
    with emulated_node(slots=4, prefill_tps=128, decode_tps=20) as url:
        session = BenchSession(
            plan(url, parse_loads(Loop.CLOSED, "4", 8, None), pattern=RequestPattern(256, 60))
        )
        await session.run()
    (run,) = session.runs
    assert [one.error for one in run.results] == [None] * 8
    ratios = [known(one.ttft) / known(one.prefill_seconds) for one in run.results]
    gaps = [known(one.inter_token) for one in run.results]
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.02)
    assert statistics.median(gaps) == pytest.approx(1 / 20, rel=0.02)
