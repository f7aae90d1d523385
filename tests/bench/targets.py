"""The measured proxies: how each one is configured, started, awaited and ended.

To add a target, write a function that writes its configuration into a folder and returns its
command line, and add a `Target` to `TARGETS`. It must listen on `Plan.address`, spread requests
over `Plan.upstreams` by least load, keep connections to them alive, pass streams on unbuffered
and stay in the foreground. The tables then show its ratios.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gateway.local.server import claim_port, claimed_port
from tests.bench.load import Address

HOST = "127.0.0.1"
START_LIMIT = 90.0
STOP_LIMIT = 30.0
ANSWER_LIMIT = 5.0  # seconds within which a starting target must answer
CONNECTIONS = 8192  # connections that each proxy is configured for; a stream takes two


class TargetError(Exception):
    """A target can't be started; the message has the reason and the path of its log."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The folder, port and upstreams that a target is configured with."""

    folder: Path
    port: int
    upstreams: tuple[int, ...]

    @property
    def address(self) -> Address:
        return HOST, self.port


@dataclass(frozen=True, slots=True)
class Target:
    """One proxy to measure, or the upstream itself."""

    name: str
    program: Callable[[], str | None]
    """Returns the path of its binary; None when it is not installed."""
    remedy: str
    command: Callable[[str, Plan], list[str]]
    ready: str = "/health"  # path that answers 200 once it accepts requests
    version: tuple[str, ...] = ("--version",)


@dataclass(frozen=True, slots=True)
class Running:
    """A target that accepts requests; `pid` is None for direct."""

    address: Address
    pid: int | None


def find(binary: str) -> str | None:
    """A binary on PATH or where Debian puts daemons."""
    return shutil.which(binary, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def nginx(
    binary: str, plan: Plan, *, nodes: str = "", server: str = "", http: str = ""
) -> list[str]:
    """Configure nginx with `least_conn`; `nodes`, `server` and `http` are added to these blocks."""
    servers = "\n".join(f"    server {HOST}:{port} max_fails=0;" for port in plan.upstreams)
    user = "user root;" if os.geteuid() == 0 else ""
    config = plan.folder / "nginx.conf"
    config.write_text(f"""{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile {CONNECTIONS};
pid nginx.pid;
error_log error.log error;
events {{ worker_connections {CONNECTIONS}; }}
http {{
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
{http}
  upstream nodes {{
    least_conn;
{servers}
{nodes}
  }}
  server {{
    listen {HOST}:{plan.port} backlog=4096;
    proxy_http_version 1.1;
    proxy_read_timeout 3600s;
    location / {{ proxy_pass http://nodes; }}
{server}
  }}
}}
""")
    return [binary, "-p", str(plan.folder), "-c", str(config), "-e", "error.log"]


def _nginx(binary: str, plan: Plan) -> list[str]:
    return nginx(
        binary,
        plan,
        nodes="""    keepalive 1024;
    keepalive_requests 1000000000;""",
        server="""    keepalive_requests 1000000000;
    proxy_set_header Connection "";
    location /v1/chat/completions { proxy_pass http://nodes; proxy_buffering off; }""",
    )


def haproxy(binary: str, plan: Plan, *, defaults: str, server: str = "") -> list[str]:
    """Configure HAProxy with `leastconn`, lines of its defaults, and options of each server."""
    servers = "\n".join(
        f"  server node{i} {HOST}:{port} {server}".rstrip() for i, port in enumerate(plan.upstreams)
    )
    config = plan.folder / "haproxy.cfg"
    # http-no-delay: without it HAProxy may hold a chunk back to fill a packet.
    config.write_text(f"""global
  nbthread 1
  maxconn {CONNECTIONS // 2}
defaults
  mode http
  option http-no-delay
{defaults}
  timeout connect 1m
  timeout client 1h
  timeout server 1h
frontend public
  bind {HOST}:{plan.port} backlog 4096
  default_backend nodes
backend nodes
  balance leastconn
{servers}
""")
    return [binary, "-db", "-f", str(config)]


def _haproxy(binary: str, plan: Plan) -> list[str]:
    return haproxy(binary, plan, defaults="  http-reuse always")


def _gateway_program() -> str | None:
    script = Path(sys.executable).parent / "llama-gateway"
    return str(script) if script.exists() else None


def gateway(binary: str, plan: Plan, settings: Mapping[str, object]) -> list[str]:
    """Configure this gateway with these settings."""
    nodes, config = plan.folder / "nodes.yaml", plan.folder / "gateway.yaml"
    fleet = [
        {"name": f"node{i}", "url": f"http://{HOST}:{port}"}
        for i, port in enumerate(plan.upstreams)
    ]
    # JSON is YAML.
    nodes.write_text(json.dumps({"nodes": fleet}))
    config.write_text(json.dumps(settings))
    return [
        *(binary, "serve", "--nodes", str(nodes), "--config", str(config)),
        *("--host", HOST, "--port", str(plan.port), "--admin-port", "0"),
    ]


TARGETS = {
    target.name: target
    for target in (
        Target(
            "gateway",
            _gateway_program,
            "make install",
            lambda binary, plan: gateway(binary, plan, {"queue": {"max": 10000}}),
            ready="/ready",
        ),
        Target("nginx", lambda: find("nginx"), "apt-get install nginx", _nginx, version=("-v",)),
        Target(
            "haproxy", lambda: find("haproxy"), "apt-get install haproxy", _haproxy, version=("-v",)
        ),
        Target("direct", lambda: "", "", lambda _binary, _plan: []),
    )
}


@asynccontextmanager
async def running(
    target: Target, folder: Path, upstreams: tuple[int, ...], core: int
) -> AsyncIterator[Running]:
    """Start a target on its core, wait until it accepts requests, and end it afterwards.

    Raises TargetError when it is not installed, exits or is not ready within `START_LIMIT` s.
    """
    program = target.program()
    if program is None:
        raise TargetError(f"{target.name} is not installed ({target.remedy})")
    # The claim keeps the port free until the target has it; servers set SO_REUSEADDR.
    with claim_port(HOST) as claim:
        plan = Plan(folder, claimed_port(claim), upstreams)
        command = target.command(program, plan)
        if not command:
            yield Running((HOST, upstreams[0]), None)
            return
        async with _run(target, plan, command, core) as proxy:
            yield proxy


@asynccontextmanager
async def _run(target: Target, plan: Plan, command: list[str], core: int) -> AsyncIterator[Running]:
    log_file = plan.folder / f"{target.name}.log"
    with log_file.open("ab") as log:
        process = _start(command, log, plan.folder, core)
        try:
            await _until_ready(target, process, plan, log_file)
            yield Running(plan.address, process.pid)
        finally:
            await _stop(process)


def _start(command: list[str], log: BinaryIO, folder: Path, core: int) -> subprocess.Popen[bytes]:
    # setpriv ends the proxy when the benchmark is killed. Both tools exec the command, so the
    # process id is that of the proxy.
    wrapped = ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", str(core), *command]
    return subprocess.Popen(
        wrapped,
        cwd=folder,
        # The user's own store would grow with each run, and slow down the next.
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


async def _until_ready(
    target: Target, process: subprocess.Popen[bytes], plan: Plan, log: Path
) -> None:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if process.poll() is not None:
            raise TargetError(_exit_message(target, process.returncode, log))
        if await status_of(plan.address, target.ready) == 200:
            return
        await asyncio.sleep(0.05)
    raise TargetError(f"{target.name} is not ready after {START_LIMIT:.0f} s; see {log}")


def _exit_message(target: Target, status: int, log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{target.name} exited with {status}: {last[-200:]} ({log})"


async def status_of(address: Address, path: str) -> int:
    """Status of a GET; 0 without an answer."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT):
            reader, writer = await asyncio.open_connection(*address)
            try:
                host = f"{address[0]}:{address[1]}"
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        await asyncio.to_thread(process.wait, STOP_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
