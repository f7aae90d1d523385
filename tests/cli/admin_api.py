"""A fake admin API, whose nodes a test can change."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.cli.local_server import Answer, answering


def node(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "url": f"http://10.0.0.1/{name}",
        "kind": "llama.cpp",
        "tier": "cpu",
        "state": "ready",
        "reason": "answers its probes",
        "slots_total": 2,
        "slots_busy": 1,
        "in_flight": 1,
        "models": ["mistral-7b"],
        "context": 4096,
        "prefill_tps": 250.0,
        "decode_tps": None,
        "requests": 7,
        "failures": 0,
        "cost_per_hour": 0.2,
        **changes,
    }


class AdminApi:
    """Serves `nodes`; each GET of a draining node ends one of its requests."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.key: str | None = None
        self.requests: list[str] = []
        self.drains_end = True
        self.refused: set[str] = set()
        """Nodes of which every change fails."""
        self.url = ""

    def add(self, name: str, **changes: Any) -> None:
        self.nodes[name] = node(name, **changes)

    def answer(self, method: str, target: str, authorization: str | None) -> tuple[int, Any]:
        self.requests.append(f"{method} {target}")
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, error("invalid_api_key", "No valid admin key was sent.")
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts == ["admin", "nodes"]:
            return 200, {"nodes": list(self.nodes.values())}
        if parts[:2] != ["admin", "nodes"]:
            return 404, error("not_found", f"There is nothing at '{url.path}'.")
        found = self.nodes.get(parts[2])
        if found is None:
            return 404, error("not_found", f"There is no node '{parts[2]}'.")
        if method == "POST" and parts[2] in self.refused:
            return 500, error("server_error", "It broke.")
        if method == "POST":
            self.act(found, parts[3])
        elif found["state"] == "draining" and found["in_flight"] and self.drains_end:
            found["in_flight"] -= 1
        return 200, found

    def act(self, found: dict[str, Any], action: str) -> None:
        if action == "drain":
            found["state"], found["reason"] = "draining", "drained by an operator"
        elif action == "resume":
            found["state"], found["reason"] = "ready", "answers its probes"


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


@contextmanager
def admin_api(tls: ssl.SSLContext | None = None) -> Iterator[AdminApi]:
    api = AdminApi()

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> Answer:
        authorization = request.headers["authorization"]
        status, value = api.answer(request.command, request.path, authorization)
        return status, {}, value

    with answering(answer, tls) as api.url:
        yield api
