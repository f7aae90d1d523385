"""Members of a cluster as processes, each on a machine of its own, and HAProxy before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.cluster.certificates import Authority
from tests.cluster.network import Machine
from tests.gateways import QUIET
from tests.processes import gone, wait_until_gone

CLUSTER = "drill"
PUBLIC, ADMIN, BETWEEN = 8000, 8001, 8090
"""Ports of a member: for clients, for operators, for other members."""
TERM = 2.0
LIMIT = 60.0  # seconds for each wait
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MEMBER_HEADER = "x-member"  # header of each answer with the member that HAProxy had it from


@dataclass(slots=True, eq=False)
class Member:
    """One `llama-gateway serve`, with its successors and their edges."""

    machine: Machine
    folder: Path
    admin_key: str
    process: subprocess.Popen[bytes] | None = None
    ends: list[int] = field(default_factory=list)  # exit statuses of processes that were not killed
    _read_to: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def end_at_once(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                self.send(signal.SIGCONT)
                self.kill()

    @property
    def name(self) -> str:
        return self.machine.name

    def start(self) -> None:
        files = ("--nodes", self.folder / "nodes.yaml", "--config", self.folder / "gateway.yaml")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.machine.prefix, sys.executable, "-m", "gateway", "serve", *files],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state")},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process that serves now: the newest."""
        assert self.process is not None
        began = [line for line in self.read() if line["event"] == "succeeded"]
        pid = int(began[-1]["pid"]) if began else self.process.pid
        return self.process.pid if gone(pid) else pid

    def edges(self) -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid).children()
            return [one.pid for one in found if "edge" in one.cmdline()[:6]]
        return []

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> list[int]:
        """Kill its process, whose edges end by themselves; all their ids."""
        pids = [self.pid, *self.edges()]
        self.send(signal.SIGKILL)
        if self.process is not None and self.process.pid == pids[0]:
            self.process.wait(LIMIT)
        return pids

    async def terminate(self) -> None:
        assert self.process is not None
        pids = [self.pid, self.process.pid, *self.edges()]
        self.send(signal.SIGTERM)
        status = await asyncio.to_thread(self.process.wait, LIMIT)
        await asyncio.to_thread(wait_until_gone, pids)
        self.ends.append(status)

    async def ready(self) -> None:
        until, url = time.monotonic() + LIMIT, f"http://{self.machine.address}:{PUBLIC}/ready"
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code == 200:
                        return
                log = (self.folder / "log").read_text()[-3000:]
                assert time.monotonic() < until, f"{self.name} is not ready:\n{log}"
                assert not gone(self.pid), f"{self.name} has ended:\n{log}"
                await asyncio.sleep(0.1)

    async def succeed(self) -> None:
        """Have its process succeeded by a new one, which takes over."""
        before = self.logged("succeeded")
        self.send(signal.SIGUSR2)
        until = time.monotonic() + LIMIT
        while self.logged("succeeded") == before:
            assert time.monotonic() < until, f"{self.name} is not succeeded"
            await asyncio.sleep(0.1)

    def read(self) -> list[dict[str, Any]]:
        with (self.folder / "log").open("rb") as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_to += len(line)
                plain = {"event": line.decode(errors="replace"), "level": "plain"}
                self.lines.append(json.loads(line) if line.startswith(b"{") else plain)
        return self.lines

    def logged(self, event: str) -> int:
        return sum(line["event"] == event for line in self.read())

    async def status(self, client: httpx.AsyncClient) -> dict[str, Any] | None:
        """What it says of itself to operators; None: it does not answer."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            url = f"http://{self.machine.address}:{ADMIN}/admin/status"
            headers = {"authorization": f"Bearer {self.admin_key}"}
            answer = await client.get(url, headers=headers)
            if answer.status_code == 200:
                return dict(answer.json())
        return None


def new_member(
    machine: Machine,
    folder: Path,
    authority: Authority | None,
    store: str,
    settings: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    admin_key: str,
) -> Member:
    """A member that is not started yet, with these settings; without an authority it is alone.

    Its files lie in a folder of its own in `folder`. All members have the same `admin_key`.
    """
    own = folder / machine.name
    own.mkdir()
    found: dict[str, Any] = {
        **settings,
        "listen": {"host": machine.address, "port": PUBLIC, **settings.get("listen", {})},
        "admin": {"host": machine.address, "port": ADMIN, "key_file": "admin-key"},
        "store": {"url": store},
        "logging": {"format": "json"},
    }
    if authority is not None:
        found["cluster"] = {
            "name": CLUSTER,
            "member": machine.name,
            "listen": f"{machine.address}:{BETWEEN}",
            "tls": authority.written(machine.name, machine.address),
            "term": TERM,
        }
    member = Member(machine, own, admin_key)
    (own / "admin-key").write_text(member.admin_key)
    (own / "gateway.yaml").write_text(yaml.safe_dump(found))
    inventory = {**QUIET, "nodes": [dict(one) for one in nodes]}
    (own / "nodes.yaml").write_text(yaml.safe_dump(inventory))
    return member


@contextlib.contextmanager
def running_haproxy(
    folder: Path, members: Sequence[Member], address: str, port: int
) -> Iterator[str]:
    """Run HAProxy before these members; its URL. It sends clients where `/ready` says yes."""
    assert HAPROXY is not None, "apt-get install haproxy"
    servers = [
        f"  server {one.name} {one.machine.address}:{PUBLIC} check inter 500 fall 2 rise 1"
        for one in members
    ]
    usual = ["mode http", "retries 3", "option redispatch 1", "retry-on conn-failure"]
    seconds = {"connect": 2, "client": 300, "server": 300, "check": 2}
    lines = [
        "defaults",
        *(f"  {one}" for one in usual),
        *(f"  timeout {what} {most}s" for what, most in seconds.items()),
        # Without it HAProxy holds chunks back for up to 200 ms, to fill packets.
        "  option http-no-delay",
        "listen gateways",
        f"  bind {address}:{port}",
        "  balance leastconn",
        "  option httpchk GET /ready",
        f"  http-after-response set-header {MEMBER_HEADER} %[srv_name]",
        *servers,
    ]
    (folder / "haproxy.cfg").write_text("\n".join([*lines, ""]))
    with (folder / "haproxy.log").open("wb") as log:
        command = [HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}:{port}"
    finally:
        process.kill()
        process.wait(LIMIT)
