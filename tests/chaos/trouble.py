"""Makes a schedule's faults happen, and undoes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.house import GatewayProcess
from tests.chaos.nodes import Emulator, Real
from tests.chaos.schedule import Fault

HEALING = 120.0
"""Seconds within which the gateway must have done what it is told to when all is over."""


@dataclass(slots=True)
class Trouble:
    """Of one run."""

    gateway: GatewayProcess
    admin: str
    folder: Path
    nodes: Mapping[str, Emulator | Real]
    inventory: list[dict[str, Any]]
    settings: dict[str, Any]
    patient: dict[str, Any]
    """Settings for when all is over: they hold on a machine that stands still now and then."""
    starved: list[tuple[float, float]] = field(default_factory=list)
    """When the gateway had no descriptors left: monotonic seconds."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, faults: list[Fault]) -> None:
        """One after the other, each at its time; they overlap as they last."""
        began = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
            task = asyncio.create_task(self._happen(fault))
            self._tasks.add(task)

    async def heal(self) -> None:
        """Wait for all that was begun, then make everything as it was."""
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.gateway.limit_descriptors(None)
        for node in self.nodes.values():
            await node.heal()
        self._full_disk().unlink(missing_ok=True)
        _write(self.folder / "gateway.yaml", self.patient)
        _write(self.folder / "nodes.yaml", {"nodes": self.inventory})
        # A node that had left the inventory can be resumed when it has been read again.
        for path in ("/admin/reload", *(f"/admin/nodes/{name}/resume" for name in self.nodes)):
            async with asyncio.timeout(HEALING):
                while not await self._admin(path):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def _happen(self, fault: Fault) -> None:
        node = self.nodes.get(fault.node)
        if fault.kind == "wire":
            assert isinstance(node, Real)
            await self._wire(node, fault)
        elif isinstance(node, Emulator) and fault.kind in {
            *("once", "standing", "kill", "loading", "refuse"),
        }:
            await self._at_desk(node, fault)
        elif node is not None and fault.kind == "process":
            async with node.leaving:
                await node.die()
                await asyncio.sleep(fault.lasts)
                await node.come_back()
        elif node is not None and fault.kind == "stop":
            async with node.leaving:
                os.kill(node.pid, signal.SIGSTOP)
                await asyncio.sleep(fault.lasts)
                os.kill(node.pid, signal.SIGCONT)
        else:
            await self._to_gateway(fault)

    async def _at_desk(self, node: Emulator, fault: Fault) -> None:
        match fault.kind:
            case "once":
                await node.order("next", **fault.detail)
            case "standing":
                await node.order("set", **fault.detail)
                await asyncio.sleep(fault.lasts)
                await node.order("clear")
            case "kill":
                async with node.leaving:
                    await node.order("kill")
                    await asyncio.sleep(fault.lasts)
                    await node.order("revive")
            case "loading":
                await node.order("loading", on=True)
                await asyncio.sleep(fault.lasts)
                await node.order("loading", on=False)
            case _:
                async with node.leaving:
                    await node.order("refuse")
                    await asyncio.sleep(fault.lasts)
                    await node.order("accept")

    async def _wire(self, node: Real, fault: Fault) -> None:
        match fault.detail["wire"]:
            case "reset":
                node.wire.reset()
            case "silence":
                node.wire.silence()
                await asyncio.sleep(fault.lasts)
                node.wire.heal()
            case "trickle":
                node.wire.trickling = True
                await asyncio.sleep(fault.lasts)
                node.wire.trickling = False
            case kind:
                node.wire.spoil(kind)

    async def _to_gateway(self, fault: Fault) -> None:
        nodes_file = self.folder / "nodes.yaml"
        match fault.kind:
            case "remove":
                rest = [spec for spec in self.inventory if spec["name"] != fault.node]
                _write(nodes_file, {"nodes": rest})
                await asyncio.sleep(fault.lasts)
                _write(nodes_file, {"nodes": self.inventory})
            case "change":
                other = [spec | {"slots": 1, "speed_hint": 3.0} for spec in self.inventory]
                _write(nodes_file, {"nodes": other})
                await asyncio.sleep(fault.lasts)
                _write(nodes_file, {"nodes": self.inventory})
            case "bad inventory":
                _write(nodes_file, {"nodes": [{"name": "x"}]})
                await asyncio.sleep(fault.lasts)
                _write(nodes_file, {"nodes": self.inventory})
            case "settings":
                _write(self.folder / "gateway.yaml", {**self.settings, "queue": {"max": 2}})
                await asyncio.sleep(fault.lasts)
                _write(self.folder / "gateway.yaml", self.settings)
            case "reload":
                await self._admin("/admin/reload")
            case "drain":
                await self._admin(f"/admin/nodes/{fault.node}/drain")
                await asyncio.sleep(fault.lasts)
                await self._admin(f"/admin/nodes/{fault.node}/resume")
            case "full disk":
                link = self._full_disk()
                with contextlib.suppress(FileExistsError):
                    link.symlink_to("/dev/full")
                await self._admin(f"/admin/nodes/{fault.node}/drain")
                await asyncio.sleep(fault.lasts)
                await self._admin(f"/admin/nodes/{fault.node}/resume")
                link.unlink(missing_ok=True)
            case "descriptors":
                began = time.monotonic()
                self.gateway.limit_descriptors(fault.detail["more"])
                await asyncio.sleep(fault.lasts)
                self.gateway.limit_descriptors(None)
                self.starved.append((began, time.monotonic()))
            case "clock":
                await self.gateway.order("jump", seconds=fault.detail["seconds"])
            case other:
                raise ValueError(other)

    def _full_disk(self) -> Path:
        """What the state file is written to first: where it leads to a full device, it is full."""
        state = self.folder / "state"
        state.mkdir(exist_ok=True)
        from gateway.startup import Options, drains_file

        file = drains_file(Options(inventory_file=self.folder / "nodes.yaml", state_dir=state))
        return file.with_name(f"{file.name}.{self.gateway.pid}.new")

    async def _admin(self, path: str) -> bool:
        """Whether it was done."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(
                base_url=self.admin, trust_env=False, verify=False, timeout=20
            ) as client:
                return (await client.post(path)).is_success
        return False


def _write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(value))
    new.rename(path)
