"""One run: load, faults, healing, and then every invariant."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.bench.process import waited_seconds
from tests.chaos import asks
from tests.chaos.asks import PROMPTS, Ask
from tests.chaos.client import PATIENT, Client, Manner
from tests.chaos.house import GatewayProcess
from tests.chaos.judging import Judged, judge
from tests.chaos.nodes import Emulator, Real, busy, references
from tests.chaos.schedule import Fault, schedule
from tests.chaos.trouble import Trouble

EMULATORS = 3
SERVERS = 2
CLIENTS = 14
REAL_CLIENTS = 4
FEW = 4
"""Requests at once that leave nodes idle."""
AFTERWARDS = ("again", "check")
"""Words in the names of requests that are made when everything is healed."""
CHECKS = 8
"""Requests that must be answered when everything is healed."""
LIMIT = 30.0
"""Seconds within which every request must have an end."""
SLOW_LIMIT = 120.0
"""The same for clients whose kernel takes a kilobyte at a time: the gateway may be long done."""
READY_LIMIT = 90.0
REST_LIMIT = 60.0
PATIENT_TIMES: dict[str, dict[str, Any]] = {
    "health": {"timeout": 20.0},
    "timeouts": {"connect": 20.0, "first_byte": 60.0, "silence": 60.0, "total": 90.0},
    "queue": {"max_wait": 60.0},
    "retries": {"wait_for_node": 60.0},
}
"""When all is healed: what no machine is too slow for."""
MANY = 1 << 20
"""Descriptors that nothing has open."""
KEPT_BYTES = 64 << 20
"""Of resident memory by which the gateway's process may grow over all runs, after the first."""


@dataclass(slots=True)
class Kit:
    """What lives through many runs: nodes and the process of the gateways."""

    gateway: GatewayProcess
    emulators: list[Emulator]
    servers: list[Real]
    references: list[Ask]
    runs: int = 0
    descriptors: int = 0
    """That the process has open between runs, and ..."""
    rss: int = 0
    """... its memory, after the first run."""

    @property
    def nodes(self) -> dict[str, Emulator | Real]:
        nodes: list[Emulator | Real] = [*self.emulators, *self.servers]
        return {node.name: node for node in nodes}


@asynccontextmanager
async def a_kit(servers: int = SERVERS, prompts: int = PROMPTS) -> AsyncIterator[Kit]:
    """Everything started; at the end, ended. `prompts`: how many the real servers are asked."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayProcess())
        emulators: list[Emulator] = []
        reals = []

        async def emulate(number: int) -> None:
            emulator = await Emulator.start(f"words-{number}")
            stack.callback(emulator.close)
            emulators.append(emulator)

        async with asyncio.TaskGroup() as group:
            for number in range(EMULATORS):
                group.create_task(emulate(number))
        emulators.sort(key=lambda emulator: emulator.name)
        for number in range(servers):
            server = await Real.start(f"real-{number}")
            stack.push_async_callback(server.aclose)
            reals.append(server)
        known = await references(reals[0].own_url, prompts) if reals else []
        yield Kit(gateway, emulators, reals, known)


@dataclass(slots=True)
class Asked:
    """One request of the run."""

    tag: str
    ask: Ask
    judged: Judged
    began: float
    ended: float
    sent_whole: bool


@dataclass(slots=True)
class Outcome:
    """What one run came to."""

    seed: int
    seconds: float
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    attempts: dict[str, int] = field(default_factory=dict)
    rss: int = 0
    took: float = 0.0
    waited: float = 0.0
    """Seconds that the gateway was ready to run and other work had its core."""


@dataclass(slots=True)
class Run:
    """One seed's run with a kit."""

    kit: Kit
    seed: int
    seconds: float
    machine: bool
    """Whether the gateway's own process meets faults: no descriptors, a clock that jumps."""
    folder: Path
    least: int = 0
    """Whole answers that the storm must have had; on a slow machine it takes longer than told."""
    asked: list[Asked] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        """Impatient ones; what may differ differs by the seed."""
        rng = random.Random(f"settings {self.seed}")
        return {
            "health": {"interval": 0.2, "timeout": 0.5, "discover_interval": 0.5, "open": 0.3,
                       "open_max": 0.6, "slow_start": 0.0, "failures": rng.choice((2, 5))},
            "retries": {"backoff": 0.01, "backoff_max": 0.05, "budget_min": 1000,
                        "attempts": rng.choice((2, 3, 4)), "wait_for_node": 3.0},
            "timeouts": {"connect": 1.0, "first_byte": 2.0, "silence": 1.0, "total": 10.0},
            "heartbeat": rng.choice(("off", 0.1, 15)),
            "queue": {"max": rng.choice((16, 64)), "max_wait": 5.0},
            "policy": rng.choice(("least_finish", "least_loaded", "round_robin")),
        }  # fmt: skip

    async def __call__(self) -> Outcome:
        began = time.monotonic()
        kit = self.kit
        waited = waited_seconds(kit.gateway.pid)
        rng = random.Random(f"faults {self.seed}")
        faults = schedule(
            rng,
            self.seconds,
            [node.name for node in kit.emulators],
            [node.name for node in kit.servers],
            machine=self.machine,
        )
        outcome = Outcome(self.seed, self.seconds)
        outcome.faults.update(fault.kind for fault in faults)
        inventory = [{"name": n.name, "url": n.url, "host": n.name} for n in kit.nodes.values()]
        settings = self.settings()
        opened = await kit.gateway.order(
            "open", folder=str(self.folder), nodes=inventory, settings=settings
        )
        patient = {name: part | PATIENT_TIMES.get(name, {}) if isinstance(part, dict) else part
                   for name, part in settings.items()}  # fmt: skip
        trouble = Trouble(
            kit.gateway, opened["admin"], self.folder, kit.nodes, inventory, settings, patient
        )
        try:
            await self._storm(opened["url"], trouble, faults)
            outcome.violations += await self._recovered(opened)
            left = await kit.gateway.order("rest", limit=REST_LIMIT)
        finally:
            closed = await kit.gateway.order("close", descriptors=kit.descriptors or MANY)
        outcome.violations += self._judged(trouble)
        outcome.violations += self._compared(left, trouble)
        outcome.violations += await self._left_over(left, closed)
        outcome.requests = len(self.asked)
        outcome.outcomes.update(asked.judged.outcome for asked in self.asked)
        outcome.attempts = left["attempts"]
        outcome.rss = closed["rss"]
        outcome.took = time.monotonic() - began
        outcome.waited = waited_seconds(kit.gateway.pid) - waited
        return outcome

    # Load.

    async def _storm(self, url: str, trouble: Trouble, faults: list[Fault]) -> None:
        until = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(url, f"w{number}", until, real=False))
            for number in range(REAL_CLIENTS if self.kit.servers else 0):
                group.create_task(self._client(url, f"r{number}", until, real=True))
            await trouble.run(faults)
        await trouble.heal()

    async def _client(self, url: str, name: str, until: float, *, real: bool) -> None:
        rng = random.Random(f"{self.seed} {name}")
        async with Client(url, slow=rng.random() < 0.15) as client:
            number = 0
            while time.monotonic() < until or self._wants_more(until):
                await asyncio.sleep(rng.expovariate(1 / 0.2))
                tag = f"chaos-{self.seed}-{name}-{number}"
                number += 1
                ask = asks.real(rng, self.kit.references) if real else asks.emulated(rng, seed=tag)
                await self._ask(client, ask, tag, _manner(rng))

    def _wants_more(self, until: float) -> bool:
        whole = sum(asked.judged.outcome == "whole" for asked in self.asked)
        return whole < self.least and time.monotonic() < until + SLOW_LIMIT

    async def _ask(self, client: Client, ask: Ask, tag: str, manner: Manner) -> Judged:
        began = time.monotonic()
        limit = SLOW_LIMIT if client.slow or manner is PATIENT else LIMIT
        try:
            got = await client.ask(ask.path, ask.body, tag, manner, limit)
            judged = judge(ask, got)
        except TimeoutError:
            judged = Judged("endless", f"no end within {limit:.0f} s")
        whole = manner.leaves != "sending"
        self.asked.append(Asked(tag, ask, judged, began, time.monotonic(), whole))
        return judged

    # Afterwards.

    async def _recovered(self, opened: dict[str, Any]) -> list[str]:
        """With everything healed, all nodes come back and every dialect is answered."""
        rng = random.Random(self.seed)
        until = time.monotonic() + READY_LIMIT
        states: dict[str, str] = {}
        for number in itertools.count():
            # A circuit closes when a request has succeeded; one is tried though others are idle.
            await asyncio.gather(
                *(self._again(opened["url"], f"{number}-{one}", rng) for one in range(FEW))
            )
            states = await _states(opened["admin"])
            if len(states) == len(self.kit.nodes) and set(states.values()) == {"ready"}:
                break
            if time.monotonic() > until:
                return [f"nodes did not come back: {states}"]
            await asyncio.sleep(0.05)
        checks = [self._any(rng, number) for number in range(CHECKS)]
        found = []
        async with Client(opened["url"]) as one:
            for number, ask in enumerate(checks):
                judged = await self._ask(one, ask, f"chaos-{self.seed}-check-{number}", PATIENT)
                if judged.outcome != "whole":
                    found.append(f"after all was healed, {ask.path} came to {judged}")
        return found

    async def _again(self, url: str, name: str, rng: random.Random) -> None:
        async with Client(url) as client:
            ask = self._any(rng, rng.randrange(100))
            await self._ask(client, ask, f"chaos-{self.seed}-again-{name}", PATIENT)

    def _any(self, rng: random.Random, number: int) -> Ask:
        if self.kit.references and number % 3 == 0:
            # Not the very body that nodes may have died on: that one is refused for a while.
            ask = asks.real(rng, self.kit.references)
            return replace(ask, body=ask.body | {"user": f"check {number}"})
        return asks.emulated(rng, seed=f"check {number}")

    def _judged(self, trouble: Trouble) -> list[str]:
        return [
            f"{asked.tag} {asked.ask.path} stream={asked.ask.stream}: "
            f"{asked.judged.outcome}: {asked.judged.problem}"
            for asked in self.asked
            if asked.judged.problem is not None and not _excused(asked, trouble)
        ]

    def _compared(self, left: dict[str, Any], trouble: Trouble) -> list[str]:
        """What clients saw is what the gateway noted, once for each request."""
        noted: dict[str, list[Any]] = {}
        found = []
        for record in left["records"]:
            tag = record[0]
            if tag in noted:
                found.append(f"{tag} was noted twice: {noted[tag]}, {record}")
            noted[tag] = record
            if record[-1] > (SLOW_LIMIT if tag.split("-")[2] in AFTERWARDS else LIMIT):
                found.append(f"{tag} took {record[-1]:.1f} s")
        for asked in self.asked:
            record = noted.get(asked.tag)
            if record is None:
                if (
                    asked.sent_whole
                    and asked.judged.outcome != "left"
                    and not _excused(asked, trouble)
                ):
                    found.append(f"{asked.tag} was never noted, and came to {asked.judged}")
            elif asked.judged.code and record[1] != asked.judged.code:
                found.append(f"{asked.tag} was noted as {record[1:]}, and came to {asked.judged}")
            elif record[1] == 500 and record[2] == "internal_error":
                found.append(f"{asked.tag}: the gateway failed: {record[1:]}")
        return found

    async def _left_over(self, left: dict[str, Any], closed: dict[str, Any]) -> list[str]:
        found = [f"not zero: {left['counts']}"] if left["counts"] else []
        found += [f"an object is left while it runs: {held}" for held in left["held"]]
        found += [f"unhandled: {trouble}" for trouble in (*left["troubles"], *closed["troubles"])]
        for node in self.kit.nodes.values():
            taken = await _settled(node.own_url)
            if taken != 0:
                found.append(f"{node.name} shows {taken} slots busy")
        if closed["tasks"]:
            found.append(f"tasks left: {closed['tasks']}")
        kit = self.kit
        if kit.runs == 0:
            kit.descriptors, kit.rss = closed["descriptors"], closed["rss"]
        if closed["descriptors"] > kit.descriptors:
            found.append(f"{closed['descriptors']} descriptors, {kit.descriptors} after run one")
        if closed["rss"] > kit.rss + KEPT_BYTES:
            found.append(f"{closed['rss'] >> 20} MiB, {kit.rss >> 20} after run one")
        kit.runs += 1
        log = (self.folder / "gateway.log").read_text()
        if "Traceback" in log:
            at = log.index("Traceback")
            found.append(f"a traceback in the log: {log[max(0, at - 300) : at + 1500]}")
        return found


async def _states(admin: str) -> dict[str, str]:
    """Of all nodes, by name; empty when it can't be told."""
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client:
            told = (await client.get(f"{admin}/admin/nodes")).json()["nodes"]
            return {node["name"]: node["state"] for node in told}
    return {}


def _manner(rng: random.Random) -> Manner:
    chance = rng.random()
    pause = rng.choice((0.02, 0.2)) if rng.random() < 0.1 else 0.0
    if chance < 0.05:
        return Manner("sending", rng.uniform(0, 0.1))
    if chance < 0.15:
        return Manner("waiting", rng.choice((0.0, 0.01, 0.1, 0.5)))
    if chance < 0.25:
        return Manner("reading", rng.choice((0, 300, 3000)), pause)
    return Manner(pause=pause)


def _excused(asked: Asked, trouble: Trouble) -> bool:
    """Without descriptors a new client can't be taken, and so is told nothing."""
    if asked.judged.outcome != "broke":
        return False
    return any(
        asked.began <= ended + 0.5 and asked.ended >= began for began, ended in trouble.starved
    )


async def _settled(url: str, limit: float = REST_LIMIT) -> int | None:
    """Busy slots of a node, once it has none or `limit` seconds have passed."""
    until = time.monotonic() + limit
    while (taken := await busy(url)) != 0 and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return taken


async def run_seed(
    kit: Kit,
    seed: int,
    seconds: float,
    *,
    machine: bool,
    keep: Path | None = None,
    least: int = 0,
) -> Outcome:
    """One run in a folder of its own; where an invariant broke, the folder goes to `keep`."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        outcome = await Run(kit, seed, seconds, machine, folder, least)()
        if outcome.violations and keep is not None:
            shutil.copytree(folder, keep / f"seed-{seed}", dirs_exist_ok=True, symlinks=True)
    return outcome
