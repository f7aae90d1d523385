"""A cluster of real processes under load, while faults happen: `python -m tests.cluster.drill`.

Members run on machines of their own (network namespaces), behind HAProxy, over PostgreSQL, which
every second one reaches through pgbouncer; nodes are emulated. Clients record every answer. After
each fault all must be well again by itself. Linux, as root; needs PostgreSQL, pgbouncer, HAProxy.

What must hold: no request fails but those of a process that was killed; no node has more requests
than slots; grants pause for no longer than a term and two seconds; the ledger has each answer once;
a limit is exceeded by one request for each member at most; nothing is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from gateway.callers.keys import new_key
from tests.cluster import network
from tests.cluster.load import (
    Answer,
    Load,
    NodeWatch,
    emulated_nodes,
    longest_gap,
    most_within,
    submit_batch,
    wrong_with_batch,
)
from tests.cluster.machines import HAPROXY, LIMIT, TERM, Member, running_haproxy, running_members
from tests.cluster.pgbouncer import PROGRAM as PGBOUNCER
from tests.cluster.pgbouncer import running_pgbouncer
from tests.polling import eventually
from tests.postgres import PostgresServer, postgres_binaries, running_postgres
from tests.processes import gone

METERED_RPM = 30
METERED_WINDOW = 58.0  # seconds: a minute, less what lies between a client's clock and the count
ORPHAN_SECONDS = 1.5  # seconds for which an edge may live on whose gateway was killed
BREAK_SECONDS = 3.0  # seconds after a process was killed within which its answers break off
BRIEF = 0.05
"""Seconds for which a node may have one request too many: one is cancelled as another comes."""
BOOK_SECONDS = 45.0  # seconds until the ledger must have all rows
ROWS = "SELECT id, status FROM usage WHERE key <> 'batch'"
POOLED = 12  # connections that pgbouncer has to the database


@dataclass(slots=True)
class Drill:
    members: list[Member]
    database: PostgresServer
    database_name: str
    bouncer: int  # its port
    nodes: list[NodeWatch]
    load: Load
    rng: random.Random
    admin: httpx.AsyncClient
    away: float  # seconds for which the database is stopped
    killed: list[tuple[float, str]] = field(default_factory=list)  # when, and which member
    forgotten: list[tuple[float, float]] = field(default_factory=list)
    """Spans of time whose rows the database has lost."""
    begun: list[tuple[float, str]] = field(default_factory=list)  # when, and which fault
    wrong: list[str] = field(default_factory=list)

    def is_wrong(self, what: str) -> None:
        self.wrong.append(what)
        print(f"WRONG: {what}", flush=True)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.database.execute(statement, self.database_name)

    async def leader(self) -> tuple[Member, int]:
        """Who leads by the row, once somebody does, and the epoch."""

        async def look() -> tuple[Member, int] | None:
            with contextlib.suppress(Exception):
                rows = await asyncio.to_thread(self.sql, "SELECT holder, epoch FROM leadership")
                for holder, epoch in rows:
                    for one in self.members:
                        if holder.partition("/")[0] == one.name:
                            return one, epoch
            return None

        return (self.members[0], 0) if len(self.members) == 1 else await eventually(look, LIMIT)

    def when(self, time: float) -> str:
        """Where in the course of things a time lies."""
        before = [one for one in self.begun if one[0] <= time]
        return f"{time - before[-1][0]:.1f} s after {before[-1][1]}" if before else "early"

    def note_killed(self, member: Member) -> None:
        self.killed.append((time.monotonic(), member.name))


Which = Callable[[Drill], Awaitable[Member]]
TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


async def leader_of(drill: Drill) -> Member:
    return (await drill.leader())[0]


async def follower_of(drill: Drill) -> Member:
    leader = await leader_of(drill)
    return drill.rng.choice([one for one in drill.members if one is not leader] or [leader])


async def kill_edge(drill: Drill) -> None:
    member = drill.rng.choice(drill.members)
    if edges := member.edges():
        drill.note_killed(member)
        psutil.Process(drill.rng.choice(edges)).kill()


async def kill(drill: Drill, which: Which) -> None:
    """Kill a member, and start it again as systemd would, `RestartSec=2`."""
    member = await which(drill)
    drill.note_killed(member)
    pids = member.kill()
    await asyncio.sleep(2)
    assert all(map(gone, pids)), f"processes of {member.name} outlive it"
    member.start()
    await member.ready()


async def stop(pids: Sequence[int], seconds: float, rng: random.Random) -> None:
    if pids:
        process = psutil.Process(rng.choice(pids))
        process.suspend()
        await asyncio.sleep(seconds)
        process.resume()


async def stop_leader(drill: Drill) -> None:
    """Beyond its term."""
    await stop([(await leader_of(drill)).pid], 3 * TERM, drill.rng)


async def stop_edge(drill: Drill) -> None:
    await stop(drill.rng.choice(drill.members).edges(), 2 * TERM, drill.rng)


async def restart_leader(drill: Drill) -> None:
    member = await leader_of(drill)
    await member.terminate()
    member.start()
    await member.ready()


async def upgrade(drill: Drill) -> None:
    """Have all members succeeded, one after the other."""
    for member in drill.members:
        await member.succeed()
        await member.ready()
        await asyncio.sleep(TERM)


async def terminate_backends(drill: Drill) -> None:
    for _ in range(5):
        drill.sql(TERMINATE)
        await asyncio.sleep(1)


async def slow_database(drill: Drill) -> None:
    """Statements may take a second, and locks hold them up for longer."""
    drill.sql(f"ALTER DATABASE {drill.database_name} SET statement_timeout = '1s'")
    drill.sql(TERMINATE)
    for table in ("leadership", "usage"):
        lock = f"BEGIN; LOCK {table} IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(3); COMMIT"
        await asyncio.to_thread(drill.sql, f"SET statement_timeout = 0; {lock}")
        await asyncio.sleep(2)
    drill.sql(f"ALTER DATABASE {drill.database_name} RESET statement_timeout")


async def stop_database(drill: Drill, *, killed: bool = False) -> None:
    await asyncio.to_thread(drill.database.stop)
    member = drill.rng.choice(drill.members)
    try:
        if killed:
            await asyncio.sleep(3 * TERM)
            drill.note_killed(member)
            member.kill()
            await asyncio.sleep(2)
            member.start()
        await asyncio.sleep(drill.away)
    finally:
        await asyncio.to_thread(drill.database.start)
    await member.ready()


async def halt_database(drill: Drill) -> None:
    """Connections stay, and nobody answers."""
    with drill.database.halted():
        await asyncio.sleep(drill.away)


async def stale_standby(drill: Drill) -> None:
    """Promote a standby that has lost touch some terms ago."""
    # What it has not booked yet is lost with what comes after the copy.
    copied = time.monotonic()
    await _booked(drill, copied)
    await asyncio.to_thread(drill.database.copy_data)
    # Epochs go on, which the standby does not know.
    await kill(drill, leader_of)
    await asyncio.sleep(3 * TERM)
    await asyncio.to_thread(drill.database.promote_copy)
    drill.forgotten.append((copied, time.monotonic() + 1))


async def part(drill: Drill, which: Which, *, members: bool, database: bool) -> None:
    """Let a member reach no other members, or not the database, for a while."""
    member = await which(drill)
    others = [one.machine.address for one in drill.members if one is not member]
    ports = (drill.database.port, drill.bouncer) if database else ()
    member.machine.cut(others if members else (), ports)
    await asyncio.sleep(5 * TERM)
    member.machine.mend()


FAULTS: dict[str, Callable[[Drill], Awaitable[None]]] = {
    "none": lambda _: asyncio.sleep(5),  # what all others are compared to
    "kill-edge": kill_edge,
    "kill-leader": partial(kill, which=leader_of),
    "kill-follower": partial(kill, which=follower_of),
    "stop-leader": stop_leader,
    "stop-edge": stop_edge,
    "restart-leader": restart_leader,
    "upgrade": upgrade,
    "terminate-backends": terminate_backends,
    "slow-database": slow_database,
    "stop-database": stop_database,
    "kill-without-database": partial(stop_database, killed=True),
    "halt-database": halt_database,
    "stale-standby": stale_standby,
    "part-leader": partial(part, which=leader_of, members=True, database=False),
    "part-leader-from-database": partial(part, which=leader_of, members=False, database=True),
    "part-follower": partial(part, which=follower_of, members=True, database=False),
    "part-follower-from-all": partial(part, which=follower_of, members=True, database=True),
}
SHORT = ("none", "kill-edge", "kill-leader", "stop-leader", "part-leader", "stop-database")


async def run_faults(drill: Drill, names: Sequence[str], settle: float) -> None:
    for name in names:
        (leader, epoch), began = await drill.leader(), time.monotonic()
        drill.begun.append((began, name))
        try:
            await FAULTS[name](drill)
        except Exception as error:  # noqa: BLE001 - it is told, and the next ones are tried
            drill.is_wrong(f"{name}: {type(error).__name__}: {error}")
        await asyncio.sleep(settle)
        new, new_epoch = await drill.leader()
        span = began, time.monotonic()
        await all_well(drill, name)
        (living, dead), answers = failures(drill, *span), drill.load.answers
        print(
            f"{name:26} {span[1] - began:5.0f} s "
            f"{sum(began <= one.ended < span[1] for one in answers):6} answers "
            f"{len(living):4} failed {len(dead):3} died  gap {gap(drill, *span):5.2f} s  "
            f"{leader.name}->{new.name} {epoch}->{new_epoch}",
            flush=True,
        )


async def all_well(drill: Drill, after: str) -> None:
    """Wait until one member leads, and all say so and show all edges; note if that takes long."""
    until = time.monotonic() + LIMIT
    while len(drill.members) > 1:
        shown = [shown_by(await one.status(drill.admin)) for one in drill.members]
        roles = ("follower",) * (len(drill.members) - 1) + ("leader",)
        edges = sum(len(one.edges()) for one in drill.members)
        if len(set(shown)) == 1 and shown[0][0] and shown[0][2:] == (roles, edges):
            return
        if time.monotonic() > until:
            drill.is_wrong(f"after {after} members show {shown} and there are {edges} edges")
            return
        await asyncio.sleep(0.5)


def shown_by(status: dict[str, Any] | None) -> tuple[Any, ...]:
    """What a member shows: leader, epoch, roles, and how many edges are ready."""
    told = (status or {}).get("cluster") or {}
    members = told.get("members", ())
    ready = sum(edge["ready"] for one in members for edge in one["edges"])
    return told.get("leader"), told.get("epoch"), tuple(sorted(m["role"] for m in members)), ready


# Verdict.


def failures(
    drill: Drill, begin: float = 0.0, end: float = float("inf")
) -> tuple[list[Answer], list[Answer]]:
    """Requests of that time that failed: of processes that live, and of those that were killed."""
    newest: dict[str, float] = {}
    for one in drill.load.answers:
        if not one.failure:
            newest[one.process] = max(newest.get(one.process, 0.0), one.began)
    living: list[Answer] = []
    dead: list[Answer] = []
    for one in drill.load.answers:
        if begin <= one.ended < end and one.failure and not one.refused:
            excused = any(
                member == one.member
                and one.began <= at + ORPHAN_SECONDS
                and at - 0.1 <= one.ended <= at + BREAK_SECONDS
                and not (one.id and newest.get(one.process, 0.0) > at + 0.5)
                for at, member in drill.killed
            )
            (dead if excused else living).append(one)
    return living, dead


def gap(drill: Drill, begin: float, end: float) -> float:
    """The longest pause of grants at all nodes."""
    granted = [when for watch in drill.nodes for when in watch.grants]
    return longest_gap(granted, begin, end)


def judge(drill: Drill, begin: float, end: float, most_pause: float) -> None:
    """Print all figures; what must not be goes to `drill.wrong`."""
    living, dead = failures(drill)
    for text, count in Counter(f"{one.client}: {one.failure}" for one in living).most_common(12):
        drill.is_wrong(f"{count} failed: {text}")
    for watch in drill.nodes:
        for since, until, most in watch.crowdings:
            if until - since > BRIEF:
                drill.is_wrong(f"{most} too many at {watch.name}, {drill.when(since)}")
    pause = gap(drill, begin, end)
    if pause > TERM + most_pause:
        drill.is_wrong(f"no grant for {pause:.2f} s")
    metered = [one for one in drill.load.answers if one.client == "metered" and one.id]
    most = most_within([one.began for one in metered if not one.refused], METERED_WINDOW)
    if most > METERED_RPM + len(drill.members):
        drill.is_wrong(f"{most} requests in a minute by a key that may send {METERED_RPM}")
    answers = len(drill.load.answers)
    print(f"{answers} answers, {len(living)} failed, {len(dead)} ended with a killed process")
    print(f"no grant for {pause:.2f} s at most; {most} requests in a minute of {METERED_RPM}")


async def compare_ledger(drill: Drill) -> None:
    """Whether the ledger has each answer once, and nothing else."""
    rows, needed = await _booked(drill, float("inf"))
    if needed:
        wrong = Counter((one.member, rows.get(one.id)) for one in needed)
        drill.is_wrong(
            f"{len(needed)} answers are not in the ledger: members and status {dict(wrong)}, such "
            f"as {[one.id for one in needed[:3]]}, the first {drill.when(needed[0].ended)}, "
            f"the last {drill.when(needed[-1].ended)}"
        )
    # What has broken off has no id here.
    failed = sum(bool(one.failure) for one in drill.load.answers)
    good = {one.id for one in drill.load.answers if not one.failure}
    unknown = [id_ for id_, status in rows.items() if status == 200 and id_ not in good]
    if len(unknown) > failed:
        drill.is_wrong(f"{len(unknown)} rows are no answers, such as {unknown[:3]}")


async def _booked(drill: Drill, before: float) -> tuple[dict[str, int], list[Answer]]:
    """Wait until the ledger has what has ended before this time; its rows, and what it lacks."""
    until = time.monotonic() + BOOK_SECONDS
    while True:
        rows = dict(await asyncio.to_thread(drill.sql, ROWS))
        missing = [
            one
            for one in drill.load.answers
            if not one.failure and one.ended <= before and rows.get(one.id) != 200
        ]
        needed = [one for one in missing if not _may_be_lost(drill, one)]
        if not needed or time.monotonic() > until:
            return rows, needed
        await asyncio.sleep(1)


def _may_be_lost(drill: Drill, answer: Answer) -> bool:
    return any(begin <= answer.ended <= end for begin, end in drill.forgotten) or any(
        member == answer.member and at - BREAK_SECONDS <= answer.ended <= at + 1
        for at, member in drill.killed
    )


async def end_members(drill: Drill) -> None:
    """End all, and look for what is left."""
    await asyncio.gather(*(one.terminate() for one in drill.members), return_exceptions=True)
    for member in drill.members:
        if not member.ends or member.ends[-1]:
            drill.is_wrong(f"{member.name} ended with {member.ends}")
        if traced := re.findall(r".*Traceback \(most.*", member.log()):
            drill.is_wrong(f"{member.name} logged {traced[0]}")
    for pid, command in network.commands():
        if {"gateway", "serve"} <= set(command) or {"gateway", "edge"} <= set(command):
            drill.is_wrong(f"left at the end: {pid} {' '.join(command)[:120]}")


# Setting it up.


async def drilled(options: argparse.Namespace, folder: Path) -> list[str]:
    """Run it; what was wrong."""
    network.switch()
    async with contextlib.AsyncExitStack() as stack:
        database = stack.enter_context(running_postgres(network.SWITCH))
        direct = database.new_database()
        bouncer = stack.enter_context(running_pgbouncer(database, POOLED))
        pooled = direct.replace(f":{database.port}/", f":{bouncer}/")
        slots = [int(one) for one in options.slots.split(",")]
        nodes = await stack.enter_async_context(emulated_nodes(network.SWITCH, slots))
        keys = {name: new_key(name) for name in ("load", "metered", "batch")}
        entries: list[dict[str, Any]] = [
            {"id": name, "sha256": key.sha256, "name": name} for name, key in keys.items()
        ]
        entries[1]["limits"] = {"rpm": METERED_RPM}
        settings = {
            "listen": {"edges": options.edges},
            "keys": entries,
            "health": {"interval": 0.5, "timeout": 20},
            "queue": {"max": 2000, "max_wait": 120},
            "batches": {"folder": str(folder / "files")},
            "shutdown": {"delay": 1, "grace": 30},
        }
        inventory = [{"name": one.name, "url": one.url} for one in nodes]
        members: list[Member] = []
        count, stores = 1 if options.one else 3, (direct, pooled)
        for member in running_members(count, folder, stores, settings, inventory):
            members.append(member)
            stack.callback(member.end_at_once)
        url = stack.enter_context(running_haproxy(folder, members, network.SWITCH))
        admin = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=5))
        drill = Drill(
            members, database, direct.rpartition("/")[2], bouncer, nodes,
            Load(url, options.requests), random.Random(options.seed), admin, options.away,
        )  # fmt: skip
        for member in members:
            await member.ready()
        await all_well(drill, "the start")
        # HAProxy's next look.
        await asyncio.sleep(2)
        headers = {"authorization": f"Bearer {keys['batch'].text}"}
        client = httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30)
        await stack.enter_async_context(client)
        batch = await submit_batch(client, options.lines) if options.lines else ""
        begin = time.monotonic()
        for number in range(options.clients):
            tokens = (200, 300) if number % 5 == 0 else (4, 8, 16, 40)
            drill.load.start("load", keys["load"].text, options.seed + number, tokens, 0.0)
        drill.load.start("metered", keys["metered"].text, options.seed, (4,), 0.4)
        some: dict[str, Sequence[str]] = {"short": SHORT, "all": list(FAULTS)}
        faults = some.get(options.faults) or options.faults.split(",")
        try:
            await run_faults(drill, [*faults] * options.times, options.settle)
        finally:
            end = time.monotonic()
            await drill.load.stop()
        if batch and (why := await wrong_with_batch(client, batch, options.lines, LIMIT)):
            drill.is_wrong(why)
        judge(drill, begin, end, options.pause)
        await compare_ledger(drill)
        await end_members(drill)
        return drill.wrong


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"faults: {', '.join(FAULTS)}",
    )
    add = parser.add_argument
    add("--one", action="store_true", help="one gateway without a cluster")
    add("--edges", type=int, default=1, help="of each member")
    add("--slots", default="4,4,3,1", help="of each node")
    add("--clients", type=int, default=20)
    add("--requests", type=int, default=20000, help="at most")
    add("--lines", type=int, default=0, help="of a batch, submitted before")
    add("--faults", default="short", help="`short`, `all`, or names with commas")
    add("--times", type=int, default=1, help="how often all of them happen")
    add("--settle", type=float, default=5.0, help="seconds after each fault")
    add("--away", type=float, default=8.0, help="seconds without the database")
    add("--pause", type=float, default=2.0, help="seconds that grants may pause beyond a term")
    add("--seed", type=int, default=1)
    return parser


def missing() -> str:
    """Why there can be no drill here; empty: there can."""
    programs = {"postgresql": postgres_binaries(), "pgbouncer": PGBOUNCER, "haproxy": HAPROXY}
    absent = [name for name, found in programs.items() if found is None]
    return network.missing() or (f"not installed here: {', '.join(absent)}" if absent else "")


def main(arguments: Sequence[str]) -> int:
    options = _options().parse_args(arguments)
    if why := missing():
        sys.exit(why)
    network.enter("tests.cluster.drill", arguments)
    with tempfile.TemporaryDirectory(prefix="llama-gateway-drill-") as made:
        folder = Path(made)
        # PostgreSQL runs as another user.
        folder.chmod(0o755)
        return int(bool(uvloop.run(drilled(options, folder))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
