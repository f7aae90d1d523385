"""The equipment of the data plane's benchmark, and of the count of instructions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from setup import python_build
from tests.bench import instructions, node_replies, report
from tests.bench.load import Address
from tests.bench.report import BEGIN, END, GOALS, Results, Sample
from tests.bench.scenarios import Sizes, catalogue, chat_load, plain_load, stream_load
from tests.bench.upstream import Script, Upstream
from tests.transport.raw import Peer, raw_server

ROOT = Path(__file__).parents[2]
LIMIT = 50.0
RUN_LIMIT = 500.0
GOOD = node_replies.plain_response(node_replies.EMBEDDING)


@asynccontextmanager
async def answering(replies: Iterable[bytes], *, close: bool = False) -> AsyncIterator[Address]:
    """A server that gives these answers, one after the other."""
    left = iter(replies)

    async def script(peer: Peer) -> None:
        while await peer.request():
            await peer.say(next(left))
            if close:
                break

    async with raw_server(script) as server:
        yield "127.0.0.1", server.port


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
        answering([GOOD, GOOD, bad, *[GOOD] * 7]) as address,
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
        answering([reply], close=closes) as address,
        plain_load(address).connected(1) as load,
    ):
        outcome = await load.run(1, limit=LIMIT if closes else 0.05)
    assert outcome.errors == 1
    assert error in outcome.first_error


def sample(target: str, round_: int, cpu: float, errors: int = 0) -> Sample:
    return Sample("chunk", target, round_, {"cpu_us": cpu}, errors, "boom" if errors else "")


def test_a_ratio_is_that_within_each_round_of_what_is_valid() -> None:
    ours = [sample("gateway", i, cpu) for i, cpu in enumerate((10, 60, 36))]
    ours.append(sample("gateway", 3, 1, errors=4))
    results = Results([*ours, *(sample("nginx", i, cpu) for i, cpu in enumerate((10, 30, 12, 1)))])
    assert results.median("chunk", "gateway", "cpu_us") == 36
    assert GOALS[0].measure(results) == 2
    tables = report.tables(results, [catalogue(Sizes())["chunk"]], ["gateway", "nginx"])
    assert "- chunk, gateway, round 3: 4 errors, the first: boom" in tables


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


def test_the_sums_of_the_loops_thread_and_of_all_are_read_from_dumps(tmp_path: Path) -> None:
    dumps = [tmp_path / "counted.1-01", tmp_path / "counted.1-03"]
    for dump, number in zip(dumps, (12345, 100), strict=True):
        dump.write_text(f"version: 1\nsummary: {number}\n\nfn=(1) main\n16 400\ntotals: {number}\n")
    assert instructions.instructions_of(dumps) == (12345, 12445)


def test_a_dump_without_a_sum_is_no_count(tmp_path: Path) -> None:
    dump = tmp_path / "counted.1-01"
    dump.write_text("version: 1\n")
    with pytest.raises(RuntimeError, match="no sum"):
        instructions.instructions_of([dump])
    with pytest.raises(RuntimeError, match="nothing"):
        instructions.instructions_of([])


PASSES = """
from gateway.store.store import StoreWorker
async def main(passes):
    async def one_pass():
        passes.append(1)
    signal.raise_signal(signal.SIGUSR1)
    worker = StoreWorker(one_pass, 0.2)
    working = asyncio.create_task(worker.run())
    await sleep(0.5)
    worker.wake()
    await sleep(0.05)
    print(len(passes))
asyncio.run(main([]))
"""


def test_nothing_looks_into_the_store_by_the_clock_while_requests_are_counted() -> None:
    command = [sys.executable, "-c", instructions.STOP_CLOCKS + PASSES]
    assert subprocess.check_output(command, text=True, timeout=60) == "1\n"
