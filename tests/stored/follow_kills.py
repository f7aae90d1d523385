"""`python -m tests.stored.follow_kills`: clients follow background streams of a gateway that dies.

So many background responses run over emulated nodes, and a client follows each: it leaves at
random, in the middle of an event too, and goes on with `starting_after`. Meanwhile the gateway is
killed (SIGKILL) and started again; a PostgreSQL server is restarted twice besides. At the end each
client must have had every event once and in order, the text must be the one that the model gives,
and the stored response must have it as well; those that are read again from the beginning must be
the same, byte for byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.callers.kills import Site
from tests.emulator import EmulatedNode
from tests.emulator.language_model import expected_text
from tests.emulator.request_body import render_chat
from tests.postgres import PostgresServer
from tests.stored.following import Follower
from tests.stored.kills import a_site, a_store

DECODE_TPS = 8.0
NODES, SLOTS = 4, 64
AGAIN = 50
"""Responses that are read again from the beginning."""


@dataclass(slots=True)
class Findings:
    """What one run showed."""

    complete: int = 0
    kills: int = 0
    store_restarts: int = 0
    follows: int = 0
    left: int = 0
    broken: int = 0
    seconds: float = 0.0
    interrupted: int = 0
    """Responses that were going on at a kill at least once."""
    wrong: list[str] = field(default_factory=list)


class Client:
    """Has one background response made, and follows it: it leaves at random and comes back."""

    def __init__(self, site: Site, number: int, seed: int, tokens: int, found: Findings) -> None:
        self.site = site
        self.rng = random.Random(seed * 100_003 + number)
        self.found = found
        text, most = f"question {number} of {seed}", self.rng.randint(tokens // 2, tokens)
        self.expected = expected_text(render_chat([{"role": "user", "content": text}]), most)
        self.had = Follower(
            body={"model": "demo", "input": text, "background": True, "stream": True,
                  "temperature": 0, "max_output_tokens": most}
        )  # fmt: skip

    async def run(self, client: httpx.AsyncClient) -> None:
        """Create the response, and follow it to its end."""
        kills_seen = 0
        while not self.had.has_ended:
            await self.site.up.wait()
            try:
                await self._follow(client)
            except (httpx.HTTPError, ConnectionError):
                self.found.broken += 1
                kills_seen += bool(self.had.path) and not self.site.up.is_set()
                await asyncio.sleep(self.rng.random() * 0.2)
        self.found.complete += 1
        self.found.interrupted += bool(kills_seen)

    async def _follow(self, client: httpx.AsyncClient) -> None:
        self.found.follows += 1
        creates = not self.had.path
        try:
            async with asyncio.timeout(None if creates else self.rng.expovariate(1 / 8.0)):
                status = await self.had.follow(client)
        except TimeoutError:
            self.found.left += 1
            return
        if status in {429, 502, 503}:
            await asyncio.sleep(0.5)
            return
        assert status == 200, f"{self.had.path}: status {status}"
        assert creates or self.had.has_ended, f"{self.had.path}: a stream ended without an end"

    async def problems(self, client: httpx.AsyncClient, *, again: bool) -> list[str]:
        """Return what is wrong with its events and with the response as it is stored."""
        had = self.had
        if not had.has_ended:
            return [f"{had.path}: not complete, {len(had.events)} events"]
        stored = (await client.get(had.path)).json()
        output = stored.get("output") or [{"content": [{"text": ""}]}]
        repeated = Follower(had.path)
        if again:
            await repeated.follow(client)
        wrong = {
            f"failed: {stored.get('error')}": had.events[-1]["type"] == "response.failed",
            "another text": had.text != self.expected,
            "another text is stored": output[0]["content"][0]["text"] != self.expected,
            "the stream differs when it is read again": again and repeated.data != had.data,
        }
        return [f"{had.path}: {what}" for what, is_so in wrong.items() if is_so]


@dataclass(slots=True)
class Run:
    """All clients of one run, and what happens to the gateway and its store meanwhile."""

    site: Site
    clients: list[Client]
    found: Findings
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def events(self) -> int:
        return sum(len(one.had.events) for one in self.clients)

    async def kill(self, every: float) -> None:
        """Kill the gateway, and start it again, until it is over.

        Its time counts from the first event on: a busy machine may need long for as many creations
        at once, and would never get behind them.
        """
        while True:
            seen = self.events
            while self.events == seen and not self.over.is_set():  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self.over.wait()
                return
            await self.site.kill()
            self.found.kills += 1
            await self.site.start()

    async def restart(self, server: PostgresServer | None) -> None:
        """Restart PostgreSQL when a third of the responses are complete, and two thirds."""
        for third in (1, 2) if server is not None else ():
            while self.found.complete < len(self.clients) * third / 3:
                if self.over.is_set():
                    return
                await asyncio.sleep(0.1)
            assert server is not None
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.start)
            self.found.store_restarts += 1


async def try_it(
    folder: Path, store_url: str, server: PostgresServer | None, given: argparse.Namespace
) -> Findings:
    """One run on an empty store; `server`: the PostgreSQL server that is to be restarted."""
    found = Findings()
    async with AsyncExitStack() as stack:
        speeds: dict[str, Any] = {"decode_tps": DECODE_TPS, "prefill_tps": 5000.0}
        nodes = [EmulatedNode(slots=SLOTS, answer_tokens=100_000, **speeds) for _ in range(NODES)]
        for node in nodes:
            await stack.enter_async_context(node)
        settings = {
            "batches": {"background_at_once": NODES * SLOTS, "waiting_per_key": 100_000},
            # The nodes share this process with all clients.
            "timeouts": {"first_byte": 60.0, "silence": 60.0},
        }
        site, client = await stack.enter_async_context(a_site(folder, nodes, store_url, settings))
        await site.start()
        clients = [
            Client(site, at, given.seed, given.tokens, found) for at in range(given.responses)
        ]
        run, began = Run(site, clients, found), time.monotonic()
        troubles = [
            asyncio.create_task(one) for one in (run.kill(given.kill_every), run.restart(server))
        ]
        tasks = [asyncio.create_task(one.run(client)) for one in clients]
        try:
            await asyncio.wait(tasks, timeout=given.seconds)
            found.seconds = time.monotonic() - began
        finally:
            run.over.set()
            await asyncio.gather(*troubles)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        found.wrong += [repr(one) for one in results if isinstance(one, Exception)]
        for at, one in enumerate(clients):
            found.wrong += await one.problems(client, again=at < AGAIN)
        if found.complete < given.responses:
            await site.kill()  # else it ends what runs first
    return found


def main() -> int:
    """Run it, and tell what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.stored.follow_kills")
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--responses", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=240.0, help="at most")
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=60, help="most of a response")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, a_store(given.store) as (url, server):
        found = asyncio.run(try_it(Path(folder), url, server, given))
        if found.wrong:
            print((Path(folder) / "log").read_text()[-3000:])
    print(
        f"{found.complete} of {given.responses} responses complete in {found.seconds:.0f} s, "
        f"{found.kills} kills, {found.interrupted} were followed through one; "
        f"the store was restarted {found.store_restarts} times\n"
        f"{found.follows} connections of followers: {found.left} left, {found.broken} broke\n"
        f"wrong: {len(found.wrong)}"
    )
    for line in found.wrong[:20]:
        print(" ", line)
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
