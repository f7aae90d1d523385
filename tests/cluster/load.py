"""Clients that record every answer, and nodes that record every grant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tests.chaos.client import Client, ReceivedResponse
from tests.chaos.response_reader import CorruptResponse, read_plain, read_stream
from tests.cluster.machines import MEMBER_HEADER
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.slots import SlotPool
from tests.servers import running_demo_servers

CHAT = "/v1/chat/completions"
ANSWER_LIMIT = 150.0  # seconds within which every request must end
KEPT_REQUESTS = 12  # requests that a client sends over one connection
PROCESS_PART = len("req_") + 16  # characters of a request's id that name the process which made it
READ_SECONDS = 0.1  # between two looks at a real server's metrics
FAILURE_PAUSE = 0.3  # seconds until a client goes on whose request has failed
SPEED = 40.0  # tokens/s of a slot
LONGEST = 400  # tokens of an answer
SHOWN = 160  # characters of a failure


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; times are of the monotonic clock."""

    client: str
    began: float
    ended: float
    status: int  # 0: none came
    id: str
    member: str
    failure: str  # why it is none that a client could use; empty: it is one
    reason: str = ""  # `X-Gateway-Reason`

    @property
    def refused(self) -> bool:
        """Whether a limit on its key refused it."""
        return self.status == 429 and self.reason == "rate_limit_exceeded"


@dataclass(slots=True)
class Load:
    """All clients, until `stop`; at most `most` requests."""

    url: str
    model: str
    most: int
    exact: bool = True  # whether the answers' texts are known
    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    stopped: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, name: str, key: str, seed: int, tokens: Sequence[int], pause: float) -> None:
        work = self._ask(name, key, random.Random(seed), tokens, pause)
        self._tasks.append(asyncio.create_task(work, name=name))

    async def stop(self) -> None:
        """Send nothing more, and wait for the answers."""
        self.stopped = True
        await asyncio.gather(*self._tasks)

    def _over(self) -> bool:
        return self.stopped or self.sent >= self.most

    async def _ask(
        self, name: str, key: str, rng: random.Random, tokens: Sequence[int], pause: float
    ) -> None:
        headers = {"authorization": f"Bearer {key}"}
        while not self._over():
            async with Client(self.url, headers=headers) as client:
                for _ in range(rng.randrange(1, 2 * KEPT_REQUESTS)):
                    if self._over():
                        break
                    self.sent += 1
                    answer = await self._once(client, name, rng, rng.choice(tokens))
                    self.answers.append(answer)
                    await asyncio.sleep(max(pause, FAILURE_PAUSE if answer.failure else 0.0))

    async def _once(self, client: Client, name: str, rng: random.Random, tokens: int) -> Answer:
        messages = [{"role": "user", "content": f"{name} {rng.getrandbits(64):x}"}]
        stream = rng.random() < 0.7
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": tokens}
        if stream:
            body["stream"] = True
        if not self.exact:
            body["ignore_eos"] = True
        began = time.monotonic()
        try:
            response = await client.send(CHAT, body, limit=ANSWER_LIMIT)
        except TimeoutError:
            response = ReceivedResponse(broke=f"no end within {ANSWER_LIMIT:.0f} s")
        expected = expected_chat_text(messages, tokens) if self.exact else None
        headers = response.headers
        return Answer(
            name, began, time.monotonic(), response.status, headers.get("x-request-id", ""),
            headers.get(MEMBER_HEADER, ""), failure(response, stream, expected),
            headers.get("x-gateway-reason", ""),
        )  # fmt: skip


def _line(number: int) -> str:
    messages = [{"role": "user", "content": f"line {number}"}]
    body = {"model": "demo", "max_tokens": 8, "messages": messages}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})


async def submit_batch(client: httpx.AsyncClient, lines: int) -> str:
    """Submit a batch of so many chats; its id."""
    text = "".join(f"{_line(number)}\n" for number in range(lines))
    file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": text.encode()})
    assert file.status_code == 200, file.text
    made = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = await client.post("/v1/batches", json=made)
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


async def wrong_with_batch(client: httpx.AsyncClient, id_: str, lines: int, seconds: float) -> str:
    """Wait for its end; what is wrong with its lines, which must come out once each."""
    until = time.monotonic() + seconds
    state: dict[str, Any] = {}
    while time.monotonic() < until and state.get("status") not in {"completed", "failed"}:
        await asyncio.sleep(1)
        with contextlib.suppress(httpx.HTTPError):
            answer = await client.get(f"/v1/batches/{id_}")
            state = answer.json() if answer.status_code == 200 else state
    if state.get("status") != "completed":
        return f"the batch is {state.get('status')}: {state.get('request_counts')}"
    output = await client.get(f"/v1/files/{state['output_file_id']}/content")
    found = Counter(json.loads(line)["custom_id"] for line in output.text.splitlines())
    return "" if found == Counter(map(str, range(lines))) else f"{len(found)} of {lines} lines"


def failure(response: ReceivedResponse, stream: bool, expected: str | None) -> str:
    """Why this response is none that a client could use; empty: it is one."""
    if not response.complete:
        return f"broke off: {response.broke}"[:SHOWN]
    if response.status != 200:
        return f"{response.status}: {bytes(response.body).decode(errors='replace')}"[:SHOWN]
    try:
        read = (read_stream if stream else read_plain)(CHAT, bytes(response.body))
    except (CorruptResponse, KeyError) as error:
        return f"corrupt: {error!r}"[:SHOWN]
    if read.error is not None:
        return f"error event: {json.dumps(read.error)}"[:SHOWN]
    if not read.ends:
        return "a stream without its end"
    return "" if expected in {None, read.text} else f"wrong text: {read.text!r}"[:SHOWN]


@dataclass(slots=True)
class Crowding:
    """More requests at a node at once than it has slots."""

    node: str
    began: float
    ended: float
    most: int  # beyond its slots


@dataclass(slots=True)
class NodeWatch:
    """When requests got slots of one node, and when more came than it has."""

    name: str
    url: str
    grants: list[float] = field(default_factory=list)
    crowdings: list[Crowding] = field(default_factory=list)
    _busy: int = 0
    _crowded: Crowding | None = None

    def look(self, busy: int, waiting: int) -> None:
        now = time.monotonic()
        if busy > self._busy:
            self.grants.append(now)
        self._busy = busy
        if waiting and self._crowded is None:
            self._crowded = Crowding(self.name, now, now, 0)
            self.crowdings.append(self._crowded)
        if self._crowded is not None:
            self._crowded.ended = now
            self._crowded.most = max(self._crowded.most, waiting)
            if not waiting:
                self._crowded = None


@contextlib.asynccontextmanager
async def emulated_nodes(address: str, slots: Sequence[int]) -> AsyncIterator[list[NodeWatch]]:
    """Nodes with so many slots each, in this process, which are watched without a gap."""
    async with contextlib.AsyncExitStack() as stack:
        watches = []
        for number, count in enumerate(slots):
            node = await stack.enter_async_context(
                EmulatedNode(host=address, slots=count, decode_tps=SPEED, answer_tokens=LONGEST)
            )
            watches.append(watch := NodeWatch(f"n{number}", node.url))

            def changed(watch: NodeWatch = watch, pool: SlotPool = node.slots) -> None:
                watch.look(pool.busy, sum(not one[3].done() for one in pool.waiting))

            node.slots.on_change = changed
        yield watches


@contextlib.asynccontextmanager
async def real_nodes(address: str, slots: Sequence[int]) -> AsyncIterator[list[NodeWatch]]:
    """llama.cpp's servers with so many slots each, whose metrics are read all the time."""
    with contextlib.ExitStack() as stack:
        watches = []
        for number, count in enumerate(slots):
            [server] = stack.enter_context(running_demo_servers(slots=count, host=address))
            watches.append(NodeWatch(f"n{number}", server.url))
        reading = [asyncio.create_task(_read_metrics(watch)) for watch in watches]
        try:
            yield watches
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _read_metrics(watch: NodeWatch) -> None:
    async with httpx.AsyncClient(base_url=watch.url, trust_env=False, timeout=60) as client:
        while True:
            text = (await client.get("/metrics")).text
            found = dict(re.findall(r"^llamacpp:requests_(\w+) (\d+)", text, re.MULTILINE))
            watch.look(int(found["processing"]), int(found["deferred"]))
            await asyncio.sleep(READ_SECONDS)


def longest_gap(times: Iterable[float], begin: float, end: float) -> float:
    """The longest time without a grant that has begun in this span."""
    inside = sorted(time for time in times if time >= begin)
    bounded = [begin, *(time for time in inside if time <= end)]
    after = [time for time in inside if time > end][:1] or [end]
    return max(later - one for one, later in pairwise([*bounded, *after]))


def most_within(times: Iterable[float], seconds: float) -> int:
    """The most of these times that lie within so many seconds."""
    ordered = sorted(times)
    most = first = 0
    for last, when in enumerate(ordered):
        while when - ordered[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
