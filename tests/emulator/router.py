"""An emulated router: `llama-server --models-dir`, which runs a server for each model in use.

    async with EmulatedRouter(["one", "other"], models_max=1, load_seconds=2) as router:
        ...                                     # send requests that name a model to router.url
        assert router.models["one"].node.requests == 1

Beyond `models_max` a request waits until a model is idle, which is then unloaded: the one that was
used least recently. The node of each model has counters and faults of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs

from tests.emulator import info_endpoints
from tests.emulator.apis.answer import to_json
from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.node import SLOT_PATHS, EmulatedNode
from tests.emulator.request_body import RefusedError, bad_request, read_json
from tests.emulator.response import JSON, ProxiedResponse, Response

UNLOAD_GRACE = 10.0
"""Seconds after which a model that is to be unloaded is killed, with its requests."""

_OF_A_MODEL = {*SLOT_PATHS, *info_endpoints.POSTS, "/slots", "/metrics"}


@dataclass(slots=True)
class RoutedModel:
    """One model of a router."""

    node: EmulatedNode = field(repr=False)
    readable: bool = True  # its file is a model
    state: Literal["unloaded", "loading", "loaded"] = "unloaded"
    failed: bool = False  # it did not load, or its server was killed
    requests: int = 0  # that run now
    used: int = 0  # the number of its last request among the router's

    def as_json(self) -> dict[str, Any]:
        """The model as `/v1/models` of a router shows it."""
        node = self.node
        name, slots = node.model, len(node.slots.slots)
        args = ["llama-server", "--alias", name, "--ctx-size", str(slots * node.context)]
        args += ["--model", f"/models/{name}.gguf", "--parallel", str(slots)]
        status: dict[str, Any] = {
            "value": "sleeping" if self.state == "loaded" and node.sleeping else self.state,
            "args": args,
            "preset": f"[{name}]\nmodel = /models/{name}.gguf\n\n",
        }
        if self.failed:
            status |= {"exit_code": 1, "failed": True}
        value = {
            "id": name,
            "aliases": [],
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "created": node.started,
            "status": status,
            "architecture": info_endpoints.architecture(node),
            "source": "models_dir",
            "can_remove": False,
        }
        if self.readable:
            value["context_length"] = node.context_train
        if self.state == "loaded":
            value["meta"] = info_endpoints.meta(node)
        return value


class EmulatedRouter(EmulatedNode):
    """A router of `models`; `unreadable` ones fail to load. `options` are those of their nodes."""

    def __init__(
        self,
        models: Iterable[str],
        *,
        unreadable: Iterable[str] = (),
        models_max: int = 4,
        load_seconds: float = 0.0,
        port: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(port=port, load_seconds=load_seconds)
        self.models_max = models_max
        self.models: dict[str, RoutedModel] = {}
        unreadable = set(unreadable)
        for name in sorted({*models, *unreadable}):
            node = EmulatedNode(model=name, load_seconds=load_seconds, **options)
            node.response_class = ProxiedResponse
            self.models[name] = RoutedModel(node, readable=name not in unreadable)
        self._changed = asyncio.Event()
        self._queue = asyncio.Lock()  # of the requests for models that are not loaded

    async def kill(self) -> None:
        await super().kill()
        for model in self.models.values():
            await model.node.kill()
            self.failures += model.node.failures
            model.state = "unloaded"

    async def kill_model(self, name: str) -> None:
        """Ends the server of a model as by kill -9, with its requests."""
        model = self.models[name]
        await model.node.kill()
        self._set_state(model, "unloaded", failed=True)

    # What a connection calls.

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        query = parse_qs(request.query)
        if request.path in _OF_A_MODEL or (request.path == "/props" and "model" in query):
            response = Response(
                connection, closing=not request.keep_alive, head_only=False, closes_streams=False
            )
            connection.response = response
            connection.task = self._begin(self._route(connection, request, response))
        else:
            super().handle(connection, request)

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        name = str(read_json(request.body).get("model", "")) if request.method == "POST" else ""
        match request.method, request.path:
            case "GET", "/props":
                return 200, to_json(self._props()), JSON
            case "GET", "/v1/models" | "/models":
                if "reload=1" in request.query:
                    for model in self.models.values():
                        model.failed = False
                data = [model.as_json() for model in self.models.values()]
                return 200, to_json({"data": data, "object": "list"}), JSON
            case "POST", "/models/load":
                self._load_now(name)
                return 200, to_json({"success": True}), JSON
            case "POST", "/models/unload":
                if name not in self.models:
                    raise bad_request("model is not found")
                self._begin(self._unload(self.models[name]))
                return 200, to_json({"success": True}), JSON
        return super()._info_response(request)

    def _props(self) -> dict[str, Any]:
        return {
            "role": "router",
            "max_instances": self.models_max,
            "models_autoload": True,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": {},
            "build_info": self.build,
            "cors_proxy_enabled": False,
        }

    async def _route(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        try:
            model = await self._loaded_model(request)
        except RefusedError as refused:
            response.write_plain(refused.status, to_json(refused.value))
            connection.finished(response)
            return
        try:
            model.node.handle(connection, request)
            if (answering := connection.task) is not None:
                await asyncio.wait({answering})
        finally:
            model.requests -= 1
            self._notify()

    async def _loaded_model(self, request: ReceivedRequest) -> RoutedModel:
        """The model that a request names, once it is loaded; the request counts as one of it."""
        query = parse_qs(request.query)
        if request.method == "POST":
            name = read_json(request.body).get("model")
        else:
            name = query.get("model", [None])[0]
        if not name:
            raise bad_request("model name is missing from the request")
        model = self.models.get(str(name))
        if model is None:
            raise bad_request(f"model '{name}' not found")
        if model.state != "loaded" and query.get("autoload") == ["false"]:
            raise bad_request("model is not loaded")
        self.requests += 1
        while model.state != "loaded":
            async with self._queue:
                while model.state == "unloaded" and not self._make_room():
                    await self._change()
                if model.state == "unloaded":
                    self._begin_load(model)
            while model.state == "loading":
                await self._change()
            if model.failed:
                raise RefusedError(500, "server_error", f"model name={name} failed to load")
        model.requests += 1
        model.used = self.requests
        return model

    # Models.

    def _make_room(self) -> bool:
        """Whether one more model may be loaded, after unloading an idle one if need be."""
        running = [model for model in self.models.values() if model.state != "unloaded"]
        if not self.models_max or len(running) < self.models_max:
            return True
        idle = [model for model in running if model.state == "loaded" and not model.requests]
        if not idle:
            return False
        oldest = min(idle, key=lambda model: model.used)
        oldest.node.slots.clear_prompts()
        self._set_state(oldest, "unloaded")
        return True

    def _load_now(self, name: str) -> None:
        model = self.models.get(name)
        if model is None:
            raise RefusedError(404, "not_found_error", "File Not Found")
        if model.state != "unloaded":
            raise bad_request("model is already running")
        if not self._make_room():
            message = "model limit reached, try again later"
            raise RefusedError(500, "server_error", message)
        self._begin_load(model)

    def _begin_load(self, model: RoutedModel) -> None:
        self._set_state(model, "loading")
        self._begin(self._load(model))

    async def _load(self, model: RoutedModel) -> None:
        await asyncio.sleep(self.load_seconds)
        model.node.active_at = self.clock()
        self._set_state(
            model, "loaded" if model.readable else "unloaded", failed=not model.readable
        )

    async def _unload(self, model: RoutedModel) -> None:
        """Unloads a model once it is idle; one that takes too long is killed."""
        try:
            async with asyncio.timeout(UNLOAD_GRACE):
                while model.requests:
                    await self._change()
        except TimeoutError:
            await self.kill_model(model.node.model)
        else:
            await model.node.kill()
            self._set_state(model, "unloaded")

    def _set_state(
        self,
        model: RoutedModel,
        state: Literal["unloaded", "loading", "loaded"],
        *,
        failed: bool = False,
    ) -> None:
        model.state, model.failed = state, failed
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Waits until a model's state or its requests have changed."""
        await self._changed.wait()
