"""Members of a cluster as processes, each on a machine of its own, and HAProxy before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.cluster import network
from tests.cluster.certificates import Authority
from tests.cluster.load import MEMBER_HEADER
from tests.gateways import QUIET, until
from tests.polling import eventually
from tests.processes import free_port, gone, wait_until_gone

PUBLIC, ADMIN, BETWEEN = 8000, 8001, 8090
"""Ports of a member: for clients, for operators, for other members."""
TERM = 2.0
LIMIT = 60.0  # seconds for each wait
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(slots=True, eq=False)
class Member:
    """One `llama-gateway serve`, with its successors and their edges."""

    machine: network.Machine
    folder: Path
    admin_key: str
    process: subprocess.Popen[bytes] | None = None
    ends: list[int] = field(default_factory=list)  # exit statuses of processes that were not killed

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

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def successors(self) -> list[int]:
        """The processes that have taken over, one after the other."""
        lines = [line for line in self.log().splitlines() if '"event":"succeeded"' in line]
        return [json.loads(line)["pid"] for line in lines]

    @property
    def pid(self) -> int:
        """The process that serves now: the newest."""
        assert self.process is not None
        pid = [self.process.pid, *self.successors()][-1]
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
        url = f"http://{self.machine.address}:{PUBLIC}/ready"

        async def look() -> bool | None:
            assert not gone(self.pid), f"{self.name} has ended"
            with contextlib.suppress(httpx.HTTPError):
                return (await client.get(url)).status_code == 200 or None
            return None

        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            try:
                await eventually(look, LIMIT)
            except AssertionError:
                log = self.log()[-3000:]
                raise AssertionError(f"{self.name} is not ready:\n{log}") from None

    async def succeed(self) -> None:
        """Have its process succeeded by a new one, which takes over."""
        before = len(self.successors())
        self.send(signal.SIGUSR2)
        await until(lambda: len(self.successors()) > before, LIMIT)

    async def status(self, client: httpx.AsyncClient) -> dict[str, Any] | None:
        """What it says of itself to operators; None: it does not answer."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            url = f"http://{self.machine.address}:{ADMIN}/admin/status"
            headers = {"authorization": f"Bearer {self.admin_key}"}
            answer = await client.get(url, headers=headers)
            if answer.status_code == 200:
                return dict(answer.json())
        return None


def running_members(
    count: int, folder: Path, stores: Sequence[str], settings: Mapping[str, Any], nodes: Any
) -> Iterator[Member]:
    """Members, which are started, with these settings; one alone is no cluster.

    The files of each lie in a folder of its own; every second one has the second of the stores.
    """
    authority, admin_key = Authority(folder / "certificates"), secrets.token_hex(16)
    for number in range(count):
        machine = network.machine(number, f"gw-{chr(ord('a') + number)}")
        found: dict[str, Any] = {
            **settings,
            "listen": {"host": machine.address, "port": PUBLIC, **settings["listen"]},
            "admin": {"host": machine.address, "port": ADMIN, "key_file": "admin-key"},
            "store": {"url": stores[number % 2]},
            "logging": {"format": "json"},
        }
        if count > 1:
            found["cluster"] = {
                "name": "drill",
                "member": machine.name,
                "listen": f"{machine.address}:{BETWEEN}",
                "tls": authority.written(machine.name, machine.address),
                "term": TERM,
            }
        own = folder / machine.name
        own.mkdir()
        (own / "admin-key").write_text(admin_key)
        (own / "gateway.yaml").write_text(yaml.safe_dump(found))
        (own / "nodes.yaml").write_text(yaml.safe_dump({**QUIET, "nodes": nodes}))
        member = Member(machine, own, admin_key)
        member.start()
        yield member


HAPROXY_FILE = """\
defaults
  mode http
  retries 3
  option redispatch 1
  retry-on conn-failure
  timeout connect 2s
  timeout client 300s
  timeout server 300s
  timeout check 2s
  # Without it HAProxy holds chunks back for up to 200 ms, to fill packets.
  option http-no-delay
listen gateways
  bind {address}:{port}
  balance leastconn
  option httpchk GET /ready
  http-after-response set-header {header} %[srv_name]
"""


@contextlib.contextmanager
def running_haproxy(folder: Path, members: Sequence[Member], address: str) -> Iterator[str]:
    """Run HAProxy before these members; its URL. It sends clients where `/ready` says yes."""
    assert HAPROXY is not None, "apt-get install haproxy"
    port = free_port()
    text = HAPROXY_FILE.format(address=address, port=port, header=MEMBER_HEADER)
    for one in members:
        text += (
            f"  server {one.name} {one.machine.address}:{PUBLIC} check inter 500 fall 2 rise 1\n"
        )
    (folder / "haproxy.cfg").write_text(text)
    with (folder / "haproxy.log").open("wb") as log:
        command = [HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}:{port}"
    finally:
        process.kill()
        process.wait(LIMIT)
