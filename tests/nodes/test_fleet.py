"""All nodes: reloads, drains, models, prices, and slots of abandoned requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.inventory import NodeSpec
from gateway.config.scheduling import HealthSettings, TimeoutSettings
from gateway.config.settings import Settings
from gateway.events import EventBus, NodeChanged
from gateway.nodes.fleet import (
    BLIND_HOLD,
    Fleet,
    most_hold,
    released_slots,
)
from gateway.nodes.node import Lease, Node, NodeState
from gateway.nodes.state_files import OperatorOrders
from gateway.transport.pool import ConnectionPool, open_node_pool
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.nodes.build import (
    Clock,
    NoUpstream,
    Running,
    a_fleet,
    a_node,
    a_spec,
    inventory,
    is_held,
    take,
)
from tests.transport.pool_client import pool_client
from tests.virtual import in_virtual_time, now


def is_closed(upstream: ConnectionPool) -> bool:
    return upstream.closed


@in_virtual_time
async def test_a_new_node_becomes_ready_and_the_same_inventory_changes_nothing() -> None:
    async with EmulatedNode() as server, a_fleet() as fleet:
        change = fleet.fleet.apply(inventory(a_spec(url=server.url)))
        assert (change.added, change.changed, change.removed) == (["a"], [], [])
        await fleet.until_state("a", NodeState.READY)
        assert fleet.states("a") == ["starting", "ready"]
        node, upstream = fleet["a"], fleet["a"].upstream
        change = fleet.fleet.apply(inventory(a_spec(url=server.url)))
        assert (change.added, change.changed, change.removed) == ([], [], [])
        assert (fleet["a"], node.upstream) == (node, upstream)
        assert fleet.states("a") == ["starting", "ready"]


@in_virtual_time
async def test_labels_and_limits_change_in_a_running_node() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        node, upstream = fleet["a"], fleet["a"].upstream
        lease = take(node)
        before = fleet.capacity
        change = fleet.fleet.apply(
            inventory(a_spec(url=server.url, slots=5, speed_hint=3, labels={"numa": "1"}))
        )
        assert change.changed == ["a"]
        assert (fleet["a"], node.upstream) == (node, upstream)
        assert (node.slots_total, node.free_slots(now())) == (5, 4)
        assert node.spec.written_hint == 3
        assert fleet.capacity > before
        assert node.state is NodeState.READY
        lease.release()
        assert node.free_slots(now()) == 5


@in_virtual_time
async def test_another_url_is_another_server_and_requests_end_on_the_old_one() -> None:
    async with (
        EmulatedNode() as one,
        EmulatedNode(slots=3) as two,
        a_fleet(a_spec(url=one.url)) as fleet,
    ):
        old = fleet["a"]
        lease = take(old)
        assert fleet.fleet.apply(inventory(a_spec(url=two.url))).changed == ["a"]
        assert fleet["a"] is not old
        await fleet.until_state("a", NodeState.READY)
        assert fleet["a"].free_slots(now()) == 3
        assert fleet.states("a") == ["starting", "ready", "starting", "ready"]
        assert lease.upstream is old.upstream
        assert not is_closed(old.upstream)
        # And back to the first URL, while the first request still runs there.
        second = fleet["a"]
        fleet.fleet.apply(inventory(a_spec(url=one.url)))
        await fleet.until(lambda: is_closed(second.upstream))
        assert not is_closed(old.upstream)
        lease.release()
        await fleet.until(lambda: is_closed(old.upstream))
        await fleet.until_state("a", NodeState.READY)


@in_virtual_time
async def test_another_key_opens_new_connections_to_the_same_server() -> None:
    async with (
        EmulatedNode(api_key="right") as server,
        a_fleet(a_spec(url=server.url, api_key="right")) as fleet,
    ):
        node, before = fleet["a"], fleet["a"].upstream
        lease = take(node)
        server.api_key = "new"
        fleet.fleet.apply(inventory(a_spec(url=server.url, api_key="new")))
        assert fleet["a"] is node
        assert node.upstream is not before
        assert lease.upstream is before
        assert node.leased == 1
        assert (await pool_client(before).get("/health")).status_code == 200
        newer = take(node)
        lease.release()
        await fleet.until(lambda: is_closed(before))
        assert not is_closed(node.upstream)
        newer.release()


@in_virtual_time
async def test_a_corrected_key_is_tried_at_once() -> None:
    async with (
        EmulatedNode(api_key="right") as server,
        a_fleet(a_spec(url=server.url, api_key="wrong"), interval=60) as fleet,
    ):
        assert fleet.state("a") is NodeState.DOWN
        assert "401 on /v1/models" in fleet["a"].reason
        assert "api_key_env" in fleet["a"].reason
        began = now()
        fleet.fleet.apply(inventory(a_spec(url=server.url, api_key="right")))
        await fleet.until_state("a", NodeState.READY)
        assert now() - began < 1.0


@pytest.mark.parametrize("seconds", [0.0, 600.0])
@in_virtual_time
async def test_a_node_can_be_disabled_and_enabled(seconds: float) -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), interval=60) as fleet:
        fleet.fleet.apply(inventory(a_spec(url=server.url, enabled=False)))
        assert fleet.state("a") is NodeState.STANDBY
        assert fleet.fleet.model_index.model_names() == ()
        await asyncio.sleep(seconds)
        began = now()
        fleet.fleet.apply(inventory(a_spec(url=server.url)))
        # Its last probe is old: it is probed before it gets work.
        assert fleet.state("a") is NodeState.STARTING
        await fleet.until_state("a", NodeState.READY)
        assert now() - began < 1.0
        assert fleet.states("a") == ["starting", "ready", "standby", "starting", "ready"]


@in_virtual_time
async def test_an_inventory_that_cannot_be_connected_changes_nothing() -> None:
    opened: list[NoUpstream] = []

    def picky(spec: NodeSpec) -> ConnectionPool:
        if spec.name == "bad":
            raise OSError("no such CA file")
        opened.append(NoUpstream())
        return cast("ConnectionPool", opened[-1]) if spec.name == "c" else open_node_pool(spec)

    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), connect=picky) as fleet:
        with pytest.raises(OSError, match="CA file"):
            fleet.fleet.apply(inventory(a_spec("c"), a_spec("bad")))
        assert list(fleet.fleet.nodes) == ["a"]
        assert fleet.state("a") is NodeState.READY
        await fleet.until(lambda: opened[-1].closed)


@in_virtual_time
async def test_nodes_are_in_the_inventorys_order() -> None:
    specs = [a_spec(name, enabled=False) for name in "cab"]
    async with a_fleet(*specs) as fleet:
        assert list(fleet.fleet.nodes) == ["c", "a", "b"]
        fleet.fleet.apply(inventory(*reversed(specs)))
        assert list(fleet.fleet.nodes) == ["b", "a", "c"]


@in_virtual_time
async def test_a_drained_node_gets_no_work_even_after_a_restart(tmp_path: Path) -> None:
    async with EmulatedNode() as server:
        spec = a_spec(url=server.url)
        async with a_fleet(spec, folder=tmp_path) as fleet:
            fleet.fleet.drain("a")
            await fleet.fleet.save_orders()
            assert fleet.state("a") is NodeState.DRAINING
            assert fleet["a"].free_slots(now()) == 0
        async with a_fleet(spec, folder=tmp_path) as fleet:
            assert fleet.state("a") is NodeState.DRAINING
            before = fleet.capacity
            fleet.fleet.resume("a")
            await fleet.fleet.save_orders()
            assert fleet.state("a") is NodeState.READY
            assert fleet["a"].free_slots(now()) == 2
            assert fleet.capacity > before
        async with a_fleet(spec, folder=tmp_path) as fleet:
            assert fleet.state("a") is NodeState.READY


@in_virtual_time
async def test_the_models_of_a_node_that_comes_back_while_it_is_down_are_remembered() -> None:
    async with EmulatedNode(model="said") as server, a_fleet(a_spec(url=server.url)) as fleet:
        await server.kill()
        fleet.fleet.apply(inventory())
        assert not fleet.fleet.model_index.serves("said")
        fleet.fleet.apply(inventory(a_spec(url=server.url)))
        await fleet.until_state("a", NodeState.DOWN)
        assert fleet.fleet.model_index.serves("said")
        # Another server has reported nothing.
        fleet.fleet.apply(inventory(a_spec()))
        assert not fleet.fleet.model_index.serves("said")


@in_virtual_time
async def test_another_model_is_noticed_by_the_next_probe_though_nobody_asks_the_node() -> None:
    async with (
        EmulatedNode(model="old") as server,
        a_fleet(a_spec(url=server.url), interval=5.0, discover_interval=3600) as fleet,
    ):
        await asyncio.sleep(60)
        server.engine.model = "new"
        began = now()
        await fleet.until(lambda: fleet.fleet.model_index.model_names() == ("new",))
        assert now() - began < 6


@in_virtual_time
async def test_a_server_whose_props_stay_the_same_is_not_asked_for_its_models() -> None:
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url), interval=5.0, discover_interval=3600) as fleet,
    ):
        for status in (200, 500):
            if status != 200:
                server.faults.set("status", path="/props", status=status)
            await asyncio.sleep(10)
            before = server.control_requests
            await asyncio.sleep(60)
            asked = server.control_requests - before
            # /health, /props and /slots with each probe.
            assert 3 * 10 <= asked <= 3 * 14, status
            assert fleet.state("a") is NodeState.READY


@in_virtual_time
async def test_another_model_is_noticed_at_once_if_the_restart_broke_a_request() -> None:
    async with (
        EmulatedNode(model="old") as server,
        a_fleet(a_spec(url=server.url), discover_interval=3600) as fleet,
    ):
        server.engine.model = "new"
        began = now()
        fleet.fleet.request_failed(fleet["a"], began)
        await fleet.until(lambda: fleet.fleet.model_index.model_names() == ("new",))
        assert now() - began < 5


@in_virtual_time
async def test_changed_settings_are_in_force_at_once() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), interval=3600) as fleet:
        await server.kill()
        health = HealthSettings(interval=0.05, timeout=0.2, fall=1, failures=1)
        fleet.fleet.configure(Settings(health=health, timeouts=TimeoutSettings(silence=7)))
        await fleet.until_state("a", NodeState.DOWN)
        assert fleet["a"].silence_timeout == 7
        assert fleet["a"].circuit.settings is health


@in_virtual_time
async def test_a_closed_fleet_leaves_no_task_and_no_connection() -> None:
    async with EmulatedNode() as server:
        before = asyncio.all_tasks()
        async with a_fleet(a_spec("a", server.url), a_spec("b", server.url)) as fleet:
            nodes = list(fleet.fleet.nodes.values())
            take(nodes[0]).abandon()
            take(nodes[1])
            fleet.fleet.apply(inventory(a_spec("a", server.url)))
        assert asyncio.all_tasks() <= before
        assert all(is_closed(node.upstream) for node in nodes)
        await server.until(lambda: server.connections == 0)


names = st.sampled_from(["a", "b", "c"])
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("reload"),
            st.dictionaries(
                names,
                st.fixed_dictionaries(
                    {
                        "url": st.sampled_from(["http://127.0.0.1:9", "http://127.0.0.1:10"]),
                        "slots": st.integers(1, 3),
                        "enabled": st.booleans(),
                        "api_key": st.sampled_from(["k", "l"]),
                    }
                ),
            ),
        ),
        st.tuples(st.just("take"), st.integers(1, 2)),
        st.tuples(st.just("back"), st.integers(0, 99)),
        st.tuples(st.just("abandon"), st.integers(0, 99)),
        st.tuples(st.just("drain"), names),
        st.tuples(st.just("resume"), names),
        st.tuples(st.just("fail"), names),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_order_of_reloads_and_leases_loses_nothing(
    story: list[tuple[str, Any]],
) -> None:
    asyncio.run(play(story))


class Play:
    """A fleet of nodes without a network, and the states that it has published."""

    def __init__(self) -> None:
        self.upstreams: list[NoUpstream] = []
        self.published: dict[str, str | None] = {}
        self.all_nodes: set[Node] = set()
        self.leases: list[Lease] = []
        bus = EventBus()
        bus.subscribe(NodeChanged, self.record)
        self.fleet = Fleet(
            connect=self.connect,
            settings=Settings(health=HealthSettings(failures=2)),
            bus=bus,
            clock=time.monotonic,
            rng=random.Random(7),
            orders=OperatorOrders(),
        )

    def connect(self, spec: NodeSpec) -> ConnectionPool:
        self.upstreams.append(NoUpstream())
        return cast("ConnectionPool", self.upstreams[-1])

    def record(self, change: NodeChanged) -> None:
        assert change.old_state == self.published.get(change.node)
        assert change.old_state != change.new_state
        self.published[change.node] = change.new_state

    def step(self, what: str, detail: Any) -> None:
        nodes = self.fleet.nodes
        if what == "reload":
            specs = (a_spec(name, **keys) for name, keys in detail.items())
            self.fleet.apply(inventory(*specs))
            self.all_nodes.update(self.fleet.nodes.values())
        elif what == "take":
            self.leases.extend(take(node, detail) for node in nodes.values())
        elif what in {"back", "abandon"}:
            for lease in self.leases[detail : detail + 1]:
                lease.release() if what == "back" else lease.abandon()
        elif detail in nodes:
            if what == "fail":
                self.fleet.request_failed(nodes[detail], time.monotonic())
            else:
                self.fleet.drain(detail) if what == "drain" else self.fleet.resume(detail)

    def check(self) -> None:
        held = [lease for lease in self.leases if is_held(lease)]
        for node in self.all_nodes:
            assert node.leased == sum(lease.slots for lease in held if lease.node is node)
        for name, node in self.fleet.nodes.items():
            assert self.published[name] == node.state.value
        assert {name for name, state in self.published.items() if state} == set(self.fleet.nodes)
        assert not any(cast("NoUpstream", lease.upstream).closed for lease in held)


async def play(story: list[tuple[str, Any]]) -> None:
    scene = Play()
    await scene.fleet.start(inventory())
    for what, detail in story:
        scene.step(what, detail)
        scene.check()
        await asyncio.sleep(0)
    for lease in scene.leases:
        lease.release()
    assert all(node.leased == 0 for node in scene.all_nodes)
    in_use = {id(node.upstream) for node in scene.fleet.nodes.values()}
    async with asyncio.timeout(30):
        while {id(one) for one in scene.upstreams if not one.closed} != in_use:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await scene.fleet.aclose()
    assert all(upstream.closed for upstream in scene.upstreams)


@each_case(
    ("live", "busy", "seconds", "released"),
    [
        (0, 1, 1.0, 0), (0, 0, 1.0, 1),
        # Busy slots are attributed to live requests first.
        (1, 2, 1.0, 0), (1, 1, 1.0, 1),
        # Neither has surely reached its slot yet.
        (1, 1, 0.1, 0), (0, 0, 0.1, 0), (0, 0, 0.3, 1),
    ],
)  # fmt: skip
def test_the_slot_of_an_abandoned_request_is_released_when_it_is_shown_free(
    live: int, busy: int, seconds: float, released: int
) -> None:
    node = a_node(slots=3)
    for _ in range(live):
        take(node)
    take(node).abandon()
    assert released_slots(busy, node.leases, 1000.0 + seconds) == released


def test_a_busy_slot_is_not_counted_as_that_of_a_request_sent_just_now() -> None:
    clock = Clock()
    node = a_node(clock, slots=3)
    take(node).abandon()
    clock.passes(1.0)
    take(node)
    assert released_slots(1, node.leases, clock() + 0.1) == 0
    assert released_slots(1, node.leases, clock() + 0.3) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.floats(0, 5))), st.integers(0, 20))
def test_never_more_slots_than_were_abandoned_are_released(
    taken: list[tuple[int, bool, float]], busy: int
) -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    abandoned = 0
    for slots, left, seconds in taken:
        lease = take(node, slots)
        clock.passes(seconds)
        if left:
            lease.abandon()
            abandoned += slots
    assert 0 <= released_slots(busy, node.leases, clock()) <= abandoned


def abandoned(
    *, moved: bool = False, after: float = 0.0, has_slots: bool = False, **keys: Any
) -> Lease:
    clock = Clock()
    node = a_node(clock)
    if not has_slots:
        node.properties.path_refused("/slots")
    lease = take(node, **keys)
    clock.passes(after)
    if moved:
        lease.content_received(clock())
    lease.abandon()
    return lease


def test_without_slots_to_read_the_hold_follows_from_the_request() -> None:
    assert most_hold(abandoned(moved=True)) == BLIND_HOLD
    assert most_hold(abandoned(expected_prefill=30.0, after=10.0)) == pytest.approx(20.0)
    assert most_hold(abandoned(expected_prefill=30.0, after=50.0)) == BLIND_HOLD
    assert most_hold(abandoned()) == 60.0
    plain = abandoned(stream=False, moved=True, expected_total=45.0, after=5.0)
    assert most_hold(plain) == pytest.approx(40.0)
    assert most_hold(abandoned(stream=False, expected_total=900.0)) == 60.0
    assert most_hold(abandoned(stream=False)) == 60.0
    assert most_hold(abandoned(has_slots=True)) == 60.0
    assert most_hold(abandoned(has_slots=True, expected_prefill=100.0)) == 400.0


@asynccontextmanager
async def streaming(fleet: Running, **keys: Any) -> AsyncIterator[Lease]:
    """A running chat with its lease; leaving the block closes the connection."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}
    lease = take(fleet["a"], stream=True)
    client = pool_client(lease.upstream)
    async with client.stream("POST", "/v1/chat/completions", json=body | keys) as response:
        lease.head_received(now())
        if not keys:
            # Keep a reference: a garbage-collected iterator closes the connection.
            parts = response.aiter_bytes()
            await anext(parts)
            lease.content_received(now())
        yield lease


@in_virtual_time
async def test_the_slot_of_a_cut_stream_is_released_soon_and_beside_a_live_neighbour() -> None:
    async with (
        EmulatedNode(slots=2, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url), interval=60) as fleet,
    ):
        async with streaming(fleet) as lease:
            pass
        told, began = fleet.capacity, now()
        lease.abandon()
        assert fleet["a"].leased == 1
        await fleet.until(lambda: not is_held(lease))
        assert fleet.capacity > told
        assert now() - began < 0.2
        async with streaming(fleet) as neighbour:
            async with streaming(fleet) as lease:
                pass
            lease.abandon()
            await fleet.until(lambda: not is_held(lease))
            assert server.busy == 1
            assert is_held(neighbour)
            assert fleet["a"].free_slots(now()) == 1
        neighbour.release()


@in_virtual_time
async def test_the_slots_of_many_streams_cut_at_once_are_all_released() -> None:
    async with (
        EmulatedNode(slots=8, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        leases = []

        async def one() -> None:
            async with streaming(fleet) as lease:
                leases.append(lease)
                await fleet.until(lambda: server.peak_busy == 8)
            lease.abandon()

        await asyncio.gather(*(one() for _ in range(8)))
        await fleet.until(lambda: fleet["a"].leased == 0)
        assert len(leases) == 8
        assert fleet["a"].foreign == 0


@in_virtual_time
async def test_the_slots_of_a_node_that_is_gone_are_released_at_once() -> None:
    async with EmulatedNode(slots=1) as server, a_fleet(a_spec(url=server.url)) as fleet:
        server.faults.set("status", path="/slots", status=500)
        lease = take(fleet["a"])
        lease.abandon()
        await asyncio.sleep(0.2)
        assert is_held(lease)
        server.faults.clear()
        await server.kill()
        await fleet.until(lambda: not is_held(lease))


@in_virtual_time
async def test_without_slots_to_read_a_cut_stream_is_released_soon() -> None:
    async with (
        EmulatedNode(slots=1, endpoint_slots=False) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        lease = take(fleet["a"])
        lease.content_received(now())
        began = now()
        lease.abandon()
        await fleet.until(lambda: not is_held(lease))
        assert BLIND_HOLD <= now() - began < 2 * BLIND_HOLD


@in_virtual_time
async def test_a_slot_is_not_held_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async with EmulatedNode(slots=1) as server:
        timeouts = {"silence": 0.3}
        async with a_fleet(a_spec(url=server.url), prefill_grace=0.3, timeouts=timeouts) as fleet:
            server.faults.set("status", path="/slots", status=500)
            lease = take(fleet["a"])
            with caplog.at_level(logging.WARNING):
                lease.abandon()
                await fleet.until(lambda: not is_held(lease))
            assert "Node a has not shown" in caplog.text
            server.faults.clear()


@in_virtual_time
async def test_a_removed_node_stays_open_until_its_abandoned_work_has_ended() -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        node = fleet["a"]
        async with streaming(fleet) as lease:
            assert fleet.fleet.apply(inventory()).removed == ["a"]
            assert fleet.states("a") == ["starting", "ready", None]
            assert (list(fleet.fleet.nodes), node.free_slots(now())) == ([], 0)
        lease.abandon()
        await fleet.until(lambda: not is_held(lease))
        assert node.state is NodeState.READY
        await fleet.until(lambda: node.upstream.closed)
