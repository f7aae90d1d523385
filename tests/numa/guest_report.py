"""Runs in the guest: starts `llama-gateway up`, inspects it and chats, and prints a JSON report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.numa.placement import placement

GATEWAY = [sys.executable, "-m", "gateway"]
URL = "http://127.0.0.1:8000"
ADMIN = "http://127.0.0.1:8001"
CHATS = 4  # as many as there are slots, so that both servers get some
START_LIMIT = 1500.0  # seconds until both servers are ready, on a busy machine
LOG = Path("/tmp/up.log")
# On a busy machine the emulated one takes minutes for what usually takes no time.
SETTINGS = """
health: {timeout: 5m, prefill_grace: 30m}
timeouts: {first_byte: 30m, silence: 30m}
queue: {max_wait: 30m}
"""
MODEL = "/opt/llama-gateway/models/demo.gguf"


def main() -> None:
    """Run all steps and print the report, which also has the error if a step fails."""
    began = time.monotonic()
    report: dict[str, Any] = {"boot": float(Path("/proc/uptime").read_text().split()[0])}
    try:
        value = subprocess.run([*GATEWAY, "topology", "--json"], capture_output=True, check=True)
        report["topology"] = json.loads(value.stdout)
        settings = Path("/tmp/gateway.yaml")
        settings.write_text(SETTINGS)
        with LOG.open("wb") as log:
            command = [*GATEWAY, "up", "--model", MODEL, "--mlock", "--config", str(settings)]
            up = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            report["nodes"] = wait_for_nodes(up)
            report["servers"] = [placement(pid) for pid in children(up.pid)]
            with ThreadPoolExecutor(CHATS) as pool:
                report["chats"] = list(pool.map(chat, range(CHATS)))
            # Once more, since memory of caches is placed when they are first used.
            report["servers_later"] = [placement(pid) for pid in children(up.pid)]
        finally:
            up.send_signal(signal.SIGTERM)
            report["status"] = up.wait(120)
        report["left"] = children(1, "node-server")
    except Exception as error:  # noqa: BLE001 - the test reports any error
        report["error"] = repr(error)
    report["log"] = LOG.read_text()[-4000:] if LOG.exists() else ""
    report["seconds"] = time.monotonic() - began
    sys.stdout.write(json.dumps(report) + "\n")


def wait_for_nodes(up: subprocess.Popen[bytes]) -> dict[str, str]:
    """Wait until all nodes are ready. Returns their states, by name."""
    end = time.monotonic() + START_LIMIT
    states: dict[str, str] = {}
    while time.monotonic() < end and up.poll() is None:
        try:
            with urllib.request.urlopen(f"{ADMIN}/admin/nodes", timeout=60) as answer:
                states = {node["name"]: node["state"] for node in json.load(answer)["nodes"]}
        except OSError:
            pass
        if states and set(states.values()) == {"ready"}:
            break
        time.sleep(1)
    return states


def chat(number: int) -> dict[str, Any]:
    """Send a chat through the gateway. Returns its node, status and number of tokens."""
    body = {"messages": [{"role": "user", "content": f"Tell {number}"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=1800) as answer:
            value = json.load(answer)
            node = answer.headers["X-Gateway-Node"]
        return {"node": node, "status": 200, "tokens": value["usage"]["completion_tokens"]}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode(errors="replace")}


def children(parent: int, module: str = "node-server") -> list[int]:
    """Ids of a process's children that run `module`."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if module in words:
            found.append(int(pid))
    return sorted(found)


if __name__ == "__main__":
    main()
