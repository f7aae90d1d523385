from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from setup import python_build
from tests.bench import node_replies, report
from tests.bench.load import Address, StampedConnection
from tests.bench.machine import cpu_seconds
from tests.bench.report import BEGIN, END, GOALS, Results, Sample
from tests.bench.scenarios import Sizes, catalogue, chat_load, plain_load, stream_load
from tests.bench.targets import Target, running
from tests.bench.upstream import Script, Upstream
from tests.known import known
from tests.virtual import in_virtual_time, now

ROOT = Path(__file__).parents[2]
LIMIT = 50.0
RUN_LIMIT = 500.0
CORE = min(os.sched_getaffinity(0))
GOOD = node_replies.plain_response(node_replies.EMBEDDING)
CLOSES = GOOD.replace(b"Server:", b"Connection: close\r\nServer:")


@asynccontextmanager
async def answering(
    reply: Callable[[int], bytes], *, close: bool = False
) -> AsyncIterator[tuple[Address, list[int]]]:
    """A server whose answer is a function of the request's number.

    Yields its address and the number of requests on each connection.
    """
    served: list[int] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(known(asyncio.current_task()))
        mine = len(served)
        served.append(0)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readuntil(b"}")
                served[mine] += 1
                writer.write(reply(sum(served)))
                await writer.drain()
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2], served
        await asyncio.wait(tasks, timeout=LIMIT)


async def test_every_request_is_answered_over_the_same_connections() -> None:
    async with Upstream(nodes=2, slots=4) as upstream:
        async with plain_load(("127.0.0.1", upstream.ports[0])).connected(3) as load:
            outcome = await load.run(50, LIMIT)
        assert (outcome.completed, outcome.errors, len(outcome.took)) == (50, 0, 50)
        assert (upstream.counters.requests, upstream.counters.connections) == (50, 3)


@pytest.mark.parametrize("interval", [0.0, 0.002], ids=["at once", "in time"])
@pytest.mark.parametrize(
    ("tokens", "errors"), [(6, 0), (7, 8)], ids=["as asked for", "a token too many"]
)
async def test_streams_and_plain_chats_are_judged_by_their_text(
    tokens: int, errors: int, interval: float
) -> None:
    async with Upstream(1, 4, Script(tokens, interval, burst=4)) as upstream:
        address = "127.0.0.1", upstream.ports[0]
        for load in (stream_load(address, 6), chat_load(address, 6)):
            async with load.connected(4):
                outcome = await load.run(8, LIMIT, spread=0.01)
            assert (outcome.completed, outcome.errors) == (8 - errors, errors), outcome


async def test_stamps_survive_any_cut_of_the_body() -> None:
    connection = StampedConnection(lambda connection, problem: None, 0, 1)
    tokens = node_replies.stamped_token(1) + node_replies.stamped_token(2)
    body = node_replies.ROLE + tokens + node_replies.DONE
    for i in range(0, len(body), 7):
        connection.on_body(body[i : i + 7])
    assert (len(connection.ages), connection.length, connection.crc) == (2, len(body), True)


@pytest.mark.parametrize(
    "bad",
    [
        node_replies.plain_response(node_replies.EMBEDDING, "503 Service Unavailable"),
        node_replies.plain_response(node_replies.EMBEDDING[:-1]),
        node_replies.plain_response(b"{" + b" " * 398 + b"}"),
        b"what is this\r\n\r\n",
    ],
    ids=["status", "length", "content", "garbage"],
)
async def test_one_wrong_answer_is_one_error_and_the_rest_goes_on(bad: bytes) -> None:
    async with (
        answering(lambda number: bad if number == 3 else GOOD) as (address, _),
        plain_load(address).connected(1) as load,
    ):
        outcome = await load.run(10, LIMIT)
    assert (outcome.completed, outcome.errors) == (9, 1)


@pytest.mark.parametrize(
    ("reply", "closes", "error"),
    [(GOOD[:-10], True, "connection lost"), (b"", False, "1 of 1 answers missing")],
    ids=["breaks off", "never comes"],
)
async def test_an_answer_that_does_not_end_is_an_error(
    reply: bytes, closes: bool, error: str
) -> None:
    async with (
        answering(lambda _: reply, close=closes) as (address, _),
        plain_load(address).connected(1) as load,
    ):
        outcome = await load.run(1, limit=LIMIT if closes else 0.05)
    assert outcome.errors == 1
    assert error in outcome.first_error


async def test_a_server_that_closes_after_each_answer_costs_reconnects_not_errors() -> None:
    async with (
        answering(lambda _: CLOSES, close=True) as (address, served),
        plain_load(address).connected(2) as load,
    ):
        outcome = await load.run(6, LIMIT)
    assert (outcome.completed, outcome.errors, outcome.reconnects) == (6, 0, 4)
    assert served == [1] * 6


@pytest.mark.parametrize("connections", [1, 8])
@in_virtual_time
async def test_a_steady_rate_opens_a_connection_only_when_none_is_free(connections: int) -> None:
    async with (
        answering(lambda _: GOOD) as (address, served),
        plain_load(address).connected(connections) as load,
    ):
        load.clock = now
        outcome = await load.steady(rate=200, seconds=0.25, limit=LIMIT)
        assert (outcome.completed, outcome.errors) == (50, 0)
        assert outcome.seconds == pytest.approx(49 / 200)
        assert len(load.connections) == len(served)
        assert max(served) > 50 / max(2, connections)


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_target_is_ready_pinned_and_gone_afterwards(tmp_path: Path) -> None:
    target = Target(
        *("sample", lambda: sys.executable, "nothing"),
        lambda binary, plan: [binary, "-c", SERVER, str(plan.port)],
        ready="/ready",
    )
    async with running(target, tmp_path, (1,), CORE) as proxy:
        pid = known(proxy.pid)
        assert os.sched_getaffinity(pid) == {CORE}
    assert not psutil.pid_exists(pid)


BURN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
WITH_CHILDREN = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
living = subprocess.Popen([sys.executable, "-c", {BURN!r} + "input()"], stdin=subprocess.PIPE)
print("ready", flush=True)
sys.stdin.read()
living.communicate(b"\\n")
"""


def test_cpu_time_holds_living_and_ended_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert known(parent.stdout).readline() == b"ready\n"
        end = time.monotonic() + LIMIT
        while (seen := cpu_seconds(parent.pid)) < 0.4 and time.monotonic() < end:
            time.sleep(0.02)
        parent.communicate()
    # In ticks it would be 40; that machines take time to start interpreters is no fault.
    assert 0.4 <= seen < 30


CHUNK, STREAMS = GOALS[0], next(goal for goal in GOALS if goal.name.startswith("streams"))


def sample(target: str, round_: int, cpu: float, errors: int = 0) -> Sample:
    return Sample("chunk", target, round_, {"cpu_us": cpu}, errors, "boom" if errors else "")


def test_a_ratio_is_the_median_of_the_ratios_within_each_round() -> None:
    ours = [sample("gateway", i, cpu) for i, cpu in enumerate((10, 60, 36))]
    results = Results([*ours, *(sample("nginx", i, cpu) for i, cpu in enumerate((10, 30, 12)))])
    assert results.median("chunk", "gateway", "cpu_us") == 36
    assert CHUNK.measure(results) == 2


def test_an_invalid_sample_counts_in_no_figure_and_is_reported() -> None:
    ours = [sample("gateway", 1, 1, errors=4), sample("gateway", 2, 30)]
    results = Results([*ours, sample("nginx", 1, 10)])
    assert results.median("chunk", "gateway", "cpu_us") == 30
    assert CHUNK.measure(results) is None
    tables = report.tables(results, [catalogue(Sizes())["chunk"]], ["gateway", "nginx"])
    assert "- chunk, gateway, round 1: 4 errors, the first: boom" in tables


def test_a_goal_is_kept_up_to_its_bound() -> None:
    values = (1.5, 1.51, 2.0, 2.01, None)
    verdicts = [CHUNK.verdict(value) for value in values]
    assert verdicts == ["aim", "must", "must", "MISS", "not measured"]


def test_sustained_streams_are_the_largest_number_with_a_delay_below_the_limit() -> None:
    def measured(**delays: float) -> float | None:
        samples = [
            Sample(f"streams-{name[1:]}", "gateway", 1, {"streams": int(name[1:]), "p99_ms": p99})
            for name, p99 in delays.items()
        ]
        return STREAMS.measure(Results(samples))

    assert measured() is None
    assert measured(n2000=50.0) == 0
    assert measured(n2000=12.0, n3000=49.0, n4000=90.0) == 3000


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_LIMIT)
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core for the proxy, one for the load"
)
def test_a_quick_run_without_a_proxy_is_valid(tmp_path: Path) -> None:
    """With one scenario of each kind; `.ci/run` makes a quick run of all of them."""
    page, file = tmp_path / "page.md", tmp_path / "bench.json"
    words = ["--quick", "--targets", "direct", "--streams", "20", "--markdown", str(page)]
    words += ["--only", "plain-c32,chunk,streams-20", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.dataplane", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    samples = {sample["scenario"]: sample for sample in told["samples"]}
    assert list(samples) == ["plain-c32", "chunk", "streams-20"]
    assert not any(sample["errors"] for sample in told["samples"])
    assert samples["plain-c32"]["figures"]["upstream_connections"] == 0
    delays = samples["streams-20"]["figures"]
    assert 0 < delays["p50_ms"] <= delays["p99_ms"] <= delays["max_ms"]
    text = page.read_text()
    assert text.startswith(BEGIN)
    assert "tests.bench.dataplane --quick --targets direct" in text
    build = f"python: {platform.python_version()}, {python_build.described()}"
    assert f"- {build}\n" in text
    assert f"{build}\n" in done.stderr
    assert done.stdout.strip() in text.partition(END)[0]
