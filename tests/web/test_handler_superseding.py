"""An editor sends a completion at each pause of typing; a newer one supersedes the older."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy.in_flight import SupersedingMap
from tests.emulator import EmulatedNode
from tests.emulator.wire import Wire, wired
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import Answer, Public, answer, public, request

INFILL: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "):", "n_predict": 200}
MIDDLE: dict[str, Any] = {"prompt": "def f(", "suffix": "):", "max_tokens": 200}
QUICK = {"health": {"interval": 0.2}, "heartbeat": "off"}


def slow(slots: int = 2) -> EmulatedNode:
    return EmulatedNode(slots=slots, decode_tps=20.0, infill=True)


def asks(
    path: str, body: Mapping[str, Any], session: str | None = None, *, stream: bool = True
) -> bytes:
    fields = [] if session is None else [f"X-Session-Id: {session}"]
    return request({**body, "stream": stream}, *fields, path=path)


async def is_over(gate: Public, slots: int) -> None:
    await until(lambda: gate.running.gateway.fleet.nodes["node-0"].leased == slots, 5.0)
    await until(lambda: gate.node.busy == slots, 5.0)


def superseded(found: Answer) -> None:
    assert (found.status, found.code) == (409, "superseded")
    assert found.headers["x-should-retry"] == "false"


async def begun(wire: Wire) -> None:
    assert b" 200 " in await wire.head()
    await wire.until(b"data: ")


@pytest.mark.parametrize(
    ("path", "body"), [("/infill", INFILL), ("/v1/completions", MIDDLE), ("/completions", MIDDLE)]
)
@in_virtual_time
async def test_a_stream_is_superseded_with_an_error_event(
    tmp_path: Path, path: str, body: Mapping[str, Any]
) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        async with wired(gate.url) as first, wired(gate.url) as second:
            await first.send(asks(path, body, "editor"))
            await begun(first)
            await second.send(asks(path, body, "editor"))
            await begun(second)
            end = await first.until(b"0\r\n\r\n")
            event = json.loads(end.rsplit(b"data: ", 1)[1].split(b"\n")[0])
            assert event["error"]["code"] == "superseded"
            assert b"[DONE]" not in end
            await is_over(gate, 1)
        await until(lambda: len(gate.records()) == 2)
        assert {record.reason for record in gate.ended} == {"superseded", "client_closed"}
        assert gate.running.gateway.fleet.nodes["node-0"].failures == 0
        assert len(gate.running.gateway.handler.latest_edits) == 0


@in_virtual_time
async def test_a_superseded_queued_request_takes_no_slot(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow(slots=1)) as gate:
        async with wired(gate.url) as running, wired(gate.url) as last:
            await running.send(asks("/infill", INFILL, "another"))
            await begun(running)
            waiting = asyncio.create_task(gate.ask(asks("/infill", INFILL, "editor")))
            await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 1)
            await last.send(asks("/infill", INFILL, "editor"))
            superseded(await waiting)
            assert len(gate.running.gateway.scheduler.queue_positions()) == 1
        assert gate.node.requests == 1


@in_virtual_time
async def test_a_superseded_plain_request_gets_a_status(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        body = {**INFILL, "n_predict": 20}
        first = asyncio.create_task(gate.ask(asks("/infill", body, "editor", stream=False)))
        await until(lambda: gate.node.busy == 1)
        second = asyncio.create_task(gate.ask(asks("/infill", body, "editor", stream=False)))
        superseded(await first)
        assert (await second).status == 200


@in_virtual_time
async def test_without_a_session_address_and_model_identify_the_editor(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        first = asyncio.create_task(gate.ask(asks("/infill", INFILL, stream=False)))
        await until(lambda: gate.node.busy == 1)
        async with wired(gate.url) as second:
            await second.send(asks("/infill", INFILL))
            await begun(second)
            superseded(await first)


@pytest.mark.parametrize(
    ("path", "body", "session"),
    [
        ("/infill", INFILL, "other"),
        ("/v1/completions", {**MIDDLE, "suffix": None}, "editor"),
        ("/v1/completions", {**MIDDLE, "suffix": ""}, "editor"),
        ("/v1/chat/completions", {"messages": [], "suffix": "x"}, "editor"),
    ],
)
@in_virtual_time
async def test_other_sessions_and_paths_supersede_nothing(
    tmp_path: Path, path: str, body: Mapping[str, Any], session: str
) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        first = asyncio.create_task(
            gate.ask(asks("/infill", {**INFILL, "n_predict": 10}, "editor", stream=False))
        )
        await until(lambda: gate.node.busy == 1)
        second = await gate.ask(asks(path, {**body, "max_tokens": 1, "n_predict": 1}, session))
        assert second.status == 200
        assert (await first).status == 200


@in_virtual_time
async def test_superseding_can_be_switched_off(tmp_path: Path) -> None:
    settings = {**QUICK, "queue": {"latest_wins": False}}
    async with public(tmp_path, settings, slow()) as gate:
        body = {**INFILL, "n_predict": 3}
        found = await asyncio.gather(
            *(gate.ask(asks("/infill", body, "editor", stream=False)) for _ in range(3))
        )
        assert [one.status for one in found] == [200, 200, 200]


@in_virtual_time
async def test_a_finished_request_is_not_superseded(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        for _ in range(3):
            async with wired(gate.url) as wire:
                await wire.send(asks("/infill", {**INFILL, "n_predict": 1}, "editor", stream=False))
                assert (await answer(wire)).status == 200


# The map of the newest requests.


def test_a_newer_item_replaces_the_older_one() -> None:
    latest = SupersedingMap[object]()
    first, second, other = object(), object(), object()
    assert latest.replace("a", first) is None
    assert latest.replace("b", other) is None
    assert latest.replace("a", second) is first


def test_a_discarded_item_is_not_replaced() -> None:
    latest = SupersedingMap[object]()
    first, second = object(), object()
    latest.replace("a", first)
    latest.discard("a", first)
    assert latest.replace("a", second) is None


def test_discarding_a_replaced_item_leaves_the_newer_one() -> None:
    latest = SupersedingMap[object]()
    first, second, third = object(), object(), object()
    latest.replace("a", first)
    latest.replace("a", second)
    latest.discard("a", first)
    assert latest.replace("a", third) is second
    latest.discard("a", third)
    assert len(latest) == 0
