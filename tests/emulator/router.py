"""An emulated router: `llama-server --models-dir`, which runs a server for each model in use.

    async with EmulatedRouter(["one", "other"], models_max=1, load_seconds=2) as router:
        ...                                     # send requests that name a model to router.url
        assert router.models["one"].node.requests == 1

    big = ModelFile(memory=40 << 30, load_seconds=20)
    async with EmulatedRouter({"big": big}, models_max=0, memory=HostMemory(64 << 30)) as router:
        ...

Beyond `models_max` a request waits until a model is idle, which is then unloaded: the one that was
used least recently. Beyond `memory`, which routers may share, the server that loads is killed. The
node of each model has counters and faults of its own, and `kill_model`, `failing_loads`, `add` and
`remove` do what happens to real ones. `/models/sse` tells its followers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

from tests.emulator import info_endpoints
from tests.emulator.apis import data_event, to_json
from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.node import SLOT_PATHS, EmulatedNode
from tests.emulator.request_body import RefusedError, bad_request, read_json
from tests.emulator.response import JSON, ProxiedResponse, Response
from tests.emulator.routed_model import HostMemory, ModelFile, ModelState, RoutedModel

UNLOAD_GRACE = 10.0
"""Seconds after which a model that is to be unloaded is killed, with its requests."""
END_SECONDS = 0.05  # seconds that a server takes to end
READING = 0.8  # the share of a load in which the file is read; the rest is told by no progress
STEPS = 4  # progress events of a load after the first

Refusal = Literal["unnamed", "unknown", "failed"]
R = TypeVar("R", bound=Response)
_OF_A_MODEL = {*SLOT_PATHS, *info_endpoints.POSTS, "/slots", "/metrics"}


class EmulatedRouter(EmulatedNode):
    """A router of `models`; `unreadable` ones fail to load. `options` are those of their nodes."""

    proxied_class = ProxiedResponse

    def __init__(
        self,
        models: Iterable[str] | Mapping[str, ModelFile],
        *,
        unreadable: Iterable[str] = (),
        models_max: int = 4,
        load_seconds: float = 0.0,
        memory: HostMemory | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(port=port, load_seconds=load_seconds)
        self.models_max = models_max
        self.memory = memory
        self.models: dict[str, RoutedModel] = {}  # that it knows of
        self.folder: dict[str, ModelFile] = {}  # that there are
        self._options = options
        self._followers: set[asyncio.Queue[bytes]] = set()
        self._changed = asyncio.Event()
        self._queue = asyncio.Lock()  # of the requests for models that are not loaded
        files = models if isinstance(models, Mapping) else dict.fromkeys(models, ModelFile())
        for name, file in [*files.items(), *((n, ModelFile(readable=False)) for n in unreadable)]:
            self.add(name, file)
        self._read_folder()

    async def kill(self) -> None:
        await super().kill()
        for model in self.models.values():
            await model.node.kill()
            self.failures += model.node.failures
            self._set_state(model, "unloaded")
        self._read_folder()

    async def kill_model(self, name: str) -> None:
        """Ends the server of a model as by kill -9, with its requests, if it runs."""
        model = self.models[name]
        if model.state == "unloaded":
            return
        if model.loading is not None and not model.loading.done():
            model.loading.cancel()
            with suppress(asyncio.CancelledError):
                await model.loading
        await model.node.kill()
        self._set_state(model, "unloaded", exit_code=1)

    def kill_model_after(self, name: str, tokens: int) -> None:
        """Kills the server of a model once it has generated so many more tokens."""
        node = self.models[name].node
        until = node.engine.tokens + tokens

        async def kill() -> None:
            await node.until(lambda: node.engine.tokens >= until, limit=3600)
            await self.kill_model(name)

        self._begin(kill())

    def add(self, name: str, file: ModelFile | None = None) -> None:
        """Puts a file into the folder, which is read at the start and by `?reload=1`."""
        self.folder[name] = file or ModelFile()

    def remove(self, name: str) -> None:
        """Takes a file out of the folder; its model stays until the folder is read."""
        del self.folder[name]

    # What a connection calls.

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        query = parse_qs(request.query)
        if self._is_routed(request.path, query):
            work = self._route
        elif (request.method, request.path) == ("GET", "/models/sse"):
            work = self._follow
        elif request.path in {"/v1/models", "/models"} and query.get("reload") == ["1"]:
            work = self._reload
        else:
            super().handle(connection, request)
            return
        response = self._open(connection, request, Response)
        response.interruptible = work == self._follow
        connection.task = self._begin(work(connection, request, response))

    def _is_routed(self, path: str, query: Mapping[str, list[str]]) -> bool:
        """Whether a request is answered by the server of the model that it names."""
        of_a_model = path in _OF_A_MODEL or path.startswith("/slots/")
        return of_a_model or (path == "/props" and "model" in query)

    def _open(self, connection: Connection, request: ReceivedRequest, kind: type[R]) -> R:
        response = kind(connection, closing=not request.keep_alive, closes_streams=False)
        connection.response = response
        return response

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        match request.method, request.path:
            case "GET", "/props":
                return 200, to_json(self._props()), JSON
            case "GET", "/v1/models" | "/models":
                return 200, self._list(), JSON
            case "POST", "/models/load" | "/models/unload":
                name = read_json(request.body).get("model")
                if not isinstance(name, str):
                    raise RefusedError(404, "not_found_error", "File Not Found")
                if request.path == "/models/load":
                    self._load_now(name)
                else:
                    self._unload_now(name)
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

    def _list(self) -> bytes:
        data = [model.as_json() for _, model in sorted(self.models.items())]
        return to_json({"data": data, "object": "list"})

    def _find(self, name: str) -> RoutedModel | None:
        if name in self.models:
            return self.models[name]
        return next((m for m in self.models.values() if name in m.node.aliases), None)

    # Requests for a model.

    async def _route(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        try:
            model = await self._loaded_model(request)
        except RefusedError as refused:
            self._write_refusal(response, refused)
        except ConnectionRefusedError:
            response = proxied = self._open(connection, request, ProxiedResponse)
            proxied.fail("Could not establish connection")
        except BlockingIOError:
            response = self._open(connection, request, ProxiedResponse)
            loading = RefusedError(503, "unavailable_error", "Loading model")
            response.write_plain(loading.status, to_json(loading.value))
        else:
            model.running.add(connection)
            try:
                model.node.handle(connection, request)
                if (answering := connection.task) is not None:
                    await asyncio.wait({answering})
            finally:
                model.running.discard(connection)
                self._notify()
            return
        connection.finished(response)

    async def _loaded_model(self, request: ReceivedRequest) -> RoutedModel:
        """The model that a request names, once it is loaded; the request counts as one of it.

        A request that must not load it raises BlockingIOError while the model's server loads, and
        ConnectionRefusedError where there is none.
        """
        query = parse_qs(request.query)
        name = _model_of(request) if request.method == "POST" else query.get("model", [None])[0]
        if not name:
            raise self._refusal("unnamed", "")
        model = self._find(str(name))
        if model is None:
            raise self._refusal("unknown", str(name))
        if query.get("autoload") == ["false"] and not model.ready:
            if model.state == "unloaded":
                raise bad_request("model is not loaded")
            raise BlockingIOError if model.listening else ConnectionRefusedError
        self.requests += 1
        while not model.ready:
            async with self._queue:
                while model.state == "unloaded" and not self._make_room():
                    await self._change()
                if model.state == "unloaded":
                    self._begin_load(model)
            was_loading = model.state == "loading"
            while model.state == "loading" or model.ending:
                await self._change()
            if was_loading and model.failed:
                raise self._refusal("failed", model.name)
        model.used = self.requests
        return model

    def _refusal(self, why: Refusal, name: str) -> RefusedError:
        if why == "failed":
            return RefusedError(500, "server_error", f"model name={name} failed to load")
        if why == "unknown":
            return bad_request(f"model '{name}' not found")
        return bad_request("model name is missing from the request")

    def _write_refusal(self, response: Response, refused: RefusedError) -> None:
        response.write_plain(refused.status, to_json(refused.value))

    # Models.

    def _make_room(self) -> bool:
        """Whether one more model may be loaded, after unloading an idle one if need be."""
        running = [model for model in self.models.values() if model.state != "unloaded"]
        if not self.models_max or len(running) < self.models_max:
            return True
        idle = [model for model in running if model.ready and not model.requests]
        if not idle:
            return False
        oldest = min(idle, key=lambda model: model.used)
        oldest.node.slots.clear_prompts()
        self._set_state(oldest, "unloaded", exit_code=0)
        return True

    def _load_now(self, name: str) -> None:
        model = self._find(name)
        if model is None:
            raise RefusedError(404, "not_found_error", "File Not Found")
        if model.state != "unloaded":
            raise bad_request("model is already running")
        if not self._make_room():
            message = "model limit reached, try again later"
            raise RefusedError(500, "server_error", message)
        self._begin_load(model)

    def _begin_load(self, model: RoutedModel) -> None:
        model.loads += 1
        self._set_state(model, "loading")
        self._publish(model.name, "model_status", data={"status": "loading"})
        model.loading = self._begin(self._load(model))

    async def _load(self, model: RoutedModel) -> None:
        begun, seconds = self.clock(), model.load_seconds

        async def until(share: float) -> None:
            """Waits for this share of the load. RuntimeError when the server dies before."""
            await asyncio.sleep(max(0.0, begun + min(share, lives) * seconds - self.clock()))
            if share >= lives:
                raise RuntimeError

        lives = self._life(model)  # the share of the load that the server sees
        model.listening = True
        try:
            for step in range(STEPS + 1):
                await until(READING * step / STEPS)
                self._publish_progress(model, step / STEPS)
            await until(1.0)
        except RuntimeError:
            self._set_state(model, "unloaded", exit_code=1)
            return
        model.node.active_at = self.clock()
        self._set_state(model, "loaded")
        info = info_endpoints.models(model.node, "")["data"][0]
        self._publish_status(model, status="loaded", info=info)
        if model.node.sleep_idle_seconds < inf:
            model.watch = self._begin(self._watch_sleep(model))

    def _life(self, model: RoutedModel) -> float:
        """The share of its load after which the server of a model dies; infinite if it doesn't."""
        lives = inf
        if self.memory is not None and model.memory:
            taken = self.memory.take(model, model.memory)
            lives = inf if taken == model.memory else taken / model.memory
        if model.failing_loads:
            model.failing_loads -= 1
            lives = min(lives, READING / 2)
        return lives if model.file.readable else 1e-3

    async def _watch_sleep(self, model: RoutedModel) -> None:
        node = model.node
        while True:
            while not node.sleeping:
                left = node.active_at + node.sleep_idle_seconds - self.clock()
                await asyncio.sleep(left if left > 0 else node.sleep_idle_seconds / 10)
            self._publish_status(model, status="sleeping")
            node.woken.clear()
            await node.woken.wait()
            self._publish_progress(model, 0.0)
            await asyncio.sleep(max(0.0, node.loaded_at - self.clock()))
            self._publish_progress(model, 1.0)
            self._publish_status(model, status="loaded")

    def _unload_now(self, name: str) -> None:
        model = self._find(name)
        if model is None:
            raise bad_request("model is not found")
        if model.state == "unloaded":
            raise bad_request("model is not running")
        if model.state == "loading":
            self._begin(self.kill_model(model.name))
        elif not model.ending:
            model.ending = True
            self._begin(self._unload(model))

    async def _unload(self, model: RoutedModel) -> None:
        """Ends the server of a model. Requests that run get nothing more until it is killed: a real
        one breaks off some streams at once.
        """
        await asyncio.sleep(0)  # so that what came before has begun
        hangs = bool(model.running)
        for connection in model.running:
            if connection.task is not None and isinstance(connection.response, ProxiedResponse):
                connection.response.mute = True
                connection.task.cancel()
        await asyncio.sleep(UNLOAD_GRACE if hangs else END_SECONDS)
        await model.node.kill()
        self._set_state(model, "unloaded", exit_code=int(hangs))

    def _read_folder(self) -> None:
        for name in sorted(self.models.keys() - self.folder.keys()):
            del self.models[name]
        for name in sorted(self.folder.keys() - self.models.keys()):
            file = self.folder[name]
            seconds = self.load_seconds if file.load_seconds is None else file.load_seconds
            options = {"model_bytes": file.size, "load_seconds": seconds, **self._options}
            node = EmulatedNode(model=name, **(options | dict(file.options)))
            node.response_class = self.proxied_class
            self.models[name] = RoutedModel(file, node, seconds)

    async def _reload(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        """Reads the folder again, once the models that are gone have ended."""
        for name in sorted(self.models.keys() - self.folder.keys()):
            model = self.models[name]
            with suppress(RefusedError):
                self._unload_now(name)
            while model.state != "unloaded":
                await self._change()
        self._read_folder()
        for model in self.models.values():
            model.failed = False
        self._publish("*", "models_reload")
        response.write_plain(200, self._list())
        connection.finished(response)

    def _set_state(
        self, model: RoutedModel, state: ModelState, *, exit_code: int | None = None
    ) -> None:
        model.state, model.failed = state, bool(exit_code)
        model.ending = model.listening = False
        if state == "unloaded":
            if model.watch is not None:
                model.watch.cancel()
            if self.memory is not None:
                self.memory.free(model)
            if exit_code is not None:
                self._publish_status(model, status="unloaded", exit_code=exit_code)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    # Events.

    async def _follow(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._followers.add(queue)
        try:
            await response.open_stream()
            while True:
                await response.events([await queue.get()])
        finally:
            self._followers.discard(queue)
            connection.finished(response)

    def _publish_progress(self, model: RoutedModel, value: float) -> None:
        progress = {"stages": ["text_model"], "current": "text_model", "value": value}
        self._publish_status(model, status="loading", progress=progress)

    def _publish_status(self, model: RoutedModel, **data: Any) -> None:
        self._publish(model.name, "status_change", data=data)

    def _publish(self, name: str, event: str, **more: Any) -> None:
        for queue in self._followers:
            queue.put_nowait(data_event({"model": name, "event": event, **more}))


def _model_of(request: ReceivedRequest) -> Any:
    """The model that a body names, as JSON or in a form."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        _, _, rest = request.body.partition(b'name="model"')
        return rest.partition(b"\r\n\r\n")[2].partition(b"\r\n")[0].decode()
    return read_json(request.body).get("model")
