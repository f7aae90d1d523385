"""Standby nodes behind a whole gateway, switched on and off by command hooks."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.power import Phase
from gateway.fleet.states import State
from tests.elastic import machine
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

pytestmark = pytest.mark.slow

MODEL = "demo"
QUICK: dict[str, Any] = {
    "health": {"interval": 0.1, "timeout": 0.5, "slow_start": 0, "discover_interval": 0.5},
    "elastic": {
        "start_above": 0.2,
        "start_after": 0.2,
        "stop_after": 1.0,
        "cooldown": 0.2,
        "backoff": 0.5,
    },
}
LIMIT = 30.0


def settings(**elastic: Any) -> dict[str, Any]:
    return {**QUICK, "elastic": {**QUICK["elastic"], **elastic}}


@dataclass
class Machines:
    """Machines that are off until somebody switches them on."""

    folder: Path
    ports: list[int] = field(default_factory=list)

    def node(self, name: str, *options: str, **keys: Any) -> dict[str, Any]:
        """A line of the inventory for one more."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ports.append(port)
        command = [sys.executable, str(Path(machine.__file__))]
        return {
            "name": name,
            "url": f"http://127.0.0.1:{port}",
            "standby": True,
            "model": MODEL,
            "slots": 2,
            "start": [*command, "start", str(self.folder), str(port), *options],
            "stop": [*command, "stop", str(self.folder), str(port)],
            **keys,
        }

    def orders(self) -> list[str]:
        """What the hooks were told, in order."""
        log = self.folder / "orders"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    folder = tmp_path / "machines"
    folder.mkdir()
    made = Machines(folder)
    yield made
    for port in made.ports:
        if (folder / f"{port}.pid").exists():
            machine.end(folder, str(port))


async def ask(
    running: Running, text: str = "hello", tokens: int = 8, **headers: str
) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }
    return await running.client.post("/v1/chat/completions", json=body, headers=headers)


async def shown(running: Running, name: str) -> Mapping[str, Any]:
    async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
        found: dict[str, Any] = (await admin.get(f"/admin/nodes/{name}")).json()
        return found


async def order(running: Running, name: str, what: str) -> None:
    async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
        (await admin.post(f"/admin/nodes/{name}/{what}")).raise_for_status()


async def until_state(running: Running, name: str, state: State, limit: float = LIMIT) -> None:
    node = running.gateway.fleet.nodes[name]
    try:
        await until(lambda: node.state is state, limit)
    except AssertionError:
        raise AssertionError(f"{name} is {node.state} ({node.reason}), not {state}") from None


async def metrics(running: Running) -> str:
    async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
        return (await admin.get("/metrics")).text


async def test_a_burst_starts_standby_nodes_and_afterwards_they_are_stopped(
    tmp_path: Path, machines: Machines
) -> None:
    fast = ("--decode-tps", "20", "--prefill-tps", "500")
    async with EmulatedNode(slots=1, model=MODEL, prefill_tps=500.0, decode_tps=20.0) as base:
        nodes = [
            {"name": "base", "url": base.url},
            machines.node("spare-1", *fast),
            machines.node("spare-2", *fast, cost_per_hour=1.0),
        ]
        async with running_gateway(tmp_path, nodes, settings()) as running:
            await until_state(running, "spare-1", State.STANDBY)
            assert machines.orders() == []
            answers = await asyncio.gather(
                *(ask(running, f"question {number}", 20) for number in range(16))
            )
            assert [answer.status_code for answer in answers] == [200] * 16
            served = {answer.headers["x-gateway-node"] for answer in answers}
            assert served >= {"base", "spare-1"}
            await until_state(running, "spare-1", State.STANDBY)
            await until_state(running, "spare-2", State.STANDBY)
            assert machines.orders().count("start") == machines.orders().count("stop") > 0
            told = await shown(running, "spare-1")
            assert "it has idled" in told["reason"] or "the others could do" in told["reason"]
            assert told["elastic"]["phase"] == "off"
            assert told["elastic"]["startup_seconds"] > 0
            page = await metrics(running)
            assert 'llama_gateway_hooks_total{node="spare-1",hook="start",outcome="ok"} 1' in page


async def test_a_request_that_only_a_standby_node_serves_starts_it_and_waits(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare")]
    async with running_gateway(tmp_path, nodes, settings(), wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        assert (await running.client.get("/ready")).status_code == 200
        answer = await ask(running)
        assert answer.status_code == 200
        assert answer.headers["x-gateway-node"] == "spare"
        await until_state(running, "spare", State.STANDBY)
    assert machines.orders() == ["start", "stop"]


@in_virtual_time
async def test_a_client_that_waits_shorter_than_the_start_is_told_when_to_come_back(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare")]
    nodes[0]["start"] = ["sleep", "20"]
    chosen = settings() | {"queue": {"max_wait": 1.0}}
    async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        answer = await ask(running)
        assert answer.status_code == 503
        assert answer.headers["x-gateway-reason"] == "starting"
        assert 40 <= int(answer.headers["retry-after"]) <= 60
        told = await shown(running, "spare")
        assert told["state"] == "starting"
        assert "nothing else serves" in told["reason"]


async def test_a_start_hook_that_fails_is_told_and_not_tried_again_at_once(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare")]
    nodes[0]["start"] = ["sh", "-c", "echo no capacity in this zone >&2; exit 1"]
    chosen = settings(backoff=60.0) | {"retries": {"wait_for_node": 2.0}}
    async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        answer = await ask(running)
        assert answer.status_code == 503
        assert answer.headers["x-gateway-reason"] == "no_node"
        told = await shown(running, "spare")
        assert told["state"] == "standby"
        assert "its start hook failed" in told["reason"]
        assert "not started again for" in told["reason"]
        assert told["elastic"]["failures"] == 1
        page = await metrics(running)
        assert 'hooks_total{node="spare",hook="start",outcome="failed"} 1' in page
    assert "no capacity in this zone" in (tmp_path / "gateway.log").read_text()


async def test_a_gateway_that_comes_back_finds_what_runs(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare-1"), machines.node("spare-2")]
    chosen = settings(min=1)
    async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
        await until_state(running, "spare-1", State.READY)
    async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
        await until_state(running, "spare-1", State.READY)
        await until_state(running, "spare-2", State.STANDBY)
        assert (await ask(running)).status_code == 200
        power = running.gateway.fleet.nodes["spare-1"].power
        await until(lambda: power.phase is Phase.ON)
    assert machines.orders() == ["start"]


async def test_a_drained_one_is_left_alone_until_it_is_resumed(
    tmp_path: Path, machines: Machines
) -> None:
    nodes = [machines.node("spare")]
    async with running_gateway(tmp_path, nodes, settings(), wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        assert (await ask(running)).status_code == 200
        await order(running, "spare", "drain")
        assert (await shown(running, "spare"))["state"] == "draining"
        await asyncio.sleep(2.5)  # far more than `stop_after`
        assert machines.orders() == ["start"]
        await order(running, "spare", "resume")
        await until_state(running, "spare", State.STANDBY)
        assert machines.orders() == ["start", "stop"]


async def test_a_node_that_is_not_needed_ends_its_work_before_it_is_stopped(
    tmp_path: Path, machines: Machines
) -> None:
    async with EmulatedNode(slots=2, model=MODEL) as base:
        spare = machines.node("spare", "--decode-tps", "20", "--answer-tokens", "100")
        nodes = [{"name": "base", "url": base.url}, spare]
        chosen = settings(min=1, stop_after=0.5)
        async with running_gateway(tmp_path, nodes, chosen) as running:
            await until_state(running, "spare", State.READY)
            await order(running, "base", "drain")
            node = running.gateway.fleet.nodes["spare"]
            long = asyncio.create_task(ask(running, "a long story", 80))
            await until(lambda: node.leases)
            await order(running, "base", "resume")
            running.write_settings(settings(min=0, stop_after=0.5))
            await until_state(running, "spare", State.DRAINING)
            assert node.leases
            assert "the others could do its work" in node.reason
            assert (await ask(running)).headers["x-gateway-node"] == "base"
            answer = await long
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 80
            await until_state(running, "spare", State.STANDBY)
    assert machines.orders() == ["start", "stop"]


async def test_a_node_with_work_of_others_is_not_stopped(
    tmp_path: Path, machines: Machines
) -> None:
    spare = machines.node("spare", "--decode-tps", "20", "--answer-tokens", "100")
    async with running_gateway(tmp_path, [spare], settings(), wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        assert (await ask(running, tokens=2)).status_code == 200
        # Somebody else, past the gateway.
        async with httpx.AsyncClient(base_url=spare["url"], trust_env=False) as other:
            body = {"messages": [{"role": "user", "content": "story"}], "max_tokens": 80}
            answer = await other.post("/v1/chat/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 80
        assert machines.orders() == ["start"]
        await until_state(running, "spare", State.STANDBY)


async def test_a_stop_hook_that_fails_is_tried_again_and_the_node_counts_as_running(
    tmp_path: Path, machines: Machines
) -> None:
    spare = machines.node("spare")
    flag = machines.folder / "may-stop"
    code = (
        "import pathlib, subprocess, sys\n"
        "pathlib.Path(sys.argv[1]).stat()\n"
        "subprocess.run(sys.argv[2:], check=True)"
    )
    spare["stop"] = [sys.executable, "-c", code, str(flag), *spare["stop"]]
    async with running_gateway(tmp_path, [spare], settings(), wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        assert (await ask(running)).status_code == 200
        node = running.gateway.fleet.nodes["spare"]
        await until(lambda: "its stop hook failed" in node.reason, LIMIT)
        assert node.state is State.DRAINING
        flag.touch()
        await until_state(running, "spare", State.STANDBY)
    assert machines.orders() == ["start", "stop"]


async def test_hooks_and_limits_are_reloaded(tmp_path: Path, machines: Machines) -> None:
    nodes = [machines.node("spare")]
    async with running_gateway(tmp_path, nodes, settings(), wait_ready=False) as running:
        await until_state(running, "spare", State.STANDBY)
        running.write_settings(settings(min=1))
        await until_state(running, "spare", State.READY)
        running.write_settings(settings())
        await until_state(running, "spare", State.STANDBY)
    assert machines.orders() == ["start", "stop"]
