"""Clients that record every answer, and emulated nodes that record every grant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tests.chaos.client import Client, ReceivedResponse
from tests.chaos.verdict import judge
from tests.chaos.workload import WorkloadRequest
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.slots import SlotPool

MEMBER_HEADER = "x-member"  # header of each answer with the member that HAProxy had it from
CHAT = "/v1/chat/completions"
ANSWER_LIMIT = 150.0  # seconds within which every request must end
KEPT_REQUESTS = 12  # requests that a client sends over one connection
PROCESS_PART = len("req_") + 16  # characters of a request's id that name the process which made it
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
    id: str
    member: str
    failure: str  # why it is none that a client could use; empty: it is one
    refused: bool  # whether a limit on its key refused it

    @property
    def process(self) -> str:
        return self.id[:PROCESS_PART]


@dataclass(slots=True)
class Load:
    """All clients, until `stop`; at most `most` requests."""

    url: str
    most: int
    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, name: str, key: str, seed: int, tokens: Sequence[int], pause: float) -> None:
        work = self._ask(name, key, random.Random(seed), tokens, pause)
        self._tasks.append(asyncio.create_task(work, name=name))

    async def stop(self) -> None:
        """Send nothing more, and wait for the answers."""
        self.most = 0
        await asyncio.gather(*self._tasks)

    async def _ask(
        self, name: str, key: str, rng: random.Random, tokens: Sequence[int], pause: float
    ) -> None:
        headers = {"authorization": f"Bearer {key}"}
        while self.sent < self.most:
            async with Client(self.url, headers=headers) as client:
                for _ in range(rng.randrange(1, 2 * KEPT_REQUESTS)):
                    if self.sent >= self.most:
                        break
                    self.sent += 1
                    answer = await self._once(client, name, rng, rng.choice(tokens))
                    self.answers.append(answer)
                    await asyncio.sleep(max(pause, FAILURE_PAUSE if answer.failure else 0.0))

    async def _once(self, client: Client, name: str, rng: random.Random, tokens: int) -> Answer:
        body = _chat(f"{name} {rng.getrandbits(64):x}", tokens)
        if rng.random() < 0.7:
            body["stream"] = True
        began = time.monotonic()
        try:
            response = await client.send(CHAT, body, limit=ANSWER_LIMIT)
        except TimeoutError:
            response = ReceivedResponse(broke=f"no end within {ANSWER_LIMIT:.0f} s")
        text = expected_chat_text(body["messages"], tokens)
        verdict, headers = (
            judge(WorkloadRequest(CHAT, body, text, tokens), response),
            response.headers,
        )
        good = (verdict.outcome, verdict.problem) == ("whole", None)
        reason = headers.get("x-gateway-reason")
        return Answer(
            name, began, time.monotonic(), headers.get("x-request-id", ""),
            headers.get(MEMBER_HEADER, ""),
            "" if good else f"{verdict.outcome}: {verdict.problem}"[:SHOWN],
            response.status == 429 and reason == "rate_limit_exceeded",
        )  # fmt: skip


def _chat(text: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": tokens}


async def submit_batch(client: httpx.AsyncClient, lines: int) -> str:
    """Submit a batch of so many chats; its id."""
    asked = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": _chat(f"{number}", 8)}
        for number in range(lines)
    ]
    text = "".join(f"{json.dumps(one)}\n" for one in asked)
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


@dataclass(slots=True)
class NodeWatch:
    """When requests got slots of one node, and when more came than it has."""

    name: str
    url: str
    grants: list[float] = field(default_factory=list)
    crowdings: list[list[float]] = field(default_factory=list)
    """When each began, when requests last waited, and how many did at the most."""
    _busy: int = 0
    _is_crowded: bool = False

    def look(self, busy: int, waiting: int) -> None:
        now = time.monotonic()
        if busy > self._busy:
            self.grants.append(now)
        self._busy = busy
        if waiting and not self._is_crowded:
            self.crowdings.append([now, now, 0])
        if waiting or self._is_crowded:
            began, _, most = self.crowdings[-1]
            self.crowdings[-1] = [began, now, max(most, waiting)]
        self._is_crowded = bool(waiting)


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
