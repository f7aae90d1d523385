from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import GatewayError
from gateway.lease import KeyedHash
from gateway.proxy.accounting import MOST_QUARANTINED, Quarantine
from gateway.proxy.inbound.request import Request
from gateway.request import Caller, Priority
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import proxy_over
from tests.scheduling.build import a_request
from tests.virtual import in_virtual_time

LONG = 600.0


def refusal(
    quarantine: Quarantine, text: str, now: float, seconds: float = LONG
) -> GatewayError | None:
    """The error of this request, if it may go to no node."""
    try:
        quarantine.check(asking(text), now, seconds)
    except GatewayError as error:
        return error
    return None


def asking(text: str) -> Request:
    lease_request = a_request()
    name, bodies = lease_request.id, {"demo": text.encode()}
    caller = Caller("c", "c", Priority.NORMAL)
    return Request(
        name, name, "/v1/chat/completions", b"", bodies, "demo", caller, 0.0, lease_request
    )


def test_a_request_that_two_nodes_died_on_is_rejected_for_a_while() -> None:
    quarantine = Quarantine(KeyedHash())
    quarantine.node_lost(asking("x"), "a", 99.0, 100.0)
    assert refusal(quarantine, "x", 101.0) is None
    quarantine.node_lost(asking("x"), "b", 101.0, 110.0)
    error = refusal(quarantine, "x", 120.0)
    assert error is not None
    assert (error.status, error.code, error.retryable) == (502, "node_failed", False)
    assert "590 s" in error.message
    assert refusal(quarantine, "x", 711.0) is None
    assert len(quarantine.entries) == 0


def test_another_request_is_served_meanwhile() -> None:
    quarantine = Quarantine(KeyedHash())
    for number, node in enumerate("ab"):
        quarantine.node_lost(asking("x"), node, number, number)
    assert refusal(quarantine, "y", 0.0) is None


def test_a_single_node_that_dies_repeatedly_quarantines_no_request() -> None:
    quarantine = Quarantine(KeyedHash())
    for number in range(5):
        quarantine.node_lost(asking("x"), "a", number, number)
    assert refusal(quarantine, "x", 0.0) is None


def test_nodes_that_are_lost_together_count_as_one() -> None:
    quarantine = Quarantine(KeyedHash())
    for node in "abc":
        quarantine.node_lost(asking("x"), node, 5.0, 9.0)
    assert refusal(quarantine, "x", 9.0) is None


def test_a_node_leased_in_the_instant_of_the_others_loss_counts() -> None:
    quarantine = Quarantine(KeyedHash())
    quarantine.node_lost(asking("x"), "a", 5.0, 9.0)
    quarantine.node_lost(asking("x"), "b", 9.0, 9.0)
    assert refusal(quarantine, "x", 9.0) is not None


def test_a_complete_response_ends_the_quarantine() -> None:
    quarantine = Quarantine(KeyedHash())
    quarantine.node_lost(asking("x"), "a", 0.0, 1.0)
    quarantine.clear(asking("x"))
    quarantine.node_lost(asking("x"), "b", 2.0, 3.0)
    assert refusal(quarantine, "x", 0.0) is None


def test_nothing_is_rejected_when_the_quarantine_is_off() -> None:
    quarantine = Quarantine(KeyedHash())
    for number, node in enumerate("ab"):
        quarantine.node_lost(asking("x"), node, number, number)
    assert refusal(quarantine, "x", 0.0, 0.0) is None


def test_the_oldest_entry_is_forgotten_first() -> None:
    quarantine = Quarantine(KeyedHash())
    for number in range(MOST_QUARANTINED + 10):
        quarantine.node_lost(asking(str(number)), "a", 0.0, 0.0)
    assert len(quarantine.entries) == MOST_QUARANTINED


@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_a_request_that_kills_nodes_reaches_no_third_one(
    tmp_path: Path, *, stream: bool
) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server in servers:
            server.faults.set("reset")
        for asked in (1, 2):
            refused = await proxy.ask(stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "node_failed")
            assert "2 nodes died" in refused.json()["error"]["message"]
            assert refused.headers["x-should-retry"] == "false"
            assert len(proxy.attempts) == 2, asked
        for server in servers:
            server.faults.clear()
        other = await proxy.ask(messages=[{"role": "user", "content": "harmless"}])
        assert other.status_code == 200
        assert (await proxy.ask(stream=stream)).status_code == 502


@in_virtual_time
async def test_a_stream_that_kills_its_node_counts_as_well(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server in servers:
            server.faults.set("reset", after_events=3)
        stream = await proxy.stream()
        assert (stream.status, len(stream.errors)) == (200, 1)
        assert "2 nodes died" in stream.errors[0]["message"]
        assert len(proxy.attempts) == 2, "it went on elsewhere, and that node died too"
        assert (await proxy.ask(stream=True)).status_code == 502
        assert len(proxy.attempts) == 2
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (502, "node_failed")


@in_virtual_time
async def test_an_assembled_response_that_kills_its_node_counts_as_well(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server in servers:
            server.faults.set("reset", after_events=3)
        refused = await proxy.ask()
        assert refused.status_code == 502
        assert "2 nodes died" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert len(proxy.attempts) == 2
