"""Emulated llama-swap and Ollama: endpoints of many models, which the first request loads.

As their pages and sources tell (llama-swap's `internal/server`, Ollama's `openai` and `/api/ps`),
since neither runs here.
Both wait until a model is idle before they unload it for another one, and take no commands that a
gateway could use: llama-swap's `/unload` ends all models, requests or not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Any

from tests.emulator.apis import to_json
from tests.emulator.connection import ReceivedRequest
from tests.emulator.request_body import RefusedError
from tests.emulator.response import REASONS, ProxiedResponse, Response
from tests.emulator.routed_model import RoutedModel
from tests.emulator.router import EmulatedRouter, Refusal

_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_TIMINGS = re.compile(rb',"timings":\{[^{}]*\}')
_OPENAI = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
_LLAMA = {"/v1/messages", "/v1/messages/count_tokens", "/v1/rerank", "/infill", "/completion"}


class GoResponse(ProxiedResponse):
    """A response in the form of Go's server, which keeps connections that had an error."""

    def _head(self, status: int, headers: Sequence[tuple[str, str]]) -> bytes:
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers if name != "X-Accel-Buffering"]
        lines += ["Connection: close"] if self.closing else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def break_off(self) -> None:
        """The model's server died: a stream is cut."""
        if not self.begun:
            self.write_plain(502, b"EOF", _TEXT)


class OllamaResponse(GoResponse):
    """Ollama computes the answers itself: they have no timings of llama.cpp."""

    async def events(self, events: Sequence[bytes]) -> None:
        await super().events([_TIMINGS.sub(b"", event) for event in events])

    def write_plain(self, status: int, body: bytes, *more: Any, **options: Any) -> None:
        super().write_plain(status, _TIMINGS.sub(b"", body), *more, **options)


class EmulatedSwap(EmulatedRouter):
    """llama-swap with one group, of which `models_max` run at once; idle ones end after `ttl`."""

    proxied_class: type[ProxiedResponse] = GoResponse
    paths = _OPENAI | _LLAMA

    def __init__(
        self,
        *args: Any,
        models_max: int = 1,
        ttl: float = inf,
        tells_running: bool = True,
        **options: Any,
    ) -> None:
        """`tells_running`: it has a path that lists what runs, as old versions have not."""
        options = {"close_after_stream": False, "keepalive_requests": 10**9} | options
        super().__init__(*args, models_max=models_max, **options)
        self.response_class = GoResponse
        self.keepalive_seconds, self.keepalive_requests = 3600.0, 10**9
        self.ttl, self.tells_running = ttl, tells_running

    def _is_routed(self, path: str, query: Mapping[str, list[str]]) -> bool:
        return path in self.paths

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        running = [model for _, model in sorted(self.models.items()) if model.state != "unloaded"]
        match request.method, request.path:
            case "GET", "/health":
                return 200, b"OK", _TEXT
            case "GET", "/v1/models":
                data = [self._entry(name) for name in sorted(self.models)]
                return 200, to_json({"data": data, "object": "list"}), _JSON
            case "GET", "/running" if self.tells_running:
                return 200, to_json({"running": [self._running(one) for one in running]}), _JSON
        return 404, b"404 page not found", _TEXT

    def _entry(self, name: str) -> dict[str, Any]:
        value = "unloaded" if self.models[name].state == "unloaded" else "loaded"
        about = {"object": "model", "created": self.started, "owned_by": "llama-swap"}
        kind = {"llamaswap": {"type": "model"}}
        return {"id": name, **about, "status": {"value": value}, "meta": kind}

    def _running(self, model: RoutedModel) -> dict[str, Any]:
        state = "ready" if model.state == "loaded" else "starting"
        about = {"cmd": " ".join(model.args), "proxy": "http://localhost:5800", "ttl": 0}
        return {"model": model.name, "state": state, **about, "name": "", "description": ""}

    def _refusal(self, why: Refusal, name: str) -> RefusedError:
        if why == "failed":
            return RefusedError(502, "", "unable to start process: upstream command exited")
        unknown = f"could not find suitable inference handler for {name}"
        return RefusedError(400, "", unknown if name else "missing or invalid 'model' key")

    def _write_refusal(self, response: Response, refused: RefusedError) -> None:
        response.write_plain(refused.status, str(refused).encode(), _TEXT)

    async def _load(self, model: RoutedModel) -> None:
        await super()._load(model)
        if model.state == "loaded" and self.ttl < inf:
            model.watch = self._begin(self._end_when_idle(model))

    async def _end_when_idle(self, model: RoutedModel) -> None:
        while model.requests or model.node.active_at + self.ttl > self.clock():
            left = model.node.active_at + self.ttl - self.clock()
            await asyncio.sleep(left if left > 0 else self.ttl / 10)
        self._set_state(model, "unloaded", exit_code=0)


class EmulatedOllama(EmulatedSwap):
    """Ollama: up to three models at once, each for `ttl` seconds after its last request."""

    proxied_class = OllamaResponse
    paths = _OPENAI

    def __init__(self, *args: Any, models_max: int = 3, ttl: float = 300.0, **options: Any) -> None:
        super().__init__(*args, models_max=models_max, ttl=ttl, **options)

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        match request.method, request.path:
            case "GET", "/":
                return 200, b"Ollama is running", _TEXT
            case "GET", "/v1/models":
                about = {"object": "model", "created": self.started, "owned_by": "library"}
                data = [{"id": name, **about} for name in sorted(self.models)]
                return 200, to_json({"object": "list", "data": data}), _JSON
            case "GET", "/api/ps" if self.tells_running:
                # Those that are being loaded, too.
                loaded = [model for model in self.models.values() if model.state != "unloaded"]
                return 200, to_json({"models": [self._running(one) for one in loaded]}), _JSON
        return 404, b"404 page not found", _TEXT

    def _running(self, model: RoutedModel) -> dict[str, Any]:
        left = timedelta(seconds=model.node.active_at + self.ttl - self.clock())
        sizes = {"size": model.memory, "size_vram": 0, "context_length": model.node.context}
        until = (datetime.now().astimezone() + left).isoformat()
        return {"name": model.name, "model": model.name, **sizes, "expires_at": until}

    def _refusal(self, why: Refusal, name: str) -> RefusedError:
        if why == "failed":
            return RefusedError(500, "api_error", "llama runner process has terminated: exit 1")
        unknown = f"model '{name}' not found"
        status, kind = (404, "not_found_error") if name else (400, "invalid_request_error")
        return RefusedError(status, kind, unknown if name else "model is required")

    def _write_refusal(self, response: Response, refused: RefusedError) -> None:
        value = {"error": refused.value["error"] | {"param": None, "code": None}}
        response.write_plain(refused.status, to_json(value), _JSON)
