"""Injects the faults of a schedule into nodes and gateway, and undoes them."""

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

from tests.chaos.gateway_process import GatewayProcess
from tests.chaos.nodes import EmulatorProcess, RealServer
from tests.chaos.schedule import ScheduledFault

RECOVERY_LIMIT = 120.0
"""Seconds within which the gateway must carry out an admin command after the last fault."""


@dataclass(slots=True)
class FaultInjector:
    """Injects the faults of one run."""

    gateway: GatewayProcess
    admin: str
    folder: Path
    nodes: Mapping[str, EmulatorProcess | RealServer]
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
            task = asyncio.create_task(self._inject(fault))
            self._tasks.add(task)

    async def recover(self) -> None:
        """Wait for the faults that run, then restore nodes, files and settings."""
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.gateway.limit_descriptors(None)
        for node in self.nodes.values():
            await node.recover()
        self._full_disk_link().unlink(missing_ok=True)
        _write(self.folder / "gateway.yaml", self.generous_settings)
        _write(self.folder / "nodes.yaml", {"nodes": self.inventory})
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
        if fault.kind == "link":
            assert isinstance(node, RealServer)
            await self._inject_into_link(node, fault)
        elif isinstance(node, EmulatorProcess) and fault.kind in {
            *("once", "standing", "kill", "loading", "refuse")
        }:
            await self._inject_into_emulator(node, fault)
        elif node is not None and fault.kind == "process":
            async with node.down:
                await node.kill()
                await asyncio.sleep(fault.lasts)
                await node.restart()
        elif node is not None and fault.kind == "stop":
            async with node.down:
                os.kill(node.pid, signal.SIGSTOP)
                await asyncio.sleep(fault.lasts)
                os.kill(node.pid, signal.SIGCONT)
        else:
            await self._inject_into_gateway(fault)

    async def _inject_into_emulator(self, node: EmulatorProcess, fault: ScheduledFault) -> None:
        match fault.kind:
            case "once":
                await node.command("next", **fault.detail)
            case "standing":
                await node.command("set", **fault.detail)
                await asyncio.sleep(fault.lasts)
                await node.command("clear")
            case "kill":
                async with node.down:
                    await node.command("kill")
                    await asyncio.sleep(fault.lasts)
                    await node.command("revive")
            case "loading":
                await node.command("loading", on=True)
                await asyncio.sleep(fault.lasts)
                await node.command("loading", on=False)
            case _:
                async with node.down:
                    await node.command("refuse")
                    await asyncio.sleep(fault.lasts)
                    await node.command("accept")

    async def _inject_into_link(self, node: RealServer, fault: ScheduledFault) -> None:
        match fault.detail["link"]:
            case "reset":
                node.link.reset()
            case "silence":
                node.link.silence()
                await asyncio.sleep(fault.lasts)
                node.link.repair()
            case "trickle":
                node.link.trickling = True
                await asyncio.sleep(fault.lasts)
                node.link.trickling = False
            case kind:
                node.link.corrupt_next(kind)

    async def _inject_into_gateway(self, fault: ScheduledFault) -> None:
        nodes_file = self.folder / "nodes.yaml"
        match fault.kind:
            case "remove":
                others = [spec for spec in self.inventory if spec["name"] != fault.node]
                _write(nodes_file, {"nodes": others})
                await asyncio.sleep(fault.lasts)
                _write(nodes_file, {"nodes": self.inventory})
            case "change":
                changed = [spec | {"slots": 1, "speed_hint": 3.0} for spec in self.inventory]
                _write(nodes_file, {"nodes": changed})
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
                await self._post_admin("/admin/reload")
            case "drain":
                await self._post_admin(f"/admin/nodes/{fault.node}/drain")
                await asyncio.sleep(fault.lasts)
                await self._post_admin(f"/admin/nodes/{fault.node}/resume")
            case "full disk":
                link = self._full_disk_link()
                with contextlib.suppress(FileExistsError):
                    link.symlink_to("/dev/full")
                await self._post_admin(f"/admin/nodes/{fault.node}/drain")
                await asyncio.sleep(fault.lasts)
                await self._post_admin(f"/admin/nodes/{fault.node}/resume")
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
        state = self.folder / "state"
        state.mkdir(exist_ok=True)
        from gateway.app.startup import Options, state_file

        options = Options(inventory_file=self.folder / "nodes.yaml", state_dir=state)
        file = state_file(options, "drains")
        return file.with_name(f"{file.name}.{self.gateway.pid}.new")

    async def _post_admin(self, path: str) -> bool:
        """POST to the admin interface. Returns whether it succeeded."""
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
