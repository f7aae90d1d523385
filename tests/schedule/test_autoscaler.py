"""Standby nodes, started and stopped by hooks: behind a whole gateway, then hooks alone."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.config.inventory import NodeSpec
from gateway.config.scheduling import ElasticSettings, Hook
from gateway.events import HookEnded
from gateway.nodes.lifecycle import LifecyclePhase
from gateway.nodes.node import NodeState
from gateway.schedule.autoscaler import MOST_OUTPUT, run_hook
from gateway.schedule.core.autoscaling_policy import (
    AutoscalingPolicy,
    ScalingAction,
    StandbyNode,
    WaitingDemand,
)
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.processes import gone, wait_until_gone
from tests.transport.raw import Peer, raw_server
from tests.virtual import in_virtual_time

MODEL = "demo"
BOOT = 0.7
"""Seconds from a call until the server listens."""
ELASTIC = {
    "start_above": 0.2, "start_after": 0.2, "stop_after": 1.0, "cooldown": 0.2, "backoff": 0.5
}  # fmt: skip


@dataclass(slots=True)
class Machine:
    """A machine that is off until it is started. It records its calls in `orders`."""

    node: EmulatedNode
    orders: list[str] = field(default_factory=list)
    answers: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    """For `start` or `stop`: an answer (seconds, status, body) that replaces the action."""
    booting: asyncio.Task[None] | None = None

    async def obey(self, order: str) -> tuple[int, str]:
        """Status and body of the answer."""
        self.orders.append(order)
        if order in self.answers:
            seconds, status, body = self.answers[order]
            await asyncio.sleep(seconds)
            return status, body
        if self.booting is not None:
            self.booting.cancel()
        if order == "start":
            self.booting = asyncio.create_task(self.boot())
        else:
            await self.node.kill()
        return 200, "as you like"

    async def boot(self) -> None:
        await asyncio.sleep(BOOT)
        await self.node.revive()


@dataclass(slots=True)
class Cloud:
    """Machines that are started and stopped by HTTP calls: `POST /start/NAME`, `/stop/NAME`."""

    stack: AsyncExitStack
    hooks: str = ""
    machines: dict[str, Machine] = field(default_factory=dict)

    async def machine(self, name: str, **options: Any) -> Machine:
        """Add a machine; `options` are those of the emulated node."""
        node = await self.stack.enter_async_context(EmulatedNode(model=MODEL, **options))
        await node.kill()
        made = self.machines[name] = Machine(node)
        return made

    def node(self, name: str, **keys: Any) -> dict[str, Any]:
        """A machine's entry in the inventory, with these further keys."""
        url, calls = self.machines[name].node.url, ("start", "stop")
        hooks = {call: {"url": f"{self.hooks}/{call}/{name}"} for call in calls}
        known = {"name": name, "url": url, "standby": True, "model": MODEL, "slots": 2}
        return {**known, **hooks, **keys}

    async def called(self, peer: Peer) -> None:
        _, order, name = (await peer.request()).split()[1].decode().split("/")
        status, body = await self.machines[name].obey(order)
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n"
        await peer.say(f"{head}Connection: close\r\n\r\n{body}".encode())


@asynccontextmanager
async def a_cloud() -> AsyncIterator[Cloud]:
    async with AsyncExitStack() as stack:
        cloud = Cloud(stack)
        async with raw_server(cloud.called) as server:
            cloud.hooks = f"http://127.0.0.1:{server.port}"
            yield cloud


# A gateway over standby nodes.


def settings(**elastic: Any) -> dict[str, Any]:
    """Settings with short times, except for probes: a machine that is off refuses them at once."""
    health = {"interval": 0.1, "timeout": 20.0, "slow_start": 0, "discover_interval": 0.5}
    return {"health": health, "elastic": ELASTIC | elastic}


async def ask(running: Running, text: str = "hello", tokens: int = 8) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens}
    return await running.client.post("/v1/chat/completions", json=body)


async def shown(running: Running, name: str) -> Mapping[str, Any]:
    found: dict[str, Any] = (await running.admin.get(f"/admin/nodes/{name}")).json()
    return found


async def order(running: Running, path: str) -> None:
    """Call the admin API as an operator does: `nodes/NAME/drain`, `reload`, ..."""
    (await running.admin.post(f"/admin/{path}")).raise_for_status()


async def until_state(running: Running, name: str, state: NodeState) -> None:
    node = running.gateway.fleet.nodes[name]
    await until(lambda: node.state is state, 60.0, lambda: f"{name} is {node.state}: {node.reason}")


@in_virtual_time
async def test_a_burst_starts_standby_nodes_and_afterwards_they_are_stopped(tmp_path: Path) -> None:
    fast: dict[str, Any] = {"decode_tps": 20.0, "prefill_tps": 500.0}
    async with a_cloud() as cloud, EmulatedNode(slots=1, model=MODEL, **fast) as base:
        first, second = (
            await cloud.machine("spare-1", **fast),
            await cloud.machine("spare-2", **fast),
        )
        nodes = [
            {"name": "base", "url": base.url},
            cloud.node("spare-1"),
            cloud.node("spare-2", cost_per_hour=1.0),
        ]
        async with running_gateway(tmp_path, nodes, settings()) as running:
            await until_state(running, "spare-1", NodeState.STANDBY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert first.orders == second.orders == []
            answers = await asyncio.gather(
                *(ask(running, f"question {number}", 20) for number in range(16))
            )
            assert [answer.status_code for answer in answers] == [200] * 16
            served = {answer.headers["x-gateway-node"] for answer in answers}
            assert served >= {"base", "spare-1"}
            await until_state(running, "spare-1", NodeState.STANDBY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert first.orders == ["start", "stop"]
            assert second.orders in ([], ["start", "stop"])
            told = await shown(running, "spare-1")
            assert "it has idled" in told["reason"] or "the others could do" in told["reason"]
            assert told["elastic"]["phase"] == "off"
            assert told["elastic"]["startup_seconds"] > 0
            page = (await running.admin.get("/metrics")).text
            assert 'llama_gateway_hooks_total{node="spare-1",hook="start",outcome="ok"} 1' in page


@asynccontextmanager
async def one_standby(folder: Path, cloud: Cloud, chosen: dict[str, Any]) -> AsyncIterator[Running]:
    """A gateway whose only node, `spare`, is on standby."""
    async with running_gateway(folder, [cloud.node("spare")], chosen, wait_ready=False) as running:
        await until_state(running, "spare", NodeState.STANDBY)
        yield running


@in_virtual_time
async def test_a_client_with_a_deadline_before_the_start_gets_retry_after(tmp_path: Path) -> None:
    async with a_cloud() as cloud:
        (await cloud.machine("spare")).answers["start"] = (20.0, 200, "")
        chosen = settings() | {"queue": {"max_wait": 1.0}}
        async with one_standby(tmp_path, cloud, chosen) as running:
            answer = await ask(running)
            assert answer.status_code == 503
            assert answer.headers["x-gateway-reason"] == "starting"
            assert 40 <= int(answer.headers["retry-after"]) <= 60
            told = await shown(running, "spare")
            assert told["state"] == "starting"
            assert "nothing else serves" in told["reason"]


@in_virtual_time
async def test_a_failed_start_hook_is_reported_and_not_tried_again_at_once(tmp_path: Path) -> None:
    async with a_cloud() as cloud:
        spare = await cloud.machine("spare")
        spare.answers["start"] = (0.1, 503, "no capacity in this zone")
        chosen = settings(backoff=60.0) | {"retries": {"wait_for_node": 2.0}}
        async with one_standby(tmp_path, cloud, chosen) as running:
            answer = await ask(running)
            assert answer.status_code == 503
            assert answer.headers["x-gateway-reason"] == "no_node"
            told = await shown(running, "spare")
            assert told["state"] == "standby"
            assert "its start hook failed" in told["reason"]
            assert "not started again for" in told["reason"]
            assert told["elastic"]["failures"] == 1
            page = (await running.admin.get("/metrics")).text
            assert 'hooks_total{node="spare",hook="start",outcome="failed"} 1' in page
        # It may be running even so.
        assert spare.orders == ["start", "stop"]
    assert "no capacity in this zone" in (tmp_path / "gateway.log").read_text()


@in_virtual_time
async def test_a_stop_hook_that_fails_is_tried_again_and_the_node_counts_as_running(
    tmp_path: Path,
) -> None:
    async with a_cloud() as cloud:
        spare = await cloud.machine("spare")
        spare.answers["stop"] = (0.1, 503, "not now")
        async with one_standby(tmp_path, cloud, settings()) as running:
            assert (await ask(running)).status_code == 200
            node = running.gateway.fleet.nodes["spare"]
            await until(lambda: "its stop hook failed" in node.reason)
            assert node.state is NodeState.DRAINING
            del spare.answers["stop"]
            await until_state(running, "spare", NodeState.STANDBY)
        assert spare.orders[0] == "start"
        assert set(spare.orders[1:]) == {"stop"}


@in_virtual_time
async def test_a_restarted_gateway_finds_the_running_nodes(tmp_path: Path) -> None:
    async with a_cloud() as cloud:
        first, second = await cloud.machine("spare-1"), await cloud.machine("spare-2")
        nodes = [cloud.node("spare-1"), cloud.node("spare-2")]
        chosen = settings(min=1)
        async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
            await until(lambda: running.gateway.fleet.nodes["spare-1"].state is NodeState.READY)
        async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
            await until_state(running, "spare-1", NodeState.READY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert (await ask(running)).status_code == 200
            power = running.gateway.fleet.nodes["spare-1"].lifecycle
            await until(lambda: power.phase is LifecyclePhase.ON)
        assert (first.orders, second.orders) == (["start"], [])


@in_virtual_time
async def test_a_node_finishes_its_requests_before_it_is_stopped(tmp_path: Path) -> None:
    async with a_cloud() as cloud, EmulatedNode(slots=2, model=MODEL) as base:
        spare = await cloud.machine("spare", decode_tps=20.0, answer_tokens=100)
        nodes = [{"name": "base", "url": base.url}, cloud.node("spare")]
        chosen = settings(min=1, stop_after=0.5)
        async with running_gateway(tmp_path, nodes, chosen) as running:
            await until_state(running, "spare", NodeState.READY)
            await order(running, "nodes/base/drain")
            node = running.gateway.fleet.nodes["spare"]
            long = asyncio.create_task(ask(running, "a long story", 80))
            await until(lambda: node.leases)
            await order(running, "nodes/base/resume")
            running.write_settings(settings(min=0, stop_after=0.5))
            await order(running, "reload")
            await until_state(running, "spare", NodeState.DRAINING)
            assert node.leases
            assert "the others could do its work" in node.reason
            assert (await ask(running)).headers["x-gateway-node"] == "base"
            answer = await long
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 80
            await until_state(running, "spare", NodeState.STANDBY)
        assert spare.orders == ["start", "stop"]


SPEC = NodeSpec(name="spare", url="http://127.0.0.1:9")


def python(code: str, *arguments: str) -> Hook:
    return Hook(command=(sys.executable, "-c", code, *arguments))


async def ran(hook: Hook, timeout: float = 120.0) -> HookEnded:
    return await run_hook(hook, "start", SPEC, timeout, time.monotonic)


def pid_in(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


@asynccontextmanager
async def answering(status: int, body: str = "") -> AsyncIterator[tuple[str, list[bytes]]]:
    """An HTTP server that records its requests."""
    asked: list[bytes] = []

    async def script(peer: Peer) -> None:
        asked.append(await peer.request())
        head = f"HTTP/1.1 {status} X\r\nlocation: /x\r\ncontent-length: {len(body)}\r\n\r\n"
        await peer.say(f"{head}{body}".encode())

    async with raw_server(script) as server:
        yield f"http://127.0.0.1:{server.port}/start?token=abc", asked


SAY = "import os, sys; print(sys.argv[1], os.environ['LLAMA_GATEWAY_NODE'])"


@each_case(
    ("hook", "outcome", "detail", "output"),
    [
        # Without a shell, and it knows its node.
        (python(SAY, "$HOME; *"), "ok", "", "$HOME; * spare"),
        (
            python("import sys; sys.exit('no such machine')"),
            "failed",
            "it ended with exit status 1",
            "no such machine",
        ),
        (Hook(command=("/no/such/program",)), "error", "No such file", ""),
        (Hook(url="http://127.0.0.1:1/start"), "error", "", ""),
    ],
)
async def test_what_a_hook_did_is_told_with_its_last_output(
    hook: Hook, outcome: str, detail: str, output: str
) -> None:
    result = await ran(hook)
    assert (result.outcome, result.output) == (outcome, output)
    assert detail in result.detail


async def test_output_is_bounded_and_its_end_is_kept() -> None:
    result = await ran(python("print('x' * 1000000, 'end')"))
    assert result.outcome == "ok"
    assert len(result.output) <= MOST_OUTPUT
    assert result.output.endswith("end")


async def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    # A shell, which is quick to start: the child must run within the timeout.
    code = f"trap '' TERM; sleep 600 & echo $! >{child}; wait"
    result = await ran(Hook(command=("sh", "-c", code)), timeout=1.0)
    assert result.outcome == "timeout"
    assert result.seconds < 300  # the child's 600 are not waited for
    pid = pid_in(child)
    wait_until_gone([pid])


async def test_a_cancelled_command_leaves_no_process_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    task = asyncio.create_task(ran(python(code), timeout=600.0))
    await until(lambda: pid_in(pid_file))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pid_in(pid_file))


async def test_a_server_that_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # It has the command's output, too.
    hook = Hook(command=("sh", "-c", f"setsid sleep 600 & echo $! >{pid_file}"))
    assert (await ran(hook)).outcome == "ok"
    pid = pid_in(pid_file)
    assert not gone(pid)
    os.kill(pid, 9)


def secret_hook(url: str, **keys: Any) -> Hook:
    return Hook(url=url, secrets={"Authorization": SecretStr("Bearer swordfish")}, **keys)


async def test_a_call_has_method_headers_secrets_and_body() -> None:
    async with answering(204) as (url, asked):
        hook = secret_hook(url, method="PUT", headers={"X-Zone": "b"}, body='{"on": true}')
        result = await ran(hook)
    assert result.outcome == "ok"
    head = asked[0].lower()
    assert head.startswith(b"put /start?token=abc http/1.1")
    assert b"x-zone: b" in head
    assert b"authorization: bearer swordfish" in head
    assert asked[0].endswith(b'{"on": true}')


@each_case("status", [307, 403])
async def test_a_refused_or_redirected_call_fails_and_shows_no_secrets(status: int) -> None:
    async with answering(status, "not with Bearer swordfish") as (url, asked):
        result = await ran(secret_hook(url))
    assert result.outcome == "failed"
    assert result.detail.endswith(f"/start answered {status}")
    assert "token" not in result.detail
    assert result.output == "not with ****"
    assert len(asked) == 1, "it follows no redirect"


RULES = ElasticSettings(start_above=10, start_after=5, stop_after=60, cooldown=30)
ALL = frozenset({"a", "b"})


def off(name: str = "a", **keys: object) -> StandbyNode:
    return phase(LifecyclePhase.OFF, name, slots=2, **keys)


def on(name: str = "a", **keys: object) -> StandbyNode:
    return phase(LifecyclePhase.ON, name, slots=2, **keys)


def waits(seconds: float, slots: int = 4) -> WaitingDemand:
    return WaitingDemand(ALL, seconds, slots)


def told(actions: list[ScalingAction]) -> list[str]:
    return [f"{action.verb} {action.name}" for action in actions]


def phase(phase: LifecyclePhase, name: str = "a", **keys: object) -> StandbyNode:
    return replace(StandbyNode(name, phase), **keys)  # type: ignore[arg-type]


STARTING, RETIRING = LifecyclePhase.STARTING, LifecyclePhase.RETIRING
UNSERVED = waits(0, slots=0)
CHEAP: dict[str, Any] = {"other_slots": (8, 1)}
NEEDED: dict[str, Any] = {"other_slots": (2, 1)}

Step = tuple[float, list[StandbyNode], list[WaitingDemand], str]
"""Seconds, the nodes and what waits, and the action that is decided, or none."""
STORIES: dict[str, list[Step]] = {
    "a wait above the limit starts a node only when it lasts": [
        (0, [off()], [waits(11)], ""),
        (4, [off()], [waits(11)], ""),
        (5, [off()], [waits(11)], "start a"),
    ],
    "a wait that falls below the limit starts over": [
        (0, [off()], [waits(11)], ""),
        (3, [off()], [waits(9)], ""),
        (6, [off()], [waits(11)], ""),
    ],
    "a node that is starting counts as if it worked": [
        (0, [phase(STARTING, slots=4), off("b")], [waits(19)], ""),
        (6, [phase(STARTING, slots=4), off("b")], [waits(19)], ""),
        (7, [phase(STARTING, slots=4), off("b")], [waits(21)], ""),
        (13, [phase(STARTING, slots=4), off("b")], [waits(21)], "start b"),
    ],
    "a model that nothing serves starts one node at once": [
        (0, [off(), off("b")], [UNSERVED], "start a"),
        (1, [phase(STARTING), off("b")], [UNSERVED], ""),
    ],
    "the cheapest node is started first": [
        (0, [off(cost=0.4), off("b", cost=0.2)], [UNSERVED], "start b")
    ],
    "an idle node is retired and then stopped": [
        (0, [on()], [], ""),
        (59, [on()], [], ""),
        (60, [on()], [], "retire a"),
        (61, [phase(RETIRING, busy=1)], [], ""),
        (62, [phase(RETIRING)], [], "stop a"),
    ],
    "a node whose work the others could do is retired, the dearest first, one after the other": [
        (0, [on(busy=1, **CHEAP), on("b", busy=1, cost=1.0, **CHEAP)], [], ""),
        (60, [on(busy=1, **CHEAP), on("b", busy=1, cost=1.0, **CHEAP)], [], "retire b"),
        (61, [on(busy=1, **CHEAP), phase(RETIRING, "b", busy=1, **CHEAP)], [], ""),
    ],
    "a node that is needed stays": [
        (0, [on(busy=1, **NEEDED)], [], ""),
        (50, [on(busy=1, other_slots=(0, 0))], [], ""),
        (100, [on(busy=1, **NEEDED)], [], ""),
        (150, [on(busy=1, other_slots=(0, 0))], [], ""),
    ],
    "a retiring node is kept when it is needed again": [
        (0, [off("b"), phase(RETIRING, busy=1)], [UNSERVED], "keep a")
    ],
    "a drained node is left alone": [
        (0, [on(drained=True)], [], ""),
        (100, [on(drained=True)], [], ""),
        (101, [off(drained=True)], [UNSERVED], ""),
    ],
    "a failed hook is not run again before its retry time": [
        (49, [off(retry_at=50)], [UNSERVED], ""),
        (50, [off(retry_at=50)], [UNSERVED], "start a"),
    ],
    "a node that was stopped is not started again within the cooldown": [
        (109, [off(stopped_at=80)], [UNSERVED], ""),
        (110, [off(stopped_at=80)], [UNSERVED], "start a"),
    ],
    "no node is retired within the cooldown after a start": [
        (0, [on()], [], ""),
        (74, [on(), on("b", started_at=45, busy=1, **NEEDED)], [], ""),
        (75, [on(), on("b", started_at=45, busy=1, **NEEDED)], [], "retire a"),
    ],
}


@each_case("story", STORIES)
def test_what_is_decided_as_load_and_nodes_change(story: str) -> None:
    policy = AutoscalingPolicy()
    for now, nodes, demands, action in STORIES[story]:
        decided = policy.decide(nodes, demands, RULES, now)
        assert told(decided) == [action] * bool(action), now


def test_the_minimum_runs_whatever_the_load_is_and_a_lower_maximum_retires_the_surplus() -> None:
    least, most = (RULES.model_copy(update={name: 1}) for name in ("min", "max"))
    policy = AutoscalingPolicy()
    assert told(policy.decide([off(), off("b")], [], least, 0)) == ["start a"]
    for now in (0, 100):
        assert not policy.decide([on(), off("b")], [], least, now)
    assert not AutoscalingPolicy().decide([on(busy=2), off("b")], [UNSERVED], most, 0)
    surplus = [on(busy=1), on("b", busy=1)]
    assert told(AutoscalingPolicy().decide(surplus, [], most, 0)) == ["retire a"]
