"""The proxies that the roles configure, on this machine, and stand-ins for the gateways."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.control import PLAYBOOKS, ansible_programs, wait_for

LIMIT = 60.0
RENDER = """
- hosts: "{{ host }}"
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ role }}/defaults/main.yml"}
    - ansible.builtin.include_vars: {file: "{{ role }}/vars/main.yml"}
    - ansible.builtin.set_fact: {"{{ item.key }}": "{{ item.value }}"}
      loop: "{{ settings | dict2items }}"
    - ansible.builtin.template: {src: "{{ role }}/templates/{{ item }}.j2", dest: "{{ folder }}/{{ item }}", mode: "0644"}
      loop: "{{ templates }}"
"""  # noqa: E501


@dataclass(slots=True)
class Gateway:
    """Replaces a gateway: `/held` is answered in two pieces, the second when it may go on."""

    name: str
    ready: bool = True
    lives: bool = True
    seen: list[dict[str, str]] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)
    cut: bool = False
    """Requests are cut off without an answer."""
    reads_bodies: bool = True
    """Otherwise it answers 401 before a body has come, as for a wrong key."""
    port: int = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def do_GET(self) -> None:
        gateway = self.gateway
        if self.path in ("/ready", "/health"):
            good = gateway.ready if self.path == "/ready" else gateway.lives
            self.answer(200 if good else 503)
            return
        self.note()
        if self.path != "/held":
            self.answer(200, gateway.name.encode())
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        gateway.begun.release()
        gateway.go_on.wait(LIMIT)
        if gateway.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def do_POST(self) -> None:
        self.note()
        if not self.gateway.reads_bodies:
            self.close_connection = True
            self.answer(401)
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.gateway.cut:
            self.close_connection = True
        else:
            self.answer(200, self.gateway.name.encode())

    def note(self) -> None:
        """Keep the head of the request."""
        self.gateway.seen.append({name.lower(): value for name, value in self.headers.items()})

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(gateway: Gateway) -> Iterator[None]:
    """Serve as this gateway, on a free port."""
    handler = type("Handler", (_Handler,), {"gateway": gateway})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        gateway.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            gateway.go_on.set()
            server.shutdown()


def begun(gateways: Iterable[Gateway]) -> Gateway:
    """Wait until an answer to `/held` has begun; the gateway that gives it."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        for gateway in gateways:
            if gateway.begun.acquire(timeout=0.05):
                return gateway
    raise AssertionError("no stream has begun")


@contextlib.contextmanager
def held(
    get: Callable[[str, str], httpx.Response], gateways: Collection[Gateway], *addresses: str
) -> Iterator[None]:
    """Hold a response open for each address."""
    for gateway in gateways:
        gateway.go_on.clear()
    with ThreadPoolExecutor(len(addresses)) as pool:
        waiting = [pool.submit(get, "/held", address) for address in addresses]
        try:
            for _ in addresses:
                begun(gateways)
            yield
        finally:
            for gateway in gateways:
                gateway.go_on.set()
        assert {one.result().text for one in waiting} == {"firstlast"}


def is_rate_limit_error(refused: httpx.Response) -> bool:
    """Whether each of the APIs' clients can read this refusal."""
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"] == "application/json"
    return refused.status_code == 429


def render(
    role: str,
    templates: Sequence[str],
    folder: Path,
    groups: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Write a role's files into a folder, as for the first host of the group of its name."""
    inventory: dict[str, Any] = {group: {"hosts": hosts} for group, hosts in groups.items()}
    inventory["all"] = {"vars": {"ansible_python_interpreter": "/usr/bin/python3"}}
    (folder / "hosts.json").write_text(json.dumps(inventory))
    (folder / "render.yml").write_text(RENDER)
    made = {
        "host": next(iter(groups[role])),
        "role": str(PLAYBOOKS / "roles" / role),
        "folder": str(folder),
        "templates": list(templates),
        "settings": settings,
    }
    program = str(ansible_programs() / "ansible-playbook")
    files = ("-i", str(folder / "hosts.json"), str(folder / "render.yml"))
    command = [program, *files, "-e", json.dumps(made)]
    subprocess.run(command, cwd=PLAYBOOKS, check=True, timeout=200)


def program(name: str, package: str) -> str:
    """The path of a program of this machine."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not found:
        pytest.skip(f"no {name}. Remedy: apt-get install {package}")
    return found


@contextlib.contextmanager
def running(command: Sequence[str], check: Sequence[str], log: Path, port: int) -> Iterator[None]:
    """Run a program once it accepts its configuration, until it listens on this port."""
    checked = subprocess.run([*command, *check], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr
    with log.open("wb") as written:
        process = subprocess.Popen(command, stderr=written)
    try:
        wait_for(lambda: listens(port))
        yield
    finally:
        process.terminate()
        process.wait(LIMIT)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT).close()
    except ConnectionRefusedError:
        return False
    return True
