"""Background requests of a gateway that is killed (SIGKILL): each has its result, paid once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from sqlalchemy import select

from gateway.store.schema import stored_requests
from gateway.stored.response_log import TERMINAL_TYPES
from tests.callers.kills import Site, rows_of
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.language_model import expected_text
from tests.emulator.request_body import render_chat
from tests.gateways import until
from tests.polling import eventually
from tests.store.stores import opened
from tests.stored.following import Follower
from tests.stored.kills import a_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CHAT = "/v1/chat/completions"
LIMIT = 60.0
UNFINISHED = {"queued", "in_progress"}
KINDS = ["response", "deferred"]


@dataclass(slots=True)
class Place:
    """A gateway that can be killed, its node of one slot, and its client."""

    site: Site
    node: EmulatedNode
    client: httpx.AsyncClient

    async def ask(self, kind: str, text: str, tokens: int) -> str:
        """Ask for so many tokens in the background; the path of the result."""
        if kind == "response":
            body = {"model": "demo", "input": text, "background": True, "max_output_tokens": tokens}
            made = await self.client.post("/v1/responses", json=body)
            assert made.status_code == 200, made.text
            return f"/v1/responses/{made.json()['id']}"
        body = {"model": "demo", "messages": messages(text), "max_tokens": tokens}
        made = await self.client.post(CHAT, json=body, headers={"Prefer": "respond-async"})
        assert made.status_code == 202, made.text
        return str(made.headers["location"])

    async def text(self, path: str) -> str:
        """The text of the result, once it is there."""

        async def ended() -> httpx.Response | None:
            found = await self.client.get(path)
            assert found.status_code in {200, 202}, found.text
            if found.status_code == 202 or found.json().get("status") in UNFINISHED:
                return None
            return found

        result = (await eventually(ended, LIMIT)).json()
        if "output" in result:
            return str(result["output"][0]["content"][0]["text"])
        return str(result["choices"][0]["message"]["content"])

    def states(self) -> dict[str, str]:
        """The state of each stored request, by its id."""
        columns = stored_requests.c.id, stored_requests.c.state
        with opened(self.site.store_url) as store:
            rows = store.run_now(lambda c: c.execute(select(*columns)).all(), write=False)
        return {row.id: row.state for row in rows}

    async def paid(self) -> list[str]:
        """Ids of the ledger's rows; none is left open."""
        rows, left_open = await asyncio.to_thread(rows_of, self.site.store_url)
        assert left_open == 0
        return [row["id"] for row in rows]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def expected(kind: str, text: str, tokens: int) -> str:
    if kind == "response":
        return expected_text(render_chat(messages(text)), tokens)
    return expected_chat_text(messages(text), tokens)


def id_of(path: str) -> str:
    return path.rpartition("/")[2]


@asynccontextmanager
async def place(folder: Path, decode_tps: float) -> AsyncIterator[Place]:
    """One request runs at a time."""
    settings, store_url = {"batches": {"background_at_once": 1}}, f"sqlite:///{folder}/store.db"
    async with (
        EmulatedNode(slots=1, decode_tps=decode_tps, answer_tokens=100_000) as node,
        a_site(folder, [node], store_url, settings) as (site, client),
    ):
        await site.start()
        yield Place(site, node, client)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_waits_runs_after_the_restart_once(tmp_path: Path, kind: str) -> None:
    async with place(tmp_path, decode_tps=20) as here:
        first = await here.ask(kind, "the first", 60)
        await until(lambda: here.node.busy == 1, LIMIT)
        second = await here.ask(kind, "the second", 8)
        await here.site.kill()
        assert here.states() == {id_of(first): "running", id_of(second): "waiting"}
        await here.site.start()
        assert await here.text(second) == expected(kind, "the second", 8)
        assert await here.text(first) == expected(kind, "the first", 60)
        # The first one ran twice, for one payment.
        assert here.node.requests == 3
        await here.site.stop()
        assert sorted(await here.paid()) == sorted([id_of(first), id_of(second)])


@pytest.mark.smoke
async def test_a_response_that_runs_goes_on_from_its_events(tmp_path: Path) -> None:
    async with place(tmp_path, decode_tps=20) as here:
        path = await here.ask("response", "tell me", 60)
        follower, again = Follower(path), Follower(path)
        await follower.follow(here.client, until_event=14)
        before = follower.text
        await here.site.kill()
        await here.site.start()
        await follower.follow(here.client)
        assert follower.events[-1]["type"] in TERMINAL_TYPES - {"response.failed"}
        text = expected("response", "tell me", 60)
        assert follower.text == text == await here.text(path)
        await again.follow(here.client)
        assert again.data == follower.data
        # The node was asked for the rest alone.
        assert here.node.requests == 2
        assert before in msgspec.json.decode(here.node.seen[-1].body)["prompt"]
        await here.site.stop()
        assert await here.paid() == [id_of(path)]
