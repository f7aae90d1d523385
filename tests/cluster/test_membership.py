"""Memberships of several members in one process, over real tunnels, in virtual time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import delete, select

from gateway.cluster.fencing import SETTLE_SECONDS
from gateway.cluster.leadership import Change
from gateway.cluster.membership import LEAD_SECONDS
from gateway.cluster.tables import remove
from gateway.cluster.tunnel import OPEN_SECONDS, TunnelError, Tunnels
from gateway.store.schema import members as members_table
from gateway.transport.link import EdgeLink
from tests.cluster.certificates import CLUSTER, Authority
from tests.cluster.memberships import TERM, Cluster, Row, cluster_of
from tests.known import known
from tests.virtual import in_virtual_time


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def settled(authority: Authority, *names: str) -> AsyncIterator[Cluster]:
    async with cluster_of(authority, *names) as cluster:
        await cluster.settled(10)
        yield cluster


@in_virtual_time
async def test_members_that_start_at_once_have_a_leader_within_two_terms(
    authority: Authority,
) -> None:
    async with cluster_of(authority, "a", "b", "c") as cluster:
        assert await cluster.settled(10) < 2 * TERM
        # Soon all share the slots, and may be alone.
        await asyncio.sleep(3)
        for one in cluster.all:
            assert one.membership.fence.sharers.names == ("a", "b", "c")
            assert one.membership.may_grant() is (one.role.kind == "leader")
        kinds = [[role.kind for role in one.roles] for one in cluster.all]
        assert sorted(kinds) == [["follower"], ["follower"], ["leader"]]


@in_virtual_time
async def test_when_the_leader_dies_another_leads_in_a_later_epoch(authority: Authority) -> None:
    async with settled(authority, "a", "b", "c") as cluster:
        old, (cut_off, _) = cluster.leader(), cluster.others()
        # One that does not reach the database follows on, and finds the next leader.
        assert isinstance(cut_off.row, Row)
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
async def test_without_the_database_all_are_alone_and_afterwards_one_leads_again(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b", "c") as cluster:
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
async def test_a_member_that_does_not_reach_the_leader_is_alone_until_it_does(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b", "c") as cluster:
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
async def test_a_leader_whose_machine_was_suspended_leads_no_more(authority: Authority) -> None:
    async with settled(authority, "a", "b") as cluster:
        leader = cluster.leader()
        leader.suspended += 30
        assert not leader.membership.may_grant()
        await cluster.until(lambda: not cluster.leaders(), 0.2)
        await cluster.settled(20)
        assert cluster.leader().role.epoch == leader.roles[0].epoch + 1


@pytest.mark.parametrize("leads", [False, True])
@in_virtual_time
async def test_a_later_process_of_a_member_replaces_an_earlier_one(
    authority: Authority, leads: bool
) -> None:
    async with settled(authority, *(("a",) if leads else ("a", "b", "c"))) as cluster:
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
async def test_the_share_of_a_member_that_is_removed_is_free_at_once(authority: Authority) -> None:
    async with settled(authority, "a", "b") as cluster:
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
async def test_a_leader_that_drains_makes_room_leaves_its_share_and_is_never_alone(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b", "c") as cluster:
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
async def test_edges_that_come_and_go_are_told_to_the_leader(authority: Authority) -> None:
    async with settled(authority, "a", "b") as cluster:
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
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with settled(authority, "a", "b") as cluster:
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
async def test_a_leader_whose_account_fails_makes_room_for_another(authority: Authority) -> None:
    async with settled(authority, "a", "b") as cluster:
        old = cluster.leader()
        known(old.account).tell = None  # type: ignore[method-assign,assignment]
        await cluster.until(lambda: old.role.kind != "leader", 1)
        assert await cluster.settled(10) < TERM + 2
        assert cluster.leader() is not old


@in_virtual_time
async def test_who_has_won_and_can_not_begin_to_lead_makes_room_for_another(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b") as cluster:
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
async def test_a_leader_that_lost_touch_and_has_its_epoch_again_reads_the_nodes_again(
    authority: Authority,
) -> None:
    async with settled(authority, "a") as cluster:
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
async def test_a_renewal_under_way_does_not_bring_a_draining_leader_back(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b") as cluster:
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
async def test_a_follower_does_not_wait_for_a_dead_machine_once_another_one_leads(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b", "c") as cluster:
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
async def test_a_membership_ends_also_when_its_list_is_wanted_or_its_link_lost_just_then(
    authority: Authority,
) -> None:
    async with settled(authority, "a", "b") as cluster:
        await asyncio.sleep(3)
        (other,) = cluster.others()
        link = known(other.membership._link)
        other.membership._list_wanted.set()
        link.fail("the leader has ended")
        async with asyncio.timeout(5):
            await cluster.end(other)


@in_virtual_time
async def test_a_follower_opens_tunnels_to_its_leader_and_to_nobody_else(
    authority: Authority,
) -> None:
    async with cluster_of(authority, "a", "b", "c") as cluster, cluster_of(authority) as elsewhere:
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
