"""`python -m tests.callers.kills`: kill -9 a gateway under load, and compare ledger and nodes.

In each run a real gateway serves requests of five kinds over emulated nodes, which count what they
do for each request. At a random moment it is killed (SIGKILL), then started again on its store, and
serves the rest. At the end the ledger must have

- one row for each request, and none twice. Only requests that were sent within the last second
  before the gateway was killed may be missing, however they ended, if the machine had time for it;
- the nodes' own figures: equal for complete responses, up to the last chunks for those that were
  cut, up to the last second for those that ran when the gateway was killed (outcome `lost`). A
  prompt whose client left counts up to then; its node goes on to the end of its batch.

Clients and nodes run in this process. While the machine has no time for it, the nodes' figures run
on by the clock, and neither side sees the other leave: by so much they may differ (`LoopLag`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from sqlalchemy import Connection, select

from gateway.callers.processes import LOST
from gateway.forward.in_flight import PROGRESS_TOKENS
from gateway.local.server import claim_port, claimed_port
from gateway.store.schema import open_requests, usage
from tests.emulator import EmulatedNode
from tests.emulator.language_model import count_tokens
from tests.emulator.request_body import render_chat
from tests.gateway_processes import serving
from tests.gateways import NO_TLS
from tests.polling import eventually
from tests.postgres import running_postgres
from tests.store.stores import opened

HOST = "127.0.0.1"
LIMIT = 120.0  # seconds for each wait
CLIENTS = 32
NODES = 3
SLOTS = 12
DECODE_TPS = 40.0
PREFILL_TPS = 1000.0
BATCH = 256  # prompt tokens between two reports of progress
LAST_SECOND = 1.0
CUT_SECONDS = 1.0
"""A node generates for so long after its client has left, beside other work of the machine."""
ENDING_EVENTS = 3  # the reason for the end, the usage and `[DONE]`
LAG_STEP = 0.02  # seconds between two looks at the lag
LAG_AROUND = 2.0
"""Seconds around a request's end in which a lag may make its figures differ."""
KINDS = {"stream": 25, "plain": 20, "cut": 20, "left": 15, "prefill": 10, "resumed": 10}
"""Shares of the requests, in percent. `cut`: the client leaves a stream; `left`: it leaves while a
plain response is made; `prefill`: it leaves while its prompt is read; `resumed`: a node cuts it."""


@dataclass(slots=True)
class Sent:
    """One request, as its client saw it. Times are Unix seconds."""

    tag: str
    kind: str
    prompt_tokens: int
    tokens: int  # that it asked for
    started_at: float = 0.0
    ended_at: float = 0.0
    complete: bool = False
    refused: bool = False  # an error response, or none
    broken: bool = False  # the gateway broke the connection


@dataclass(slots=True)
class Findings:
    """What one run showed."""

    requests: int = 0
    rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    doubles: int = 0
    missing: int = 0
    oldest_missing: float = 0.0  # seconds before the kill at which it had been sent
    wrong: list[str] = field(default_factory=list)
    lag: float = 0.0  # the longest of the run's own event loop, in seconds
    compared: Counter[str] = field(default_factory=Counter)

    def compare(self, what: str, difference: int, most: int, why: str, least: int = 0) -> None:
        """The ledger has so many tokens fewer than the node: from `least` to `most` are right."""
        self.compared[what] += 1
        if not least <= difference <= most:
            self.wrong.append(f"{what}: {difference} tokens ({why})")

    @property
    def failed(self) -> bool:
        return bool(self.doubles or self.wrong or self.oldest_missing > LAST_SECOND)


class LoopLag:
    """How late this process's event loop was, and when: `run` must run in a task."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        """When it was more than a step late, in Unix seconds, and by how much."""

    async def run(self) -> None:
        while True:
            due = time.monotonic() + LAG_STEP
            await asyncio.sleep(LAG_STEP)
            late = time.monotonic() - due
            if late > LAG_STEP:
                self._seen.append((time.time(), late))

    def longest(self, since: float = 0.0, until: float = math.inf) -> float:
        """The longest lag that touches this time."""
        return max(
            (late for at, late in self._seen if at >= since and at - late <= until), default=0.0
        )


class Site:
    """Nodes, and the gateway before them as a process that can be killed."""

    def __init__(
        self, folder: Path, nodes: Sequence[EmulatedNode], store_url: str, port: int, **more: Any
    ) -> None:
        self.nodes = nodes
        self.store_url = store_url
        self.url = f"http://{HOST}:{port}"
        self.up = asyncio.Event()
        self.lag = LoopLag()
        self.killed_at = 0.0
        settings = {
            "listen": {"host": HOST, "port": port},
            "store": {"url": store_url},
            "headers": {"to_nodes": ["x-tag"]},
            "identity": {"user_headers": ["x-tag"]},
            "health": {"interval": 1.0, "timeout": 30},
            "retries": {"budget_min": 1000, "backoff": 0.01, "backoff_max": 0.05},
            "queue": {"max": 1000},
            "logging": {"access": False},
        }
        prices = {"cost_per_million_tokens": {"prompt": 3, "completion": 5}}
        specs = [{"name": f"node-{i}", "url": one.url, **prices} for i, one in enumerate(nodes)]
        self._serving = partial(serving, folder, specs, settings={**settings, **more})
        self._running = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._line = await self._running.enter_async_context(self._serving())
        async with httpx.AsyncClient(trust_env=False, verify=NO_TLS) as client:

            async def is_ready() -> bool | None:
                return (await client.get(f"{self.url}/ready")).status_code == 200 or None

            await eventually(is_ready, LIMIT)
        self.up.set()

    async def kill(self) -> None:
        """Kill the gateway: nothing in it can do anything more."""
        self.up.clear()
        self.killed_at = time.time()
        await self._line.kill()
        await self.stop()

    async def stop(self) -> None:
        await self._running.aclose()


@contextlib.asynccontextmanager
async def a_site(
    folder: Path, store_url: str, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[Site]:
    """Nodes and a gateway, which is not started yet."""
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        claim = stack.enter_context(claim_port(HOST))
        site = Site(folder, nodes, store_url, claimed_port(claim), **settings)
        stack.push_async_callback(site.stop)
        yield site


def a_request(rng: random.Random, number: int) -> tuple[Sent, dict[str, Any]]:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    words = PROGRESS_TOKENS if kind == "prefill" else rng.randint(5, 60)
    text = " ".join(f"word{rng.randrange(1000)}" for _ in range(words))
    messages = [{"role": "user", "content": f"{number} {text}"}]
    long = rng.random() < 0.2 or kind in {"cut", "left"}
    tokens = rng.randint(40, 100) if long else rng.randint(4, 16)
    stream = kind in {"stream", "cut", "resumed"} or (kind == "prefill" and rng.random() < 0.5)
    body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return Sent(f"t{number}", kind, count_tokens(render_chat(messages)), tokens), body


async def send(site: Site, rng: random.Random, sent: Sent, body: dict[str, Any]) -> None:
    """Send a request, as its kind says, and note how it went."""
    await site.up.wait()
    if sent.kind == "resumed":
        # `next` applies to whichever node it comes to.
        site.nodes[0].faults.next("reset", tag=sent.tag, after_events=rng.randint(2, 5))
    leave_after = {
        "cut": rng.uniform(0.2, 1.5),
        "left": rng.uniform(0.2, 1.5),
        "prefill": rng.uniform(0.2, 1.4),
    }.get(sent.kind, LIMIT)
    try:
        async with asyncio.timeout(leave_after):
            await _exchange(site, sent, body)
    except TimeoutError:
        pass
    except OSError:
        sent.broken = True
    sent.ended_at = time.time()


async def _exchange(site: Site, sent: Sent, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(HOST, httpx.URL(site.url).port)
    data = msgspec.json.encode(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nX-Tag: {sent.tag}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    # Not before: a client that is late to connect has sent nothing that could be admitted.
    sent.started_at = time.time()
    try:
        writer.write(head.encode() + data)
        answer = await reader.read()
    finally:
        writer.transport.abort()
    sent.refused = not answer.startswith(b"HTTP/1.1 200")
    end = b"[DONE]" if body["stream"] else b'"completion_tokens"'
    sent.complete = not sent.refused and end in answer
    sent.broken = not answer or not (sent.complete or sent.refused or b'{"error"' in answer)


async def play(site: Site, rng: random.Random, requests: int) -> list[Sent]:
    """Send all requests, kill the gateway meanwhile, and start it again."""
    everything = [a_request(rng, number) for number in range(requests)]
    left = iter(everything)
    kill_at = rng.randrange(requests // 20, requests - requests // 20)
    count = 0
    kill = asyncio.Event()

    async def client() -> None:
        nonlocal count
        for sent, body in left:
            count += 1
            if count == kill_at:
                kill.set()
            await send(site, rng, sent, body)

    async def killer() -> None:
        await kill.wait()
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await site.kill()
        await site.start()

    async with asyncio.TaskGroup() as group:
        group.create_task(killer())
        for _ in range(CLIENTS):
            group.create_task(client())
    assert site.killed_at
    return [sent for sent, _ in everything]


def rows_of(store_url: str) -> tuple[list[dict[str, Any]], int]:
    def read(connection: Connection) -> tuple[list[dict[str, Any]], int]:
        rows = [dict(row._mapping) for row in connection.execute(select(usage))]
        return rows, len(connection.execute(select(open_requests.c.id)).all())

    with opened(store_url) as store:
        return store.run_now(read, write=False, seconds=LIMIT)


def compare(site: Site, sent: list[Sent]) -> Findings:
    """Compare the ledger with what clients saw and nodes did."""
    rows, still_open = rows_of(site.store_url)
    found = Findings(len(sent), len(rows))
    if still_open:
        found.wrong.append(f"{still_open} requests are open still")
    by_tag: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_tag.setdefault(row["user"], []).append(row)
        found.outcomes[row["outcome"]] += 1
    for one in sent:
        its_rows = by_tag.pop(one.tag, [])
        found.doubles += max(0, len(its_rows) - 1)
        tallies = [node.engine.tally(one.tag) for node in site.nodes]
        attempts = sum(tally.attempts for tally in tallies)
        tokens = sum(tally.tokens for tally in tallies)
        if its_rows:
            # What a killed gateway ran, its nodes end when they see the connection closed.
            ends = min(one.ended_at, site.killed_at if one.broken else math.inf)
            lag = site.lag.longest(ends - LAG_AROUND, one.ended_at + LAG_AROUND)
            compare_row(found, one, its_rows[0], attempts, tokens, lag)
            continue
        if not attempts and (one.broken or not one.complete):
            continue  # it never reached a node, and perhaps not the gateway
        found.missing += 1
        age = site.killed_at - one.started_at
        if age < 0:
            age = math.inf  # it was sent to the gateway that was started again
        found.oldest_missing = max(found.oldest_missing, age)
    found.doubles += sum(len(others) for others in by_tag.values())
    found.lag = site.lag.longest()
    return found


def compare_row(
    found: Findings, one: Sent, row: dict[str, Any], attempts: int, tokens: int, lag: float
) -> None:
    """Compare one row with its nodes' figures; `lag`: around its end, in seconds."""
    prompt, completion, why = row["prompt_tokens"], row["completion_tokens"], f"{one} {row}"
    if row["outcome"] == LOST:
        most = round((LAST_SECOND + lag) * DECODE_TPS)
        # The events that end an answer hold no tokens, and count until it is accounted for.
        found.compare("lost: completion", tokens - completion, most, why, least=-ENDING_EVENTS)
    elif one.complete:
        # A resumed stream counts its tokens once, however many nodes worked on it.
        made = tokens if attempts == 1 else one.tokens
        what = "complete" if attempts == 1 else "resumed"
        if attempts == 1 and one.kind == "resumed":
            # All tokens had come before it was cut: the gateway made the end by itself.
            found.compare("ended by the gateway: completion", made - completion, 1, why)
            return
        found.compare(f"{what}: completion", made - completion, 0, why)
        found.compare(f"{what}: prompt", one.prompt_tokens - prompt, 0, why)
    elif attempts == 1 and completion:
        most = round((CUT_SECONDS + lag) * DECODE_TPS)
        # The event that ends the answer holds no token.
        found.compare("cut: completion", tokens - completion, most, why, least=-1)
        known = one.prompt_tokens >= PROGRESS_TOKENS
        estimate = abs(one.prompt_tokens - prompt)
        found.compare("cut: prompt", estimate, 0 if known else one.prompt_tokens // 2 + 8, why)
    elif attempts == 1:
        # It was left in prefill: by progress or by the time, but never more than there was.
        found.compare("left: prompt", one.prompt_tokens - prompt, one.prompt_tokens, why)


async def run_once(store_url: str, requests: int, seed: int) -> Findings:
    rng = random.Random(seed)
    nodes = [
        EmulatedNode(slots=SLOTS, context=20_000, decode_tps=DECODE_TPS, batch=BATCH,
                     prefill_tps=PREFILL_TPS, answer_tokens=500)
        for _ in range(NODES)
    ]  # fmt: skip
    for one in nodes[1:]:
        one.faults.share_next(nodes[0].faults)
    with tempfile.TemporaryDirectory() as folder:
        async with a_site(Path(folder), store_url, *nodes) as site:
            await site.start()
            measuring = asyncio.create_task(site.lag.run())
            sent = await play(site, rng, requests)
            await site.stop()
            for one in nodes:
                await one.until(lambda node=one: node.busy == 0, LIMIT)  # type: ignore[misc]
            measuring.cancel()
            return await asyncio.to_thread(compare, site, sent)


@contextlib.contextmanager
def store_urls(kind: str) -> Iterator[Any]:
    if kind == "postgresql":
        with running_postgres() as server:
            yield server.new_database
    else:
        with tempfile.TemporaryDirectory() as folder:
            numbers = iter(range(10_000))
            yield lambda: f"sqlite:///{folder}/{next(numbers)}.db"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.callers.kills", description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    failed = 0
    with store_urls(options.store) as new_url:
        for run in range(options.runs):
            found = asyncio.run(run_once(new_url(), 1000, seed=run + 1))
            failed += found.failed
            print(json.dumps({"load": round(os.getloadavg()[0], 1), **asdict(found)}), flush=True)
    print(f"{failed} of {options.runs} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
