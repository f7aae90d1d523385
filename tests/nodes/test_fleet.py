"""All nodes: reloads, drains, models, prices, and slots of abandoned requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.inventory import NodeSpec
from gateway.config.scheduling import HealthSettings, TimeoutSettings
from gateway.config.settings import Settings
from gateway.nodes.fleet import BLIND_HOLD, most_hold, released_slots
from gateway.nodes.node import Lease, Node, NodeState
from gateway.nodes.prices import GpuCosts, alive_nodes
from gateway.transport.pool import ConnectionPool, open_node_pool
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.nodes.build import (
    Clock,
    NoUpstream,
    a_fleet,
    a_node,
    a_spec,
    inventory,
    is_held,
    streamed,
    take,
)
from tests.servers import running_demo_servers
from tests.virtual import in_virtual_time, now


@in_virtual_time
async def test_a_new_inventory_changes_a_running_node_only_where_it_differs() -> None:
    async with EmulatedNode() as server, a_fleet() as fleet:
        change = fleet.fleet.apply(inventory(a_spec(url=server.url)))
        assert (change.added, change.changed, change.removed) == (["a"], [], [])
        await fleet.until_state("a", NodeState.READY)
        node, upstream = fleet["a"], fleet["a"].upstream
        change = fleet.fleet.apply(inventory(a_spec(url=server.url)))
        assert (change.added, change.changed, change.removed) == ([], [], [])
        lease, before = take(node), fleet.capacity
        more = a_spec(url=server.url, slots=5, speed_hint=3, labels={"numa": "1"})
        assert fleet.fleet.apply(inventory(more)).changed == ["a"]
        assert (fleet["a"], node.upstream) == (node, upstream)
        assert (node.slots_total, node.free_slots(now())) == (5, 4)
        assert node.spec.written_hint == 3
        assert fleet.capacity > before
        assert fleet.states("a") == ["starting", "ready"]
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
        assert not old.upstream.closed
        lease.release()
        await fleet.until(lambda: old.upstream.closed)


@in_virtual_time
async def test_a_corrected_key_is_tried_at_once_on_new_connections() -> None:
    async with (
        EmulatedNode(api_key="right") as server,
        a_fleet(a_spec(url=server.url, api_key="wrong"), interval=60) as fleet,
    ):
        assert fleet.state("a") is NodeState.DOWN
        assert "401 on /v1/models" in fleet["a"].reason
        node, before = fleet["a"], fleet["a"].upstream
        lease, began = take(node), now()
        fleet.fleet.apply(inventory(a_spec(url=server.url, api_key="right")))
        await fleet.until_state("a", NodeState.READY)
        assert now() - began < 1.0
        assert fleet["a"] is node
        assert node.upstream is not before
        assert (lease.upstream, before.closed, node.leased) == (before, False, 1)
        newer = take(node)
        lease.release()
        await fleet.until(lambda: before.closed)
        assert not node.upstream.closed
        newer.release()


@in_virtual_time
async def test_a_standby_node_that_a_request_would_start_is_usable() -> None:
    async with a_fleet(a_spec(standby=True, model="m", start=["true"], stop=["true"])) as fleet:
        await fleet.until_state("a", NodeState.STANDBY)
        assert fleet.fleet.has_usable_node()


@in_virtual_time
async def test_a_disabled_node_is_not_probed_and_an_enabled_one_before_it_gets_work() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), interval=60) as fleet:
        fleet.fleet.apply(inventory(a_spec(url=server.url, enabled=False)))
        assert fleet.state("a") is NodeState.STANDBY
        assert fleet.fleet.model_index.model_names() == ()
        asked = server.control_requests
        await asyncio.sleep(600)
        assert server.control_requests == asked
        began = now()
        fleet.fleet.apply(inventory(a_spec(url=server.url)))
        assert fleet.state("a") is NodeState.STARTING
        await fleet.until_state("a", NodeState.READY)
        assert now() - began < 1.0


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
            fleet.fleet.drain("a", draining=False)
            await fleet.fleet.save_orders()
            assert fleet.state("a") is NodeState.READY
            assert fleet["a"].free_slots(now()) == 2
            assert fleet.capacity > before
        async with a_fleet(spec, folder=tmp_path) as fleet:
            assert fleet.state("a") is NodeState.READY


@in_virtual_time
async def test_another_model_is_noticed_by_the_next_probe_though_nobody_asks_the_node() -> None:
    server = EmulatedNode(model="old")
    async with a_fleet(server, interval=5.0, discover_interval=3600) as fleet:
        await asyncio.sleep(60)
        server.engine.model = "new"
        began = now()
        await fleet.until(lambda: fleet.fleet.model_index.model_names() == ("new",))
        assert now() - began < 6


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
        assert all(node.upstream.closed for node in nodes)
        await server.until(lambda: server.connections == 0)


names = st.sampled_from(["a", "b", "c"])
written = {
    "url": st.sampled_from(["http://127.0.0.1:9", "http://127.0.0.1:10"]),
    "slots": st.integers(1, 3),
    "enabled": st.booleans(),
    "api_key": st.sampled_from(["k", "l"]),
}
steps = st.lists(
    st.one_of(
        st.tuples(st.just("reload"), st.dictionaries(names, st.fixed_dictionaries(written))),
        st.tuples(st.just("take"), st.integers(1, 2)),
        st.tuples(st.sampled_from(["release", "abandon"]), st.integers(0, 99)),
        st.tuples(st.sampled_from(["drain", "resume", "fail"]), names),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_order_of_reloads_and_leases_loses_nothing(story: list[tuple[str, Any]]) -> None:
    asyncio.run(play(story))


async def play(story: list[tuple[str, Any]]) -> None:
    upstreams: list[NoUpstream] = []
    seen: set[Node] = set()
    leases: list[Lease] = []

    def connect(_: NodeSpec) -> ConnectionPool:
        upstreams.append(NoUpstream())
        return cast("ConnectionPool", upstreams[-1])

    async with a_fleet(connect=connect, probed=False, failures=2) as running:
        fleet = running.fleet
        for what, detail in story:
            if what == "reload":
                fleet.apply(inventory(*(a_spec(name, **keys) for name, keys in detail.items())))
                seen.update(fleet.nodes.values())
            elif what == "take":
                leases += [take(node, detail) for node in fleet.nodes.values()]
            elif what in {"release", "abandon"}:
                for lease in leases[detail : detail + 1]:
                    getattr(lease, what)()
            elif detail in fleet.nodes:
                if what == "fail":
                    fleet.request_failed(fleet.nodes[detail], now())
                else:
                    fleet.drain(detail, draining=what == "drain")
            held = [lease for lease in leases if is_held(lease)]
            for node in seen:
                assert node.leased == sum(lease.slots for lease in held if lease.node is node)
            assert not any(lease.upstream.closed for lease in held)
            for node in fleet.nodes.values():
                assert 0 <= node.free_slots(now()) <= max(0, node.slots_total - node.leased)
                assert node.slots_busy >= node.leased == sum(one.slots for one in node.leases)
            told: dict[str, str | None] = {}
            for change in running.changes:
                assert told.get(change.node) == change.old_state != change.new_state
                told[change.node] = change.new_state
            states = {name: node.state.value for name, node in fleet.nodes.items()}
            assert {name: state for name, state in told.items() if state} == states
            await asyncio.sleep(0)
        for lease in leases:
            lease.release()
        assert all(node.leased == 0 for node in seen)
        in_use = {id(node.upstream) for node in fleet.nodes.values()}
        await running.until(lambda: {id(one) for one in upstreams if not one.closed} == in_use)
    assert all(upstream.closed for upstream in upstreams)


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


@each_case(
    ("keys", "after", "moved", "seconds"),
    [
        ({}, 0, True, BLIND_HOLD),
        ({}, 0, False, 60),
        ({"expected_prefill": 30.0}, 10, False, 20),
        ({"expected_prefill": 30.0}, 50, False, BLIND_HOLD),
        ({"stream": False, "expected_total": 45.0}, 5, True, 40),
        ({"stream": False, "expected_total": 900.0}, 0, False, 60),
    ],
)
def test_without_slots_to_read_the_hold_follows_from_the_request(
    keys: Any, after: float, moved: bool, seconds: float
) -> None:
    clock = Clock()
    node = a_node(clock)
    node.properties.path_refused("/slots")
    lease = take(node, **keys)
    clock.passes(after)
    if moved:
        lease.content_received(clock())
    lease.abandon()
    assert most_hold(lease) == pytest.approx(seconds)


@in_virtual_time
async def test_the_slot_of_a_cut_stream_is_released_soon_and_beside_a_live_neighbour() -> None:
    server = EmulatedNode(slots=2, decode_tps=50)
    async with a_fleet(server, interval=60) as fleet:
        async with streamed(take(fleet["a"]), max_tokens=400) as lease:
            pass
        told, began = fleet.capacity, now()
        lease.abandon()
        assert fleet["a"].leased == 1
        await fleet.until(lambda: not is_held(lease))
        assert fleet.capacity > told
        assert now() - began < 0.2
        async with streamed(take(fleet["a"]), max_tokens=400) as neighbour:
            async with streamed(take(fleet["a"]), max_tokens=400) as lease:
                pass
            lease.abandon()
            await fleet.until(lambda: not is_held(lease))
            assert server.busy == 1
            assert is_held(neighbour)
            assert fleet["a"].free_slots(now()) == 1
        neighbour.release()


@pytest.mark.parametrize("dies", [True, False], ids=["until its node dies", "for some time"])
@in_virtual_time
async def test_a_slot_that_is_not_shown_free_is_held_no_longer_than_it_must_be(dies: bool) -> None:
    keys: dict[str, Any] = {} if dies else {"prefill_grace": 0.3, "timeouts": {"silence": 0.3}}
    async with EmulatedNode(slots=1) as server, a_fleet(a_spec(url=server.url), **keys) as fleet:
        server.faults.set("status", path="/slots", status=500)
        lease = take(fleet["a"])
        lease.abandon()
        await asyncio.sleep(0.2)
        assert is_held(lease)
        if dies:
            server.faults.clear()
            await server.kill()
        await fleet.until(lambda: not is_held(lease), 5.0)


@in_virtual_time
async def test_a_removed_node_stays_open_until_its_abandoned_work_has_ended() -> None:
    server = EmulatedNode(slots=1, decode_tps=50)
    async with a_fleet(server) as fleet:
        node = fleet["a"]
        async with streamed(take(fleet["a"]), max_tokens=400) as lease:
            assert fleet.fleet.apply(inventory()).removed == ["a"]
            assert fleet.states("a") == ["starting", "ready", None]
            assert (list(fleet.fleet.nodes), node.free_slots(now())) == ([], 0)
        lease.abandon()
        await fleet.until(lambda: not is_held(lease))
        assert node.state is NodeState.READY
        await fleet.until(lambda: node.upstream.closed)


DEAD = "http://127.0.0.1:9"


async def test_only_nodes_that_are_heard_of_cost_their_hours() -> None:
    specs = [a_spec(state.value, DEAD, cost_per_hour=0.5) for state in NodeState]
    async with a_fleet(*specs) as running:
        for state in NodeState:
            running.fleet.nodes[state.value].state = state
        alive = {node.name: node for node in alive_nodes(running.fleet)}
        assert set(alive) == {
            *("draining", "sleeping", "loading", "unloaded", "unloading", "failed"),
            *("ejected", "mute", "degraded", "ready"),
        }
        assert alive["ready"].cost_per_hour == 0.5
        assert alive["ready"].tier == "cpu"


async def test_tokens_cost_what_the_cheapest_gpu_node_of_their_model_takes() -> None:
    specs = [
        a_spec("cpu", DEAD, model="m", cost_per_hour=0.1),
        a_spec("free", DEAD, model="m", tier="gpu"),
        a_spec(
            "hosted",
            DEAD,
            kind="openai",
            model="m",
            tier="gpu",
            cost_per_million_tokens={"prompt": 1.0, "completion": 4.0},
        ),
        a_spec("own", DEAD, model=["m", "n"], tier="gpu", cost_per_hour=3.6, slots=2),
    ]
    async with a_fleet(*specs) as running:
        costs = GpuCosts(running.fleet, now)
        assert costs.of("m", 1000, 0, 500) == pytest.approx(0.003)
        # Its speed has not been measured.
        assert costs.of("n", 1000, 0, 500) is None
        assert costs.of("unknown", 1000, 0, 500) is None
        speed = running.fleet.nodes["own"].speed
        speed.prefill_tps, speed.decode_tps = 1000.0, 100.0
        # 6 s of one of two slots, at 3.6 an hour.
        assert costs.of("n", 1000, 0, 500) == pytest.approx(6 * 0.0005)
        assert costs.of("n", 1000, 1000, 0) == 0.0


# Real servers.


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.smoke
async def test_the_properties_and_busy_slots_of_a_real_server_are_read() -> None:
    with running_demo_servers(1, slots=2, context=16_384) as [server]:
        async with a_fleet(a_spec(url=server.url), interval=0.2, timeout=30.0) as fleet:
            node = fleet["a"]
            assert node.state is NodeState.READY
            facts = node.properties
            assert (facts.slots, facts.context, facts.models) == (2, 16_384, ("demo",))
            assert facts.slots_endpoint is True
            assert facts.template
            assert facts.vision is False
            assert facts.n_params
            messages = [{"role": "user", "content": "tell me"}]
            body = {"messages": messages, "stream": True, "max_tokens": 15_000}
            async with (
                httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as other,
                other.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                parts = response.aiter_bytes()
                await anext(parts)
                await fleet.until(lambda: node.foreign == 1)
            await fleet.until(lambda: node.foreign == 0)
