"""One chaos run: load and faults, recovery, and then a check of every invariant."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.bench.machine import waited_seconds
from tests.chaos import workload
from tests.chaos.client import READS_TO_END, Client, ClientBehaviour
from tests.chaos.fault_injection import FaultInjector, ScheduledFault, schedule
from tests.chaos.gateway_worker import GatewayProcess
from tests.chaos.nodes import ChaosNode, EmulatorProcess, RealServer, busy_slots, reference_answers
from tests.chaos.verdict import Verdict, judge
from tests.chaos.workload import REAL_PROMPTS, WorkloadRequest

EMULATORS, SERVERS = 3, 2
CLIENTS, REAL_CLIENTS = 14, 4
PROBES = 4
"""Concurrent requests during recovery: fewer than there are slots, so that nodes stay idle."""
AFTER_RECOVERY = ("probe", "check")  # words in the ids of requests that are sent after the recovery
CHECKS = 8  # requests that must be answered after the recovery
REQUEST_LIMIT = 30.0  # seconds within which every request must end
SLOW_REQUEST_LIMIT = 120.0
"""The same for clients whose kernel takes a kilobyte at a time; the gateway may end earlier."""
READY_LIMIT = 90.0
IDLE_LIMIT = 60.0
GENEROUS_TIMEOUTS: dict[str, dict[str, Any]] = {
    "health": {"timeout": 20.0},
    "timeouts": {"connect": 20.0, "first_byte": 60.0, "silence": 60.0, "total": 90.0},
    "queue": {"max_wait": 60.0},
    "retries": {"wait_for_node": 60.0},
}  # timeouts after the recovery, which no machine is too slow for
NO_DESCRIPTOR_LIMIT = 1 << 20  # more descriptors than any process has open
ALLOWED_GROWTH = 64 << 20
"""Bytes by which the gateway's resident memory may grow over all runs after the first."""


@dataclass(slots=True)
class ChaosTestbed:
    """The nodes and the gateway's process, which many runs share."""

    gateway: GatewayProcess
    emulators: Sequence[EmulatorProcess]
    servers: Sequence[RealServer] = ()
    references: Sequence[WorkloadRequest] = ()
    runs: int = 0
    descriptors: int = 0  # that the process had open after the first run
    rss: int = 0  # its resident bytes then

    @property
    def nodes(self) -> dict[str, ChaosNode]:
        return {node.name: node for node in (*self.emulators, *self.servers)}


@asynccontextmanager
async def running_testbed(prompts: int = len(REAL_PROMPTS)) -> AsyncIterator[ChaosTestbed]:
    """Start nodes and gateway process. `prompts`: how many the real servers are asked."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        gateway = await enter(GatewayProcess())
        names = [f"words-{number}" for number in range(EMULATORS)]
        emulators = await asyncio.gather(*(enter(EmulatorProcess(name)) for name in names))
        real = [await enter(RealServer(f"real-{number}")) for number in range(SERVERS)]
        references = await reference_answers(real[0].direct_url, prompts)
        yield ChaosTestbed(gateway, emulators, real, references)


@dataclass(slots=True)
class FinishedRequest:
    request_id: str
    request: WorkloadRequest
    verdict: Verdict
    began: float
    ended: float
    sent_in_full: bool


@dataclass(slots=True)
class RunReport:
    seed: int
    seconds: float
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rss: int = 0
    took: float = 0.0
    waited: float = 0.0  # seconds in which the gateway was runnable and other work had its core


@dataclass(slots=True)
class ChaosRun:
    testbed: ChaosTestbed
    seed: int
    seconds: float
    process_faults: bool
    """Whether the gateway's own process has faults: no descriptors, a clock that jumps."""
    folder: Path
    min_whole: int = 0
    """Complete answers that the load must get; on a slow machine it runs beyond `seconds`."""
    finished: list[FinishedRequest] = field(default_factory=list)
    out_of_descriptors: list[tuple[float, float]] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        """Settings with short timeouts; the seed varies those that may vary."""
        rng = random.Random(f"settings {self.seed}")
        return {
            "health": {"interval": 0.2, "timeout": 0.5, "discover_interval": 0.5, "open": 0.3,
                       "open_max": 0.6, "slow_start": 0.0, "failures": rng.choice((2, 5))},
            "retries": {"backoff": 0.01, "backoff_max": 0.05, "budget_min": 1000,
                        "attempts": rng.choice((2, 3, 4)), "wait_for_node": 3.0},
            "timeouts": {"connect": 1.0, "first_byte": 2.0, "silence": 1.0, "total": 10.0},
            "heartbeat": rng.choice(("off", 0.1, 15)),
            "queue": {"max": rng.choice((16, 64)), "max_wait": 5.0},
        }  # fmt: skip

    async def __call__(self) -> RunReport:
        began, testbed = time.monotonic(), self.testbed
        gateway = testbed.gateway
        waited = waited_seconds(gateway.pid)
        names = [[node.name for node in nodes] for nodes in (testbed.emulators, testbed.servers)]
        rng = random.Random(f"faults {self.seed}")
        faults = schedule(rng, self.seconds, *names, process_faults=self.process_faults)
        report = RunReport(self.seed, self.seconds)
        report.faults.update(fault.kind for fault in faults)
        inventory = [{"name": n.name, "url": n.url, "host": n.name} for n in testbed.nodes.values()]
        settings = self.settings()
        opened = await gateway.command(
            "open", folder=str(self.folder), nodes=inventory, settings=settings
        )
        generous = settings | {
            name: settings[name] | timeouts for name, timeouts in GENEROUS_TIMEOUTS.items()
        }
        injector = FaultInjector(
            *(gateway, opened["admin"], self.folder, testbed.nodes, inventory, settings, generous)
        )
        self.out_of_descriptors = injector.out_of_descriptors
        try:
            await self._load_and_faults(opened["url"], injector, faults)
            report.violations += await self._check_recovery(opened)
            left = await gateway.command("wait_until_idle", limit=IDLE_LIMIT)
        finally:
            most = testbed.descriptors or NO_DESCRIPTOR_LIMIT
            closed = await gateway.command("close", descriptors=most)
        report.violations += self._check_verdicts()
        report.violations += self._check_records(left["records"])
        report.violations += await self._check_leaks(left, closed)
        report.requests = len(self.finished)
        report.outcomes.update(done.verdict.outcome for done in self.finished)
        report.rss = closed["rss"]
        report.took = time.monotonic() - began
        report.waited = waited_seconds(gateway.pid) - waited
        return report

    # Load.

    async def _load_and_faults(
        self, url: str, injector: FaultInjector, faults: list[ScheduledFault]
    ) -> None:
        until = time.monotonic() + self.seconds
        real_clients = REAL_CLIENTS if self.testbed.servers else 0
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(url, f"w{number}", until, real=False))
            for number in range(real_clients):
                group.create_task(self._client(url, f"r{number}", until, real=True))
            await injector.run(faults)
        await injector.recover()

    async def _client(self, url: str, name: str, until: float, *, real: bool) -> None:
        rng = random.Random(f"{self.seed} {name}")
        async with Client(url, slow=rng.random() < 0.15) as client:
            for number in itertools.count():
                if time.monotonic() >= until and not self._needs_more_answers(until):
                    break
                await asyncio.sleep(rng.expovariate(1 / 0.2))
                request_id = f"chaos-{self.seed}-{name}-{number}"
                request = (
                    workload.real_request(rng, self.testbed.references)
                    if real
                    else workload.emulated_request(rng, seed=request_id)
                )
                await self._send(client, request, request_id, _random_behaviour(rng))

    def _needs_more_answers(self, until: float) -> bool:
        whole = sum(done.verdict.outcome == "whole" for done in self.finished)
        return whole < self.min_whole and time.monotonic() < until + SLOW_REQUEST_LIMIT

    async def _send(
        self,
        client: Client,
        request: WorkloadRequest,
        request_id: str,
        behaviour: ClientBehaviour = READS_TO_END,
    ) -> Verdict:
        began = time.monotonic()
        limit = SLOW_REQUEST_LIMIT if client.slow or behaviour is READS_TO_END else REQUEST_LIMIT
        try:
            response = await client.send(request.path, request.body, request_id, behaviour, limit)
            verdict = judge(request, response)
        except TimeoutError:
            verdict = Verdict("endless", f"no end within {limit:.0f} s")
        whole = behaviour.leaves_while != "sending"
        self.finished.append(
            FinishedRequest(request_id, request, verdict, began, time.monotonic(), whole)
        )
        return verdict

    # Afterwards.

    async def _check_recovery(self, opened: dict[str, Any]) -> list[str]:
        """After the recovery all nodes become ready, and every API is answered."""
        rng = random.Random(self.seed)
        until = time.monotonic() + READY_LIMIT
        for number in itertools.count():
            # A circuit closes after a successful request; one goes there though others are idle.
            await asyncio.gather(
                *(self._send_probe(opened["url"], f"{number}-{one}", rng) for one in range(PROBES))
            )
            states = await _node_states(opened["admin"])
            if len(states) == len(self.testbed.nodes) and set(states.values()) == {"ready"}:
                break
            if time.monotonic() > until:
                return [f"nodes did not come back: {states}"]
            await asyncio.sleep(0.05)
        found = []
        async with Client(opened["url"]) as client:
            for number in range(CHECKS):
                request = self._any_request(rng, number)
                verdict = await self._send(client, request, f"chaos-{self.seed}-check-{number}")
                if verdict.outcome != "whole":
                    found.append(f"after the recovery, {request.path} ended with {verdict}")
        return found

    async def _send_probe(self, url: str, name: str, rng: random.Random) -> None:
        async with Client(url) as client:
            request = self._any_request(rng, rng.randrange(100))
            await self._send(client, request, f"chaos-{self.seed}-probe-{name}")

    def _any_request(self, rng: random.Random, number: int) -> WorkloadRequest:
        if self.testbed.references and number % 3 == 0:
            # A body on which nodes may have died is quarantined for a while: send another one.
            request = workload.real_request(rng, self.testbed.references)
            return replace(request, body=request.body | {"user": f"check {number}"})
        return workload.emulated_request(rng, seed=f"check {number}")

    def _check_verdicts(self) -> list[str]:
        return [
            f"{done.request_id} {done.request.path} stream={done.request.stream}: {done.verdict}"
            for done in self.finished
            if done.verdict.problem is not None and not self._excused(done)
        ]

    def _excused(self, done: FinishedRequest) -> bool:
        """Whether the gateway had no descriptor left to accept this client, which got nothing."""
        return done.verdict.outcome == "broke" and any(
            done.began <= ended + 0.5 and done.ended >= began
            for began, ended in self.out_of_descriptors
        )

    def _check_records(self, records: list[list[Any]]) -> list[str]:
        """The gateway's records match what the clients saw, one record for each request."""
        recorded: dict[str, list[Any]] = {}
        found = []
        for record in records:
            request_id = record[0]
            if request_id in recorded:
                found.append(f"{request_id} was recorded twice: {recorded[request_id]}, {record}")
            recorded[request_id] = record
            after = request_id.split("-")[2] in AFTER_RECOVERY
            if record[-1] > (SLOW_REQUEST_LIMIT if after else REQUEST_LIMIT):
                found.append(f"{request_id} took {record[-1]:.1f} s")
        for done in self.finished:
            kept, verdict, problem = recorded.get(done.request_id), done.verdict, ""
            if kept is None:
                if done.sent_in_full and verdict.outcome != "left" and not self._excused(done):
                    problem = "was never recorded"
            elif verdict.status and kept[1] != verdict.status:
                problem = f"was recorded as {kept[1:]}"
            elif kept[1] == 500 and kept[2] == "internal_error":
                problem = f"failed in the gateway, {kept[1:]}"
            if problem:
                found.append(f"{done.request_id} {problem}, and ended with {verdict}")
        return found

    async def _check_leaks(self, left: dict[str, Any], closed: dict[str, Any]) -> list[str]:
        found = [f"not zero: {left['counts']}"] if left["counts"] else []
        found += [f"an object outlived its request: {leaked}" for leaked in left["leaked"]]
        found += [f"unhandled: {error}" for error in (*left["loop_errors"], *closed["loop_errors"])]
        for node in self.testbed.nodes.values():
            until = time.monotonic() + IDLE_LIMIT
            while (busy := await busy_slots(node.direct_url)) != 0:
                if time.monotonic() > until:
                    found.append(f"{node.name} shows {busy} slots busy")
                    break
                await asyncio.sleep(0.05)
        if closed["tasks"]:
            found.append(f"tasks left: {closed['tasks']}")
        first, files, rss = self.testbed, closed["descriptors"], closed["rss"]
        if first.runs == 0:
            first.descriptors, first.rss = files, rss
        if files > first.descriptors:
            found.append(f"{files} descriptors, {first.descriptors} after run one")
        if rss > first.rss + ALLOWED_GROWTH:
            found.append(f"{rss >> 20} MiB, {first.rss >> 20} after run one")
        first.runs += 1
        log = (self.folder / "gateway.log").read_text()
        if (at := log.find("Traceback")) >= 0:
            found.append(f"a traceback in the log: {log[max(0, at - 300) : at + 1500]}")
        return found


async def _node_states(admin: str) -> dict[str, str]:
    """The states of all nodes, by name; empty when the admin interface does not answer."""
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client:
            nodes = (await client.get(f"{admin}/admin/nodes")).json()["nodes"]
            return {node["name"]: node["state"] for node in nodes}
    return {}


def _random_behaviour(rng: random.Random) -> ClientBehaviour:
    chance = rng.random()
    pause = rng.choice((0.02, 0.2)) if rng.random() < 0.1 else 0.0
    if chance < 0.05:
        return ClientBehaviour("sending", rng.uniform(0, 0.1))
    if chance < 0.15:
        return ClientBehaviour("waiting", rng.choice((0.0, 0.01, 0.1, 0.5)))
    if chance < 0.25:
        return ClientBehaviour("reading", rng.choice((0, 300, 3000)), pause)
    return ClientBehaviour(pause=pause)


async def run_seed(
    testbed: ChaosTestbed,
    seed: int,
    seconds: float,
    *,
    process_faults: bool,
    keep: Path | None = None,
    min_whole: int = 0,
) -> RunReport:
    """Run one seed in a folder of its own; after a violation the folder is copied to `keep`."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        report = await ChaosRun(testbed, seed, seconds, process_faults, folder, min_whole)()
        if report.violations and keep is not None:
            shutil.copytree(folder, keep / f"seed-{seed}", dirs_exist_ok=True, symlinks=True)
    return report
