"""Batches and background requests outlive their process, killed or succeeded: each is paid once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import APIConnectionError, AsyncOpenAI, omit
from sqlalchemy import Row, select

from gateway.store.schema import stored_requests, usage
from gateway.stored.response_log import TERMINAL_TYPES
from tests.callers.kills import LIMIT, Site, a_site, rows_of
from tests.emulator import EmulatedNode, expected_chat_text
from tests.gateway_processes import serving
from tests.gateways import NO_TLS, until
from tests.polling import eventually
from tests.postgres import needs_postgres, running_postgres
from tests.store.stores import locked, opened
from tests.stored.batch_gateway import HEADERS, KEY, key, lines, output, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
UNFINISHED = {"queued", "validating", "in_progress", "finalizing"}
BROKEN_EVERY = 100
"""One line in so many can't be answered: its result is an error of the node."""


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompt_of(number: int) -> list[dict[str, str]]:
    """The prompt of a line; some begin alike."""
    rules = f"You are clerk {number % 20}. " + "Sort what comes by its kind. " * 10
    return [{"role": "system", "content": rules}, *messages(f"Sort item {number}.")]


def a_line(number: int) -> dict[str, Any]:
    prompt: Any = prompt_of(number) if number % BROKEN_EVERY else "no list of messages"
    [line] = lines(1, number, messages=prompt, max_tokens=10 + number % 13)
    return line


@dataclass(slots=True)
class Caller:
    """One that asks for work which is done later."""

    client: httpx.AsyncClient

    async def ask(self, kind: str, text: str, tokens: int) -> str:
        """Ask for so many tokens in the background; the path of the result."""
        if kind == "response":
            body = {"input": text, "background": True, "max_output_tokens": tokens}
            made = await self.client.post("/v1/responses", json=body)
            assert made.status_code == 200, made.text
            return f"/v1/responses/{made.json()['id']}"
        body = {"messages": messages(text), "max_tokens": tokens}
        made = await self.client.post(CHAT, json=body, headers={"prefer": "respond-async"})
        assert made.status_code == 202, made.text
        return str(made.headers["location"])

    async def ended(self, path: str) -> dict[str, Any]:
        """What is at the path once it has ended; the store may be away meanwhile."""

        async def look() -> dict[str, Any] | None:
            answer = await self.client.get(path)
            if answer.status_code != 200 or answer.json().get("status") in UNFINISHED:
                return None
            found: dict[str, Any] = answer.json()
            return found

        return await eventually(look, LIMIT)

    def follower(self, path: str) -> Follower:
        http: Any = self.client  # the types of the package name a copy of httpx
        url = f"{self.client.base_url}/v1"
        api = AsyncOpenAI(base_url=url, api_key=KEY, http_client=http, max_retries=0)
        return Follower(api.responses.retrieve, id_of(path))

    async def recorded(self, path: str, number: int) -> None:
        """Wait until so many lines of a batch have their results."""

        async def look() -> bool | None:
            answer = await self.client.get(path)
            if answer.status_code != 200:
                return None
            return answer.json()["request_counts"]["completed"] >= number or None

        await eventually(look, LIMIT)

    async def results(self, path: str, number: int) -> dict[str, tuple[int, int]]:
        """Tokens of each result by its id: each line of a batch has one, for its own prompt."""
        batch = await self.ended(path)
        assert batch["status"] == "completed", batch
        answers, errors = [
            await output(self, batch[name]) for name in ("output_file_id", "error_file_id")
        ]
        ids = Counter(one["custom_id"] for one in (*answers, *errors))
        assert ids == Counter(f"line-{line}" for line in range(number))
        broken = len(range(0, number, BROKEN_EVERY))
        assert [one["response"]["status_code"] for one in errors] == [400] * broken
        counts = {"total": number, "completed": number - broken, "failed": broken}
        assert batch["request_counts"] == counts
        tokens = {one["id"]: (0, 0) for one in errors}
        for one in answers:
            body, line = one["response"]["body"], int(one["custom_id"].removeprefix("line-"))
            used = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
            text = body["choices"][0]["message"]["content"]
            assert text == expected_chat_text(prompt_of(line), used[1])
            tokens[one["id"]] = used
        sums = batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]
        assert sums == tuple(map(sum, zip(*tokens.values(), strict=True)))
        return tokens


def text_of(result: dict[str, Any]) -> str:
    if "output" in result:
        return str(result["output"][0]["content"][0]["text"])
    return str(result["choices"][0]["message"]["content"])


def id_of(path: str) -> str:
    return path.rpartition("/")[2]


def paid(store_url: str) -> dict[str, tuple[int, int]]:
    """Tokens of each row of the ledger by its id; no request may be left open."""
    found, left_open = rows_of(store_url)
    assert left_open == 0
    ids = {row["id"]: (row["prompt_tokens"], row["completion_tokens"]) for row in found}
    assert len(ids) == len(found)
    return ids


@dataclass
class Follower:
    """OpenAI's client that follows a background response: each event must be the next one."""

    retrieve: Callable[..., Awaitable[Any]]
    id: str
    events: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        kind = "response.output_text.delta"
        return "".join(one.delta for one in self.events if one.type == kind)

    async def run(self, until_event: int = 1 << 30) -> None:
        """Follow to the end, or until this event, from where it was each time a stream breaks."""
        async with asyncio.timeout(LIMIT):
            while len(self.events) <= until_event:
                with contextlib.suppress(httpx.TransportError, APIConnectionError):
                    await self._follow(until_event)
                if self.events and self.events[-1].type in TERMINAL_TYPES:
                    return
                await asyncio.sleep(0.02)

    async def _follow(self, until_event: int) -> None:
        after = len(self.events) - 1 if self.events else omit
        async with await self.retrieve(self.id, stream=True, starting_after=after) as stream:
            async for event in stream:
                assert event.sequence_number == len(self.events)
                self.events.append(event)
                if len(self.events) > until_event:
                    return


@asynccontextmanager
async def a_caller(url: str) -> AsyncIterator[Caller]:
    async with httpx.AsyncClient(
        base_url=url, headers=HEADERS, timeout=60.0, trust_env=False, verify=NO_TLS,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    ) as client:  # fmt: skip
        yield Caller(client)


@asynccontextmanager
async def a_place(
    folder: Path, store_url: str, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[tuple[Site, Caller]]:
    """A gateway that can be killed, and is not started yet; and a caller of it."""
    keys = [key(limits={"rpm": 10_000_000, "tpm": 1_000_000_000})]
    async with (
        a_site(folder, store_url, *nodes, keys=keys, **settings) as site,
        a_caller(site.url) as caller,
    ):
        yield site, caller


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def test_every_line_has_one_result_though_the_gateway_is_killed(
    kind: str, tmp_path: Path
) -> None:
    number = 400
    nodes = [EmulatedNode(slots=12, decode_tps=10.0, answer_tokens=500) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_postgres()) if kind == "postgresql" else None
        url = f"sqlite:///{tmp_path}/store.db" if server is None else server.new_database()
        async with a_place(tmp_path, url, *nodes) as (site, caller):
            await site.start()
            batch = f"/v1/batches/{await submit(caller, [a_line(n) for n in range(number)])}"
            for recorded in (60, 150, 240, 330):
                await caller.recorded(batch, recorded)
                if recorded in {60, 240}:
                    await site.kill()
                    await site.start()
                elif server is not None:
                    await asyncio.to_thread(server.stop)
                    await asyncio.sleep(1.0)
                    await asyncio.to_thread(server.start)
            tokens = await caller.results(batch, number)
            assert await asyncio.to_thread(paid, url) == tokens
        assert sum(node.requests for node in nodes) >= number


SAME = (
    "key", "model", "class", "tier", "node", "path", "stream", "prompt_tokens",
    "completion_tokens", "cost", "gpu_cost", "attempts", "status", "outcome",
)  # fmt: skip
"""What the ledger has of two like responses, whoever recorded them."""


def rows(store_url: str, table: Any) -> dict[str, Row[Any]]:
    with opened(store_url) as store:
        found = store.run_now(lambda connection: connection.execute(select(table)).all())
    return {row.id: row for row in found}


async def test_a_response_that_had_ended_is_recorded_and_paid_once_by_the_next_process(
    store_url: str, tmp_path: Path
) -> None:
    node = EmulatedNode(decode_tps=30, answer_tokens=1000)
    async with a_place(tmp_path, store_url, node) as (site, caller):
        await site.start()
        like = await caller.ask("response", "tell me a story", 12)
        told = await caller.ended(like)
        path = await caller.ask("response", "tell me a story", 12)
        await until(lambda: node.busy == 1)
        with locked(store_url, "usage"):  # so that no row of the ledger can be written
            log = max((tmp_path / "state").rglob("events-*"), key=lambda path: path.name)
            await until(lambda: b"\nevent: response.incomplete\n" in log.read_bytes())
            await site.kill()
        id_ = id_of(path)
        assert rows(store_url, stored_requests)[id_].state == "running"
        assert id_ not in rows(store_url, usage)
        for _ in range(2):
            await site.start()
            assert (await caller.ended(path))["usage"] == told["usage"]
            await until(lambda: rows(store_url, stored_requests)[id_].ended_at is not None)
            await site.kill()
        assert node.requests == 2
    recorded, ledger = rows(store_url, stored_requests), rows(store_url, usage)
    assert {recorded[one].state for one in (id_, id_of(like))} == {"done"}
    assert recorded[id_].result_length == log.stat().st_size
    assert set(ledger) == {id_, id_of(like)}
    for name in SAME:
        assert ledger[id_]._mapping[name] == ledger[id_of(like)]._mapping[name], name
    assert ledger[id_].cost > 0
    assert 0 < ledger[id_].slot_seconds <= ledger[id_].ended_at - ledger[id_].started_at + 0.1


@asynccontextmanager
async def one_slot(folder: Path) -> AsyncIterator[tuple[EmulatedNode, Site, Caller]]:
    """One request runs at a time."""
    node = EmulatedNode(slots=1, decode_tps=20, answer_tokens=100_000)
    url, batches = f"sqlite:///{folder}/store.db", {"background_at_once": 1}
    async with a_place(folder, url, node, batches=batches) as (site, caller):
        await site.start()
        yield node, site, caller


@pytest.mark.parametrize("kind", ["response", "deferred"])
async def test_what_waits_runs_after_the_restart_once(tmp_path: Path, kind: str) -> None:
    async with one_slot(tmp_path) as (node, site, caller):
        first = await caller.ask(kind, "the first", 60)
        await until(lambda: node.busy == 1, LIMIT)
        second = await caller.ask(kind, "the second", 8)
        await site.kill()
        found = rows(site.store_url, stored_requests).values()
        assert {one.id: one.state for one in found} == {
            id_of(first): "running", id_of(second): "waiting",
        }  # fmt: skip
        await site.start()
        for path, text, tokens in ((second, "the second", 8), (first, "the first", 60)):
            expected = expected_chat_text(messages(text), tokens)
            assert text_of(await caller.ended(path)) == expected
        # The first one ran twice, for one payment.
        assert node.requests == 3
        await site.stop()
        assert set(paid(site.store_url)) == {id_of(first), id_of(second)}


@pytest.mark.smoke
async def test_a_response_that_runs_goes_on_from_its_events(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as (node, site, caller):
        path = await caller.ask("response", "tell me", 60)
        follower, again = caller.follower(path), caller.follower(path)
        await follower.run(until_event=14)
        before = follower.text
        await site.kill()
        await site.start()
        await follower.run()
        assert follower.events[-1].type != "response.failed"
        text = expected_chat_text(messages("tell me"), 60)
        assert follower.text == text == text_of(await caller.ended(path))
        await again.run()
        assert again.events == follower.events
        # The node was asked for the rest alone.
        assert node.requests == 2
        assert before in msgspec.json.decode(node.seen[-1].body)["prompt"]
        await site.stop()
        assert set(paid(site.store_url)) == {id_of(path)}


async def test_waiting_work_goes_on_over_handovers(tmp_path: Path) -> None:
    number, url = 300, f"sqlite:///{tmp_path}/gateway.db"
    settings = {"store": {"url": url}, "keys": [key()]}
    async with (
        EmulatedNode(slots=8, decode_tps=40.0, prefill_tps=5000.0, answer_tokens=5000) as node,
        serving(tmp_path, node, settings=settings) as line,
        a_caller(line.url) as caller,
    ):
        path = await caller.ask("response", "tell", 200)
        batch = f"/v1/batches/{await submit(caller, [a_line(n) for n in range(number)])}"
        leaves, stays, again = [caller.follower(path) for _ in range(3)]
        await leaves.run(until_event=20)
        following = asyncio.create_task(stays.run())
        for recorded in (20, 80):
            await caller.recorded(batch, recorded)
            await line.succeed()
        # The others read what the first process writes.
        await leaves.run()
        await following
        await line.until("ended", 2)
        tokens = await caller.results(batch, number)
        await again.run()
        assert leaves.events == stays.events == again.events
        text = expected_chat_text(messages("tell"), 200)
        assert stays.text == text == text_of(await caller.ended(path))
        # A process that is succeeded brings to an end what it runs: nothing ran twice.
        assert node.requests == number + 1
    assert not [entry for entry in line.lines if entry.get("level") == "error"]
    ledger = paid(url)
    assert ledger.pop(id_of(path))[1] == 200
    assert ledger == tokens
