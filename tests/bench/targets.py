"""The measured proxies: how each one is configured, started, awaited and ended.

To add a target, write a function that writes its configuration into a folder and returns its
command line, and add a `Target` to `TARGETS`. It must listen on `Plan.port`, spread requests
over `Plan.upstreams` by least load, keep connections to them alive, pass streams on unbuffered
and stay in the foreground. The tables then show its ratios.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.local.server import claim_port, claimed_port
from tests.bench.load import Address

HOST = "127.0.0.1"
START_LIMIT, STOP_LIMIT = 90.0, 30.0
ANSWER_LIMIT = 5.0  # seconds within which a starting target must answer
CONNECTIONS = 8192  # connections that each proxy is configured for; a stream takes two


class TargetError(Exception):
    """A target can't be started; the message has the reason and the path of its log."""


@dataclass(frozen=True, slots=True)
class Plan:
    folder: Path
    port: int
    upstreams: tuple[int, ...]


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
daemon off; worker_processes 1; worker_rlimit_nofile {CONNECTIONS};
pid nginx.pid; error_log error.log error;
events {{ worker_connections {CONNECTIONS}; }}
http {{
  access_log off; client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
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
    keepalive = "keepalive_requests 1000000000;"
    chats = "location /v1/chat/completions { proxy_pass http://nodes; proxy_buffering off; }"
    server = f'{keepalive} proxy_set_header Connection ""; {chats}'
    return nginx(binary, plan, nodes=f"keepalive 1024; {keepalive}", server=server)


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


def _gateway_program() -> str | None:
    script = Path(sys.executable).parent / "llama-gateway"
    return str(script) if script.exists() else None


def gateway(binary: str, plan: Plan, settings: Mapping[str, object]) -> list[str]:
    nodes, config = plan.folder / "nodes.yaml", plan.folder / "gateway.yaml"
    fleet = [
        {"name": f"node{i}", "url": f"http://{HOST}:{n}"} for i, n in enumerate(plan.upstreams)
    ]
    nodes.write_text(json.dumps({"nodes": fleet}))  # JSON is YAML
    config.write_text(json.dumps(settings))
    return [
        *(binary, "serve", "--nodes", str(nodes), "--config", str(config)),
        *("--host", HOST, "--port", str(plan.port), "--admin-port", "0"),
    ]


def _peer(name: str, command: Callable[[str, Plan], list[str]]) -> Target:
    return Target(name, lambda: find(name), f"apt-get install {name}", command, version=("-v",))


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
        _peer("nginx", _nginx),
        _peer(
            "haproxy", lambda binary, plan: haproxy(binary, plan, defaults="  http-reuse always")
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
        log = folder / f"{target.name}.log"
        process = _start(command, log, core)
        try:
            await _until_ready(target, process, (HOST, plan.port), log)
            yield Running((HOST, plan.port), process.pid)
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, STOP_LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(command: list[str], log: Path, core: int) -> subprocess.Popen[bytes]:
    # setpriv ends the proxy when the benchmark is killed. Both tools exec the command, so the
    # process id is that of the proxy.
    with log.open("ab") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", str(core), *command],
            cwd=log.parent,
            # The user's own store would grow with each run, and slow down the next.
            env={**os.environ, "XDG_STATE_HOME": str(log.parent / "state")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def _until_ready(
    target: Target, process: subprocess.Popen[bytes], address: Address, log: Path
) -> None:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if process.poll() is not None:
            raise TargetError(f"{target.name} exited with {process.returncode}; see {log}")
        if await status_of(address, target.ready) == 200:
            return
        await asyncio.sleep(0.05)
    raise TargetError(f"{target.name} is not ready after {START_LIMIT:.0f} s; see {log}")


async def status_of(address: Address, path: str) -> int:
    """Status of a GET; 0 without an answer."""
    try:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which costs less than the usual one
        async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=ANSWER_LIMIT) as client:
            return (await client.get("http://{}:{}{}".format(*address, path))).status_code
    except httpx.TransportError:
        return 0
