"""Memberships of several members in one process, over real tunnels, in virtual time.

The database is one in memory, with the real tables, statements and jobs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, delete, select, text
from sqlalchemy.pool import StaticPool

from gateway.cluster.fencing import SETTLE_SECONDS, Fence, Session, Tenure
from gateway.cluster.leadership import FIRST_ROW, Change, LeaderRow
from gateway.cluster.membership import LEAD_SECONDS, Membership, MemberState, Owner, Role
from gateway.cluster.tables import FIRST, LOOK, remove, update_of
from gateway.cluster.tunnel import (
    OPEN_SECONDS,
    Greeting,
    TunnelError,
    Tunnels,
    member_certificate,
)
from gateway.config.settings import ClusterSettings
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import members as members_table
from gateway.store.schema import metadata
from gateway.store.store import Store
from gateway.transport.link import EdgeLink
from gateway.watch.metrics import EdgeSample, MemberSample
from tests.cluster.certificates import CLUSTER, authority
from tests.known import known
from tests.processes import free_port
from tests.virtual import in_virtual_time, now

TERM = 2.0
STEP = 0.05  # seconds that the database takes for a step


class Database:
    """A database with the real tables, and the real statements and jobs; it may be away."""

    def __init__(self) -> None:
        self._engine = create_engine("sqlite://", poolclass=StaticPool)
        metadata.create_all(self._engine)
        self.is_away = False

    async def run(self, job: Callable[..., Any], *, write: bool = True) -> Any:
        del write
        await asyncio.sleep(STEP)
        if self.is_away:
            raise StoreUnavailable("it is away", "wait")
        with self._engine.begin() as connection:
            return job(connection)


class Row:
    """The leadership's row in it, as one member reaches it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_away = False

    async def look(self) -> LeaderRow:
        if not (found := await self._ask(LOOK, {})):
            await self._ask(FIRST, FIRST_ROW._asdict())
            found = await self._ask(LOOK, {})
        return LeaderRow(*found[0])

    async def change(self, change: Change) -> bool:
        return bool(await self._ask(*update_of(change)))

    async def _ask(self, sql: str, values: dict[str, Any]) -> list[Any]:
        def job(connection: Any) -> list[Any]:
            result = connection.execute(text(sql), {**values, "cluster": CLUSTER})
            return list(result.all()) if result.returns_rows else []

        if self.is_away:
            raise StoreUnavailable("it can't be reached from here", "wait")
        found: list[Any] = await self.database.run(job)
        return found


class Account(Tenure):
    """A leader's account of members whose edges tell at once that they carry nothing."""

    def __init__(self, role: Role, clock: Callable[[], float]) -> None:
        super().__init__(role.epoch, role.won_at, role.lists, {"x": 4})
        self.clock = clock
        self.begun: list[tuple[Session, tuple[str, ...]]] = []
        self.sessions_left: list[Session] = []

    def begins(self, session: Session, processes: Collection[str], now: float) -> None:
        self.begun.append((session, tuple(processes)))
        self.hello(session, {}, now)

    def left(self, session: Session) -> None:
        self.sessions_left.append(session)


class One:
    def __init__(self, settings: ClusterSettings, process: str, store: Store, row: Row) -> None:
        self.name = settings.member_name
        self.process = process
        self.roles: list[Role] = []
        self.replaced_by: list[str] = []
        self.tunnels: list[tuple[Greeting, socket.socket]] = []
        self.edges: tuple[str, ...] = (f"{self.name}/edge-1",)
        self.account: Account | None = None
        self.row = row
        self.suspended = 0.0
        self.listening = socket.create_server(("127.0.0.1", int(settings.listen[10:])))
        self.membership = Membership(
            settings,
            process,
            member_certificate(settings.tls, self.name),
            row,
            store,
            Fence(self.name, lambda _: 4),
            Owner(self._on_role, self.replaced_by.append, self._on_tunnel, self._state),
            clock=self.clock,
        )

    def start(self) -> None:
        self.membership.tunnels.serve(self.listening)
        self.membership.start()

    def clock(self) -> float:
        return now() + self.suspended

    @property
    def role(self) -> Role:
        return self.membership.role

    def seen(self) -> dict[str, MemberSample]:
        return {one.name: one for one in self.membership.seen()}

    async def end(self) -> None:
        """End it as `kill -9` does."""
        self.listening.close()
        await self.membership.aclose()
        for _, sock in self.tunnels:
            sock.close()

    def _on_role(self, role: Role) -> None:
        assert role == self.membership.role
        self.roles.append(role)
        if role.kind == "leader":
            self.account = Account(role, self.clock)
            self.membership.lead(role.epoch, self.account)

    def _on_tunnel(self, greeting: Greeting, sock: socket.socket) -> None:
        self.tunnels.append((greeting, sock))

    def _state(self) -> MemberState:
        edges = [EdgeSample(name, 1, True, 0, 0, 0.0, 0.0, 0, 1.0) for name in self.edges]
        return MemberState(tuple(edges), cores=4, folder=f"folder of {self.name}")


class Cluster:
    def __init__(self) -> None:
        self.database = Database()
        self.all: list[One] = []
        self.ports: dict[str, int] = {}

    def join(self, name: str, process: str = "") -> One:
        process = process or f"process of {name}"
        listen = f"127.0.0.1:{self.ports.setdefault(name, free_port())}"
        settings = authority().settings(name, listen=listen, term=TERM)
        made = One(settings, process, cast("Store", self.database), Row(self.database))
        self.all.append(made)
        made.start()
        return made

    async def end(self, one: One) -> None:
        self.all.remove(one)
        await one.end()

    def leaders(self) -> list[One]:
        return [one for one in self.all if one.role.kind == "leader"]

    def leader(self) -> One:
        (found,) = self.leaders()
        return found

    def others(self) -> list[One]:
        return [one for one in self.all if one is not self.leader()]

    async def until(self, is_so: Callable[[], bool], limit: float) -> float:
        """Wait until this holds, at most so many seconds; how long that took."""
        began = now()
        async with asyncio.timeout(limit):
            while not is_so():
                assert len(self.leaders()) < 2
                await asyncio.sleep(0.01)
        return now() - began

    async def settled(self, limit: float) -> float:
        """Wait until one leads and all others follow it and have been told of its term."""

        def is_so() -> bool:
            if not (found := self.leaders()):
                return False
            role = found[0].role
            return all(
                (one.role.leader, one.role.epoch) == (role.leader, role.epoch)
                and (one.membership.fence.epoch, one.membership.fence.seen > 0)
                == (role.epoch, True)
                for one in self.all
            )

        return await self.until(is_so, limit)


@asynccontextmanager
async def cluster_of(*names: str) -> AsyncIterator[Cluster]:
    made = Cluster()
    for name in names:
        made.join(name)
    try:
        yield made
    finally:
        for one in made.all:
            await one.end()


@asynccontextmanager
async def settled(*names: str) -> AsyncIterator[Cluster]:
    async with cluster_of(*names) as cluster:
        await cluster.settled(10)
        yield cluster


@in_virtual_time
async def test_members_that_start_at_once_have_a_leader_within_two_terms() -> None:
    async with cluster_of("a", "b", "c") as cluster:
        assert await cluster.settled(10) < 2 * TERM
        # Soon all share the slots, and may be alone.
        await asyncio.sleep(3)
        for one in cluster.all:
            assert one.membership.fence.sharers.names == ("a", "b", "c")
            assert one.membership.may_grant() is (one.role.kind == "leader")
        kinds = [[role.kind for role in one.roles] for one in cluster.all]
        assert sorted(kinds) == [["follower"], ["follower"], ["leader"]]


@in_virtual_time
async def test_when_the_leader_dies_another_leads_in_a_later_epoch() -> None:
    async with settled("a", "b", "c") as cluster:
        old, (cut_off, _) = cluster.leader(), cluster.others()
        # One that does not reach the database follows on, and finds the next leader.
        cut_off.row.is_away = True
        await asyncio.sleep(10)
        assert [role.kind for role in cut_off.roles] == ["follower"]
        await cluster.end(old)
        assert await cluster.settled(10) < TERM + 2
        new = cluster.leader()
        assert new.role.epoch == old.role.epoch + 1
        assert [role.kind for role in cut_off.roles[:2]] == ["follower", "limbo"]
        assert cut_off.role.kind == "follower"
        # One that comes back follows.
        back = cluster.join(old.name, "its next process")
        await cluster.settled(10)
        assert back.role.kind == "follower"
        assert new.role == new.roles[-1]
        # Who hears of a later epoch begins one that is later still.
        new.membership.heard(9)
        await cluster.until(lambda: new.role.epoch == 10, 5)
        assert [role.kind for role in new.roles[-3:]] == ["leader", "limbo", "leader"]
        await cluster.settled(5)
        # A database that comes back with an old state loses no member.
        await cluster.database.run(lambda one: one.execute(delete(members_table)).rowcount)
        await asyncio.sleep(5)
        wanted = select(members_table.c.member)
        rows = await cluster.database.run(lambda one: one.execute(wanted).all())
        assert sorted(map(tuple, rows)) == [("a",), ("b",), ("c",)]
        assert all(one.replaced_by == [] for one in cluster.all)


@in_virtual_time
async def test_without_the_database_all_are_alone_and_afterwards_one_leads_again() -> None:
    async with settled("a", "b", "c") as cluster:
        await asyncio.sleep(3)
        cluster.database.is_away = True
        await cluster.until(lambda: not cluster.leaders(), TERM + 0.2)
        took = await cluster.until(
            lambda: all(one.role.kind == "alone" for one in cluster.all), TERM + 2
        )
        assert took > SETTLE_SECONDS - TERM / 4
        assert all(one.membership.may_grant() for one in cluster.all)
        await asyncio.sleep(10)
        assert all(one.role.kind == "alone" for one in cluster.all)
        cluster.database.is_away = False
        assert await cluster.settled(10) < TERM + 2
        for one in cluster.others():
            assert [role.kind for role in one.roles[-3:]] == ["limbo", "alone", "follower"]


@in_virtual_time
async def test_a_member_that_does_not_reach_the_leader_is_alone_until_it_does() -> None:
    async with settled("a", "b", "c") as cluster:
        await asyncio.sleep(3)
        leader, cut_off = cluster.leader(), cluster.others()[0]
        open_ = cut_off.membership.tunnels.open

        async def fail(*_: object, **__: object) -> socket.socket:
            raise TunnelError("no route")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cut_off.membership.tunnels, "open", fail)
            for far in tuple(cut_off.membership.tunnels._open):
                far.transport.abort()
            # In the database it sees that the leader which it has lost still leads: none will come.
            limit = TERM + SETTLE_SECONDS + 0.5
            await cluster.until(lambda: cut_off.role.kind == "alone", limit)
            seen = leader.seen()[cut_off.name]
            assert seen.role == "unknown"
            assert seen.heard_seconds is not None
            assert [one.edge for one in known(leader.account).sessions_left] == [cut_off.name]
        assert cut_off.membership.tunnels.open == open_
        await cluster.settled(5)
        assert cut_off.role.kind == "follower"


@in_virtual_time
async def test_a_leader_whose_machine_was_suspended_leads_no_more() -> None:
    async with settled("a", "b") as cluster:
        leader = cluster.leader()
        leader.suspended += 30
        assert not leader.membership.may_grant()
        await cluster.until(lambda: not cluster.leaders(), 0.2)
        await cluster.settled(20)
        assert cluster.leader().role.epoch == leader.roles[0].epoch + 1


@pytest.mark.parametrize("leads", [False, True])
@in_virtual_time
async def test_a_later_process_of_a_member_replaces_an_earlier_one(leads: bool) -> None:
    async with settled(*(("a",) if leads else ("a", "b", "c"))) as cluster:
        old = cluster.leader() if leads else cluster.others()[0]
        old.listening.close()
        old.membership.tunnels.stop_accepting()
        new = cluster.join(old.name, "newer")
        await cluster.until(lambda: new.role.kind == ("leader" if leads else "follower"), 10)
        await cluster.until(lambda: old.replaced_by == ["newer"], 5)
        if leads:
            return
        # As an operator's mistake: the leader does not let it back in.
        for far in tuple(old.membership.tunnels._open):
            far.transport.abort()
        await asyncio.sleep(3)
        assert cluster.leader().membership.tunnels.refused["replaced"] > 0
        assert old.role.kind != "follower"
        # As one that is being succeeded: its edges may still be linked to the leader.
        old.membership.drain()
        await cluster.until(lambda: old.role.kind == "follower", 5)
        assert cluster.leader().seen()[old.name].role == "follower"
        assert cluster.leader().membership._rows[old.name].process == "newer"
        assert old.replaced_by == ["newer"]


@in_virtual_time
async def test_the_share_of_a_member_that_is_removed_is_free_at_once() -> None:
    async with settled("a", "b") as cluster:
        tenure, (lost,) = known(cluster.leader().account), cluster.others()
        await cluster.until(lambda: len(tenure.lists[-1].names) == 2, 10)
        await asyncio.sleep(5)  # It is told that it may be alone.
        await cluster.end(lost)
        await asyncio.sleep(60)
        tenure.read("x", frozenset(), tenure.clock())
        assert tenure.others("x", tenure.clock()) == 2, "it may be alone"
        await cluster.database.run(lambda one: remove(one, CLUSTER, lost.name))
        await cluster.until(lambda: tenure.lists[-1].names == (cluster.leader().name,), 10)
        await asyncio.sleep(1)
        tenure.read("x", frozenset(), tenure.clock())
        assert tenure.others("x", tenure.clock()) == 0
        # It registers again when it starts, and follows.
        cluster.join(lost.name, "its next process")
        await cluster.settled(10)


@in_virtual_time
async def test_a_leader_that_drains_makes_room_leaves_its_share_and_is_never_alone() -> None:
    async with settled("a", "b", "c") as cluster:
        await asyncio.sleep(5)  # All may be alone.
        old = cluster.leader()
        old.membership.drain()
        assert old.role.kind == "limbo"
        took = await cluster.until(lambda: bool(cluster.leaders()), 10)
        assert took < TERM + 1.5
        await cluster.until(lambda: old.role.kind == "follower", 1)
        new = cluster.leader()
        account = known(new.account)
        assert new.seen()[old.name].role == "draining", "its edges may still be linked"
        assert old.name not in {session.edge for session, _ in account.begun}
        await asyncio.sleep(SETTLE_SECONDS)
        account.read("x", frozenset(), account.clock())
        await cluster.until(lambda: account.others("x", account.clock()) == 0, 1)
        cluster.database.is_away = True
        await asyncio.sleep(10)
        assert old.role.kind == "limbo"
        cluster.database.is_away = False
        await cluster.end(old)
        await cluster.settled(10)
        await cluster.until(lambda: old.name not in cluster.leader().seen(), 5)


@in_virtual_time
async def test_edges_that_come_and_go_are_told_to_the_leader() -> None:
    async with settled("a", "b") as cluster:
        leader, (other,) = cluster.leader(), cluster.others()
        await asyncio.sleep(2)
        for one in (leader, other):
            one.edges = ("edge-1", "edge-2")
        await asyncio.sleep(0.5)
        account = known(leader.account)
        told = {session.edge: edges for session, edges in account.begun}
        assert told == {"a": ("edge-1", "edge-2"), "b": ("edge-1", "edge-2")}
        seen = leader.seen()
        assert (seen[leader.name].role, seen[other.name].role) == ("leader", "follower")
        assert [edge.name for edge in seen[other.name].edges] == ["edge-1", "edge-2"]
        assert seen[other.name].folder == f"folder of {other.name}"
        assert other.seen()[leader.name].role == "leader"
        # One that is told nothing leaves its leader.
        leader.membership._followers[other.process].session = None
        await cluster.until(lambda: other.role.kind == "limbo", TERM + SETTLE_SECONDS + 0.5)
        await cluster.settled(2)
        # A session that the account has closed, as after a time of being held up, begins anew.
        before = len(account.begun)
        for edge in account._edges.values():
            edge.present = False
        await cluster.until(lambda: len(account.begun) == before + 2, 2)
        began = {session.edge: session.number for session, _ in account.begun[before:]}
        assert began == {leader.name: 2, other.name: 3}
        # What fails in a member does not end its membership.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other.membership, "_receive", None)
            patch.setattr(other.membership, "_take_list", None)
            await asyncio.sleep(3 * TERM)
        await cluster.end(leader)
        await cluster.settled(10)


@in_virtual_time
async def test_a_follower_whose_link_can_not_be_taken_is_lost_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with settled("a", "b") as cluster:
        followers, over = cluster.leader().membership._followers, EdgeLink.over

        async def fail(sock: socket.socket, link: EdgeLink) -> EdgeLink:
            if any(one.link is link for one in followers.values()):
                raise OSError("too many open files")
            return await over(sock, link)

        with monkeypatch.context() as patch:
            patch.setattr(EdgeLink, "over", fail)
            for one in tuple(followers.values()):
                one.link.fail("cut")
            await asyncio.sleep(1)
            assert followers == {}
        await cluster.settled(5)


@in_virtual_time
async def test_a_leader_whose_account_fails_makes_room_for_another() -> None:
    async with settled("a", "b") as cluster:
        old = cluster.leader()
        known(old.account).tell = None  # type: ignore[method-assign,assignment]
        await cluster.until(lambda: old.role.kind != "leader", 1)
        assert await cluster.settled(10) < TERM + 2
        assert cluster.leader() is not old


@in_virtual_time
async def test_who_has_won_and_can_not_begin_to_lead_makes_room_for_another() -> None:
    async with settled("a", "b") as cluster:
        old, (other,) = cluster.leader(), cluster.others()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other.membership, "lead", lambda *_: None)
            await cluster.end(old)
            await cluster.until(lambda: other.role.kind == "leader", 10)
            await cluster.until(lambda: other.role.kind != "leader", LEAD_SECONDS + 1)
            # Nobody else is there: it tries again.
            await cluster.until(lambda: other.role.kind == "leader", 2 * TERM + 2)
        third = cluster.join("c")
        await cluster.until(lambda: third.role.kind == "leader", LEAD_SECONDS + 2 * TERM + 2)
        await cluster.settled(5)


@in_virtual_time
async def test_a_leader_that_lost_touch_and_has_its_epoch_again_reads_the_nodes_again() -> None:
    async with settled("a") as cluster:
        leader = cluster.leader()
        first = leader.role
        await asyncio.sleep(5)
        member, renew = leader.membership._member, leader.row.change

        async def be_late(change: Change) -> bool:
            done = await renew(change)
            await asyncio.sleep(TERM - 0.2)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader.row, "change", be_late)
            await cluster.until(lambda: not cluster.leaders(), 2 * TERM)
            ended_at = leader.clock()
            await cluster.until(lambda: bool(cluster.leaders()), 1)
        assert leader.role.epoch == first.epoch
        assert member.won_at < ended_at
        assert leader.role.won_at >= ended_at - 0.1


@in_virtual_time
async def test_a_renewal_under_way_does_not_bring_a_draining_leader_back() -> None:
    async with settled("a", "b") as cluster:
        old, began = cluster.leader(), asyncio.Event()
        renew = old.row.change

        async def take_long(change: Change) -> bool:
            began.set()
            await asyncio.sleep(0.3)
            return await renew(change)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(old.row, "change", take_long)
            await began.wait()
            old.membership.drain()
            await cluster.until(lambda: bool(cluster.leaders()), 10)
        assert cluster.leader() is not old
        assert [role.kind for role in old.roles][:2] == ["leader", "limbo"]


@in_virtual_time
async def test_a_follower_does_not_wait_for_a_dead_machine_once_another_one_leads() -> None:
    async with settled("a", "b", "c") as cluster:
        old = cluster.leader()

        def opening(tunnels: Tunnels) -> Callable[..., Awaitable[socket.socket]]:
            usual = tunnels.open

            async def open_(member: str, *given: Any, **more: Any) -> socket.socket:
                if member == old.name:
                    await asyncio.sleep(OPEN_SECONDS)
                    raise TunnelError("no answer")
                return await usual(member, *given, **more)

            return open_

        for one in cluster.others():
            one.membership.tunnels.open = opening(one.membership.tunnels)  # type: ignore[method-assign, assignment]
        await cluster.end(old)
        assert await cluster.settled(10) < TERM + 1.5


@in_virtual_time
async def test_a_membership_ends_also_when_its_list_is_wanted_or_its_link_lost_just_then() -> None:
    async with settled("a", "b") as cluster:
        await asyncio.sleep(3)
        (other,) = cluster.others()
        link = known(other.membership._link)
        other.membership._list_wanted.set()
        link.fail("the leader has ended")
        async with asyncio.timeout(5):
            await cluster.end(other)


@in_virtual_time
async def test_a_follower_opens_tunnels_to_its_leader_and_to_nobody_else() -> None:
    async with cluster_of("a", "b", "c") as cluster, cluster_of() as elsewhere:
        with pytest.raises(TunnelError, match="no leader is known"):
            await cluster.all[0].membership.open("link", "x")
        await cluster.settled(10)
        leader, (one, other) = cluster.leader(), cluster.others()
        opened = await one.membership.open("link", f"{one.name}/edge-1")
        await cluster.until(lambda: bool(leader.tunnels), 1)
        greeting, _ = leader.tunnels[0]
        told = greeting.kind, greeting.member, greeting.name
        assert told == ("link", one.name, f"{one.name}/edge-1")
        opened.close()
        row = one.membership._rows[other.name]
        with pytest.raises(TunnelError, match="not_leader"):
            await one.membership._open(row.name, row.process, "link", "x")
        assert other.tunnels == []
        with pytest.raises(TunnelError, match="edge"):
            await one.membership.open("link", f"{other.name}/edge-1")
        one.membership.tunnels._process = other.process
        with pytest.raises(TunnelError, match="no_control"):
            await one.membership.open("admin")
        one.membership.tunnels._process = one.process
        del leader.membership._followers[one.process]
        with pytest.raises(TunnelError, match="no_control"):
            await one.membership.open("link", "x")
        # Who is in no list is not let in.
        stranger = elsewhere.join("z")
        await elsewhere.settled(10)
        stranger.membership._rows |= leader.membership._rows
        with pytest.raises(TunnelError, match="unknown"):
            await stranger.membership._open(leader.name, leader.process, "control", "")
