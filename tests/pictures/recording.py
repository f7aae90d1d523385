"""What each slot did while a node was killed in the middle of its streams: a run, and its record.

`record` starts three real llama.cpp servers of two slots with the demo model and a gateway over
them, each in a process of its own, sends the requests of `BEFORE` and `AFTER`, kills
a server by its process id while both of its slots write, and starts it again later. Who waited and
which node had a request is what the admin API said, asked twenty times a second; when an answer's
words came is what the client saw.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from gateway.callers.keys import hash_key
from gateway.local.server import find_binary
from setup.llama_server import PROGRAM, cache_folder
from tests.gateway_processes import serving
from tests.gateways import NO_TLS
from tests.servers import (
    DemoServer,
    running_demo_servers,
    spawn_demo_server,
    stop_demo_server,
    wait_for_demo_server,
)

NODES = ("node-a", "node-b", "node-c")
SLOTS = 2
ASKED_EVERY = 0.05  # seconds between two looks at the admin API
# Exact ones compute alike, whether they write a token or read it: then texts can be compared.
SERVERS: dict[str, Any] = {"slots": SLOTS, "context": 4096, "size": "medium", "extra": ("--exact",)}
AWAY = 6.0  # seconds from the kill until its server is started again
WRITTEN_BEFORE = 25  # tokens that each stream must have been sent when its node is killed
RUN_LIMIT = 300.0  # seconds
WORDS = (
    *("tell", "me", "about", "the", "sea", "and", "stones", "in", "winter", "with", "songs", "of"),
    *("birds", "that", "fly", "far", "away", "over", "green", "hills"),
)
SETTINGS: dict[str, Any] = {
    # Servers that share two cores with each other and the gateway answer probes late.
    "health": {"interval": 0.5, "timeout": 30, "failures": 3},
    "timeouts": {"connect": 5, "silence": 120, "first_byte": 120},
    "retries": {"backoff": 0.1},
    "listen": {"port": 0},
    "admin": {"port": 0},
}


class Ask(NamedTuple):
    at: float  # seconds after the begin, or after the kill
    caller: str
    prompt_words: int
    answer_tokens: int


CALLERS = ("chat", "search", "agent", "report")
KEYS = {one: hash_key(f"lg_{one}_{hashlib.sha256(one.encode()).hexdigest()}") for one in CALLERS}
BEFORE = (
    Ask(0.0, "chat", 20, 170),
    Ask(0.3, "agent", 180, 130),
    Ask(0.6, "search", 120, 110),
    Ask(0.9, "report", 170, 190),
    Ask(1.5, "chat", 40, 100),
)  # they leave a slot free, so that a stream whose node is killed can go on at once
AFTER = (
    Ask(0.8, "search", 80, 40),
    Ask(2.0, "chat", 30, 90),
    Ask(3.5, "report", 90, 90),
    Ask(6.0, "chat", 25, 80),
    Ask(8.0, "agent", 150, 90),
    Ask(9.0, "search", 90, 60),
    Ask(10.0, "report", 120, 100),
    Ask(11.0, "chat", 30, 90),
    Ask(12.0, "search", 80, 50),
    Ask(13.0, "chat", 25, 70),
)


class Spell(msgspec.Struct):
    """A request on one node, in seconds after the begin of the run."""

    node: str
    begin: float
    end: float
    writing: float | None = None  # when the first words of this node came; None: it only read


class Life(msgspec.Struct):
    """A request from its arrival to its end, in seconds after the begin of the run."""

    caller: str
    arrived: float
    ended: float
    outcome: Literal["whole", "failed"]
    tokens: int
    waits: list[tuple[float, float]]
    spells: list[Spell]

    @property
    def was_moved(self) -> bool:
        """Whether several nodes wrote its words."""
        return sum(spell.writing is not None for spell in self.spells) > 1


class Away(msgspec.Struct):
    """From the kill of a node to the moment from which the gateway sent it requests again."""

    node: str
    begin: float
    end: float


class Recording(msgspec.Struct):
    date: str
    server: str
    slots: dict[str, int]  # by node
    callers: list[str]
    seconds: float
    away: Away
    same_text: bool  # whether each stream that moved has the text that an undisturbed server writes
    lives: list[Life]


class Look(NamedTuple):
    """What the admin API said of a request at a moment."""

    at: float
    state: str
    node: str | None
    attempts: int


@dataclass
class Stream:
    """A request of the run, as its client sees it."""

    ask: Ask
    name: str = ""  # its `X-Request-ID`
    body: dict[str, Any] = field(default_factory=dict)
    arrived: float = 0.0
    ended: float = 0.0
    text: str = ""
    ok: bool = False
    words: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    def life(self) -> Life:
        """Return its life: where it was by the looks, and what it did there by its words.

        A look holds until the next one. A node reads from when the request came to it until the
        first word that arrives while it has the request, and writes from then on. Between two nodes
        a request waits.
        """
        outcome: Literal["whole", "failed"] = "whole" if self.ok else "failed"
        life = Life(self.ask.caller, self.arrived, self.ended, outcome, len(self.words), [], [])
        until = [*(look.at for look in self.looks[1:]), self.ended]
        attempts = 0
        for look, end in zip(self.looks, until, strict=True):
            begin = self.arrived if look is self.looks[0] else look.at
            same = bool(life.spells) and look.attempts == attempts and life.spells[-1].end == begin
            if look.state == "running" and same:
                life.spells[-1].end = end
            elif look.state == "running" and look.node is not None and look.attempts > attempts:
                life.spells.append(Spell(look.node, begin, end))
                attempts = look.attempts
            elif life.waits and life.waits[-1][1] == begin:
                life.waits[-1] = (life.waits[-1][0], end)
            else:
                life.waits.append((begin, end))
        for spell in life.spells:
            spell.writing = next((at for at in self.words if spell.begin <= at <= spell.end), None)
        return life


@dataclass
class Run:
    public: httpx.AsyncClient
    admin: httpx.AsyncClient
    begin: float
    streams: list[Stream]
    states: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Since when each node has which state."""

    def now(self) -> float:
        return round(time.monotonic() - self.begin, 2)

    async def send(self, stream: Stream) -> None:
        """Send a request after its seconds, and read its stream to the end."""
        await asyncio.sleep(stream.ask.at)
        stream.arrived = self.now()
        headers = {"Authorization": f"Bearer {KEYS[stream.ask.caller].text}"}
        headers["X-Request-ID"] = stream.name
        async with self.public.stream(
            "POST", "/v1/chat/completions", json={**stream.body, "stream": True}, headers=headers
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                    if piece := choices[0].get("delta", {}).get("content"):
                        stream.text += piece
                        stream.words.append(self.now())
                stream.ok = stream.ok or line == "data: [DONE]"
        stream.ended = self.now()

    async def watch(self) -> None:
        """Ask the admin API where each request is, until cancelled."""
        by_name = {stream.name: stream for stream in self.streams}
        while True:
            asked = self.now()
            for row in (await self.admin.get("/admin/requests")).json()["requests"]:
                look = Look(asked, row["state"], row["node"], row["attempts"])
                stream = by_name.get(row["request_id"])
                if stream and not (stream.looks and look[1:] == stream.looks[-1][1:]):
                    stream.looks.append(look)
            for name, state in (await _node_states(self.admin)).items():
                states = self.states.setdefault(name, [])
                if not states or states[-1][1] != state:
                    states.append((asked, state))
            await asyncio.sleep(ASKED_EVERY)

    def node_amid(self) -> str | None:
        """Return a node that is amid its answers on every slot while nobody waits, if there is one.

        With a slot free elsewhere, one of its streams can go on at once.
        """
        running = [stream for stream in self.streams if stream.looks and not stream.ended]
        waits = any(stream.looks[-1].state != "running" for stream in running)
        if waits or len(running) == SLOTS * len(NODES):
            return None
        amid = [stream.looks[-1].node for stream in running if len(stream.words) >= WRITTEN_BEFORE]
        return next((name for name in NODES if amid.count(name) == SLOTS), None)

    async def play(
        self, servers: Mapping[str, DemoServer], start_again: Callable[[int], DemoServer]
    ) -> Away:
        """Send the traffic, kill a node amid it, and start it again on its port."""
        watching = asyncio.create_task(self.watch())
        again: DemoServer | None = None
        try:
            async with asyncio.timeout(RUN_LIMIT), asyncio.TaskGroup() as group:
                before, after = self.streams[: len(BEFORE)], self.streams[len(BEFORE) :]
                for stream in before:
                    group.create_task(self.send(stream))
                while (name := self.node_amid()) is None:
                    assert not all(one.ended for one in before), "no node was amid two answers"
                    await asyncio.sleep(ASKED_EVERY / 2)
                killed = self.now()
                servers[name].kill()
                for stream in after:
                    group.create_task(self.send(stream))
                await asyncio.sleep(AWAY)
                again = start_again(urlsplit(servers[name].url).port or 0)
                await asyncio.to_thread(wait_for_demo_server, again)
            back = [at for at, state in self.states[name] if state == "ready"]
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if again is not None:
                stop_demo_server(again)
        return Away(name, killed, min(at for at in back if at > killed + AWAY))


def body_of(number: int, ask: Ask) -> dict[str, Any]:
    """Return a request's body: words of its own, and the most likely words as its answer."""
    words = itertools.islice(itertools.cycle(WORDS[number:] + WORDS[:number]), ask.prompt_words)
    messages = [{"role": "user", "content": f"{number} {' '.join(words)}"}]
    length = {"max_tokens": ask.answer_tokens, "temperature": 0}
    return {"model": "demo", "messages": messages, **length}


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=RUN_LIMIT, trust_env=False, verify=NO_TLS)


async def record() -> Recording:
    """Run everything once, and return what came of it.

    Raises AssertionError if no node came to write two answers while another one had a slot free.
    """
    program = cache_folder() / PROGRAM
    binary = find_binary(program) if program.exists() else None
    kind = {**SERVERS, "binary": binary}
    asks = enumerate([*BEFORE, *AFTER])
    streams = [Stream(ask, f"picture-{number}", body_of(number, ask)) for number, ask in asks]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_demo_servers(len(NODES), **kind) as started,
    ):
        servers = dict(zip(NODES, started, strict=True))
        nodes = [{"name": name, "url": one.url, "host": name} for name, one in servers.items()]
        keys = [{"id": key.id, "name": key.id, "sha256": key.sha256} for key in KEYS.values()]
        async with (
            serving(Path(folder), nodes, settings={**SETTINGS, "keys": keys}) as gateway,
            _client(gateway.url) as public,
            _client(gateway.admin_url) as admin,
        ):
            async with asyncio.timeout(RUN_LIMIT):
                while set((await _node_states(admin)).values()) != {"ready"}:  # noqa: ASYNC110
                    await asyncio.sleep(ASKED_EVERY)
            run = Run(public, admin, time.monotonic(), streams)
            away = await run.play(servers, lambda port: spawn_demo_server(port=port, **kind))
        undisturbed = next(servers[name] for name in NODES if name != away.node)
        lives = [stream.life() for stream in streams]
        async with _client(undisturbed.url) as client:
            moved = (s for s, life in zip(streams, lives, strict=True) if life.was_moved)
            same = [await _text(client, stream) == stream.text for stream in moved]
    return Recording(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        server=f"llama-server {binary.version}" if binary else "the server of the wheel xllamacpp",
        slots=dict.fromkeys(NODES, SLOTS),
        callers=list(CALLERS),
        seconds=max(stream.ended for stream in streams),
        away=away,
        same_text=bool(same) and all(same),
        lives=lives,
    )


async def _node_states(admin: httpx.AsyncClient) -> dict[str, str]:
    nodes = (await admin.get("/admin/nodes")).json()["nodes"]
    return {node["name"]: node["state"] for node in nodes}


async def _text(server: httpx.AsyncClient, stream: Stream) -> str:
    """Return what a server that nobody kills answers to the request."""
    response = await server.post("/v1/chat/completions", json=stream.body)
    return str(response.json()["choices"][0]["message"]["content"])
