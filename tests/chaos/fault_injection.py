"""The schedule of faults that follows from a seed, and what injects and undoes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.faulty_link import FaultyLink
from tests.chaos.gateway_worker import GatewayProcess
from tests.chaos.nodes import ChaosNode, EmulatorProcess, RealServer

CUTS = ("reset", "close", "cut", "end", "error_event", "garbage_body")
BEFORE_THE_HEAD = ("reset", "close", "garbage", "slow_head", "interim")
FORMS = (
    *("split", "merge", "crlf", "comments", "chunk_extensions", "double_done", "no_done"),
    *("head_bomb", "wrong_length"),
)
EXTRAS = ("comment", "line_comment", "empty", "no_data", "fields")
SINGLE_REQUEST_FAULTS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in (*BEFORE_THE_HEAD, *FORMS)),
    *({"kind": "hang", "seconds": seconds} for seconds in (0.2, 3.0)),
    *({"kind": "status", "status": status} for status in (500, 502, 503, 429, 404, 401)),
    *({"kind": kind, "after_events": after} for kind, after in product(CUTS, (0, 1, 2, 7, 25))),
    *({"kind": "cut", "after_events": after, "reset": True} for after in (0, 5)),
    *(
        {"kind": "hang", "after_events": after, "seconds": seconds}
        for after, seconds in product((0, 1, 6), (0.2, 3.0))
    ),
    {"kind": "trickle", "size": 40, "seconds": 0.005},
    *(
        {"kind": "insert", "what": what, "after_events": after}
        for what, after in product(EXTRAS, (0, 4))
    ),
    {"kind": "insert", "what": "not_json", "after_events": 0},
    {"kind": "insert", "what": "huge", "after_events": 0, "size": 2 << 20},
]  # faults of an emulated node for one or a few of its next requests

STANDING_FAULTS: list[dict[str, Any]] = [
    *({"kind": "status", "status": status} for status in (500, 503, 429)),
    {"kind": "hang", "seconds": 1.5, "path": "control"},
    {"kind": "reset"},
    {"kind": "close", "after_events": 3},
    {"kind": "stale"},
]  # faults of an emulated node for all its requests during a time

LINK_FAULTS = ("reset", "silence", "half", "half, then reset", "garbage", "trickle")
EMULATOR_FAULTS = ("once", "standing", "kill", "process", "stop", "loading", "refuse")
SERVER_FAULTS = ("link", "process", "stop")
GATEWAY_FAULTS = ("remove", "change", "bad inventory", "settings", "reload", "drain", "full disk")


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault: it begins `at` seconds into the run and lasts for `lasts` seconds."""

    at: float
    kind: str
    node: str = ""
    lasts: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


def schedule(
    rng: random.Random,
    seconds: float,
    emulated: Sequence[str],
    real: Sequence[str],
    *,
    process_faults: bool,
) -> list[ScheduledFault]:
    """The faults of a run of `seconds`, by time; `emulated` and `real` are names of nodes."""
    faults = []
    at = rng.uniform(0.2, 0.6)
    mean_gap = rng.choice((0.03, 0.08, 0.2))  # seconds between faults
    while at < seconds - 0.3:
        chance = rng.random()
        lasts = rng.uniform(0.05, min(2.5, seconds / 3))
        node, detail = "", dict[str, Any]()
        if process_faults and chance < 0.015:
            kind, lasts = "descriptors", min(lasts, 1.0)
            detail = {"more": rng.choice((0, 3))}
        elif process_faults and chance < 0.03:
            kind = "clock"
            by = rng.choice((-86_400.0, -60.0, -1.0, 1.0, 3600.0, 365 * 86_400.0))
            detail = {"seconds": by}
        elif chance < 0.15:
            kind, node = rng.choice(GATEWAY_FAULTS), rng.choice(emulated)
        elif real and chance < 0.35:
            kind, node = rng.choices(SERVER_FAULTS, (6, 1, 2))[0], rng.choice(real)
            detail = {"link": rng.choice(LINK_FAULTS)} if kind == "link" else {}
        else:
            kind, node = (
                rng.choices(EMULATOR_FAULTS, (60, 8, 8, 1, 5, 3, 3))[0],
                rng.choice(emulated),
            )
            if kind == "once":
                detail = {**rng.choice(SINGLE_REQUEST_FAULTS), "n": rng.choice((1, 1, 1, 3))}
            elif kind == "standing":
                detail = rng.choice(STANDING_FAULTS)
        faults.append(ScheduledFault(at, kind, node, lasts, detail))
        at += rng.expovariate(1 / mean_gap)
    return faults


RECOVERY_LIMIT = 120.0
"""Seconds within which the gateway must carry out an admin command after the last fault."""
COMMANDS: dict[str, tuple[str, str]] = {
    "kill": ("kill", "revive"),
    "refuse": ("refuse", "accept"),
    "standing": ("set", "clear"),
    "loading": ("loading", "loading"),
}  # the commands to an emulator by which a fault begins and ends


@dataclass(slots=True)
class FaultInjector:
    gateway: GatewayProcess
    admin: str
    folder: Path
    nodes: Mapping[str, ChaosNode]
    inventory: list[dict[str, Any]]
    settings: dict[str, Any]
    generous_settings: dict[str, Any]
    """Settings for the time after the faults; their timeouts suit a machine that may stall."""
    out_of_descriptors: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each time without free descriptors, in monotonic seconds."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, faults: list[ScheduledFault]) -> None:
        """Start each fault at its time; faults may overlap."""
        began = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
            self._tasks.add(asyncio.create_task(self._inject(fault)))

    async def recover(self) -> None:
        """Wait for the faults that run, then restore nodes, files and settings."""
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.gateway.limit_descriptors(None)
        for node in self.nodes.values():
            await node.recover()
        self._full_disk_link().unlink(missing_ok=True)
        self._write_settings(self.generous_settings)
        self._write_nodes(self.inventory)
        # A node that was removed can be resumed only once the inventory has been read again.
        for path in ("/admin/reload", *(f"/admin/nodes/{name}/resume" for name in self.nodes)):
            async with asyncio.timeout(RECOVERY_LIMIT):
                while not await self._post_admin(path):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def _inject(self, fault: ScheduledFault) -> None:
        node = self.nodes.get(fault.node)
        if node is not None and fault.kind in {"process", "stop"}:
            async with node.down:
                await self._take_down(node, fault)
        elif isinstance(node, RealServer) and fault.kind == "link":
            await self._inject_into_link(node.link, fault)
        elif isinstance(node, EmulatorProcess) and fault.kind == "once":
            await node.command("next", **fault.detail)
        elif isinstance(node, EmulatorProcess) and fault.kind in COMMANDS:
            takes_down = fault.kind in {"kill", "refuse"}
            async with node.down if takes_down else contextlib.nullcontext():
                begin, end = COMMANDS[fault.kind]
                loading = fault.kind == "loading"
                await node.command(begin, **fault.detail, **({"on": True} if loading else {}))
                await asyncio.sleep(fault.lasts)
                await node.command(end, **({"on": False} if loading else {}))
        else:
            await self._inject_into_gateway(fault)

    async def _take_down(self, node: ChaosNode, fault: ScheduledFault) -> None:
        if fault.kind == "process":
            await node.kill()
            await asyncio.sleep(fault.lasts)
            await node.restart()
        else:
            os.kill(node.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.lasts)
            os.kill(node.pid, signal.SIGCONT)

    async def _inject_into_link(self, link: FaultyLink, fault: ScheduledFault) -> None:
        match fault.detail["link"]:
            case "reset":
                link.reset()
            case "silence":
                link.silence()
                await asyncio.sleep(fault.lasts)
                link.repair()
            case "trickle":
                link.trickling = True
                await asyncio.sleep(fault.lasts)
                link.trickling = False
            case kind:
                link.corrupt_next(kind)

    async def _inject_into_gateway(self, fault: ScheduledFault) -> None:
        match fault.kind:
            case "remove" | "change" | "bad inventory":
                self._write_nodes(
                    {
                        "remove": [spec for spec in self.inventory if spec["name"] != fault.node],
                        "change": [s | {"slots": 1, "speed_hint": 3.0} for s in self.inventory],
                        "bad inventory": [{"name": "x"}],
                    }[fault.kind]
                )
                await asyncio.sleep(fault.lasts)
                self._write_nodes(self.inventory)
            case "settings":
                self._write_settings({**self.settings, "queue": {"max": 2}})
                await asyncio.sleep(fault.lasts)
                self._write_settings(self.settings)
            case "reload":
                await self._post_admin("/admin/reload")
            case "drain" | "full disk":
                link = self._full_disk_link()
                if fault.kind == "full disk":
                    with contextlib.suppress(FileExistsError):
                        link.symlink_to("/dev/full")
                await self._post_admin(f"/admin/nodes/{fault.node}/drain")
                await asyncio.sleep(fault.lasts)
                await self._post_admin(f"/admin/nodes/{fault.node}/resume")
                if fault.kind == "full disk":
                    link.unlink(missing_ok=True)
            case "descriptors":
                began = time.monotonic()
                self.gateway.limit_descriptors(fault.detail["more"])
                await asyncio.sleep(fault.lasts)
                self.gateway.limit_descriptors(None)
                self.out_of_descriptors.append((began, time.monotonic()))
            case "clock":
                await self.gateway.command("shift_clock", seconds=fault.detail["seconds"])
            case other:
                raise ValueError(other)

    def _full_disk_link(self) -> Path:
        """The temporary file of the state file; as a link to /dev/full it simulates a full disk."""
        from gateway.app.startup import Options, state_file

        state = self.folder / "state"
        state.mkdir(exist_ok=True)
        options = Options(inventory_file=self.folder / "nodes.yaml", state_dir=state)
        file = state_file(options, "drains")
        return file.with_name(f"{file.name}.{self.gateway.pid}.new")

    async def _post_admin(self, path: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as client:
                return (await client.post(f"{self.admin}{path}")).is_success
        return False

    def _write_nodes(self, nodes: list[dict[str, Any]]) -> None:
        _write(self.folder / "nodes.yaml", {"nodes": nodes})

    def _write_settings(self, settings: dict[str, Any]) -> None:
        _write(self.folder / "gateway.yaml", settings)


def _write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(value))
    new.rename(path)
