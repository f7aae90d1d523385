"""An emulated llama.cpp server: listener, routes, counters, start and stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from socket import socket
from typing import Any, Self

from gateway.local.server import claim_port, claimed_port
from tests.emulator import embeddings, info_endpoints
from tests.emulator.apis import to_json
from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.faults import FaultPlan
from tests.emulator.faulty_response import FaultyResponse
from tests.emulator.generation import Compute, Engine
from tests.emulator.prompt_cache import PromptCache
from tests.emulator.request_body import ApiName, RefusedError, read_generation_request, read_json
from tests.emulator.response import JSON, ClientGoneError, ProxiedResponse, Response
from tests.emulator.slot_files import SlotFile, slot_action
from tests.emulator.slots import SlotPool
from tests.virtual import now

_APIS: dict[str, ApiName] = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completions",
    "/completions": "completions",
    "/completion": "native",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
_EMBEDDINGS = {"/v1/embeddings", "/embeddings", "/embedding"}
_RERANKS = {"/v1/rerank", "/rerank", "/v1/reranking", "/reranking"}
_TRANSCRIPTIONS = "/v1/audio/transcriptions"
TAG_HEADER = "x-tag"  # requests with this header are counted by its value (`Engine.tallies`)
SLOT_PATHS = {*_APIS, *_EMBEDDINGS, *_RERANKS, "/infill", _TRANSCRIPTIONS}


def _marker() -> str:
    return f"<__media_{secrets.token_urlsafe(24)}__>"


class EmulatedNode:
    """A llama.cpp server that can misbehave.

    `async with EmulatedNode(slots=2) as node:` listens at `node.url`. Speeds are in tokens/s and
    infinite by default, times in seconds. `node.faults` switches faults; `kill()`, `revive()`,
    `refuse()` and `accept()` stop and restart the whole server on the same port.

    By default each request has these speeds to itself and nothing is cached. With `prefill_stalls`
    all slots share one computation (`Compute`), where each further slot adds `decode_step`
    seconds to a token. With `cache_ram` prompts are cached (`prompt_cache.py`), and up to
    `cache_ram` tokens of evicted ones stay in host memory. `answer_tokens` may depend on a prompt.

    `unified`, as without `--parallel`: each slot says that it has `context` tokens, and all share
    them. After `sleep_idle_seconds` without work the model is unloaded; the next request loads it
    again, in `load_seconds`. `slot_files` holds the prompts that its slots save.
    """

    def __init__(
        self,
        *,
        slots: int = 2,
        context: int = 4096,
        context_train: int = 8192,
        unified: bool = False,
        model: str = "demo",
        model_bytes: int = info_endpoints.MODEL_SIZE,
        aliases: tuple[str, ...] = (),
        prefill_tps: float = inf,
        decode_tps: float = inf,
        answer_tokens: int | Callable[[str], int] = 32,
        batch: int = 256,
        prefill_stalls: bool = False,
        decode_step: float = 0.0,
        cache_ram: int | None = None,
        ping_interval: float = 30.0,
        embeddings: bool = False,
        rerank: bool = False,
        infill: bool = False,
        vision: bool = False,
        audio: bool = False,
        slot_files: dict[str, SlotFile] | None = None,
        sleep_idle_seconds: float = inf,
        load_seconds: float = 0.0,
        endpoint_slots: bool = True,
        progress: bool = True,
        api_key: str | None = None,
        build: str = "b0-unknown",
        keepalive_seconds: float = 5.0,
        keepalive_requests: int = 100,
        close_after_stream: bool = True,
        remember: int = 100,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = now,
    ) -> None:
        # A real server sorts them too: the first one of the alphabet is the model's id.
        names = sorted({model, *aliases})
        self.aliases = names[1:]
        cache = None if cache_ram is None else PromptCache(cache_ram)
        self.slots = SlotPool(slots, cache, context if unified else None)
        compute = Compute(prefill_tps, decode_tps, decode_step, batch, clock)
        self.engine = Engine(
            pool=self.slots,
            model=names[0],
            context=context,
            prefill_tps=prefill_tps,
            decode_tps=decode_tps,
            answer_tokens=answer_tokens,
            batch=batch,
            compute=compute if prefill_stalls else None,
            ping_interval=ping_interval,
            clock=clock,
        )
        self.context_train = context_train
        self.model_bytes = model_bytes
        self.unified = unified
        self.slot_files = slot_files  # the folder of `--slot-save-path`
        self.clock = clock
        self.sleep_idle_seconds = sleep_idle_seconds
        self.load_seconds = load_seconds
        self.woken = asyncio.Event()  # set when a request wakes it
        self.loaded_at = clock()  # when it has loaded its model again, after a sleep
        self.active_at = clock()  # when the last request ended that keeps it awake
        self.embeddings = embeddings
        self.rerank = rerank
        self.infill = infill
        self.vision = vision
        self.audio = audio
        self.endpoint_slots = endpoint_slots
        self.progress = progress  # whether it knows `return_progress`
        self.api_key = api_key
        self.build = build
        self.keepalive_seconds = keepalive_seconds
        self.keepalive_requests = keepalive_requests
        self.close_after_stream = close_after_stream
        self.host = host
        self.port = port
        self.faults = FaultPlan()
        self.response_class = Response
        self.loading = False  # 503 on every path
        self.marker = _marker()  # which each process chooses anew
        self.requests = 0  # that need a slot
        self.control_requests = 0
        self.connections_opened = 0
        self.seen: deque[ReceivedRequest] = deque(maxlen=remember)  # those that need a slot
        self.failures: list[Exception] = []  # of the emulator itself
        self.started = int(time.time())
        self.open_connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._claim: socket | None = None
        """Keeps the port while the node does not listen, so that no other socket gets it."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def model(self) -> str:
        return self.engine.model

    @property
    def weights(self) -> str:
        """What tells its model's file from others."""
        return f"{self.model} {self.model_bytes}"

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def sleeping(self) -> bool:
        """Whether it has unloaded its model, since nothing was asked of it."""
        idle = self.clock() - self.active_at
        waking = self.clock() < self.loaded_at
        return not (self.busy or self.queued or waking) and idle >= self.sleep_idle_seconds

    def _waits_for_model(self, path: str) -> bool:
        """Whether this is answered when the model is loaded: a sleeper says at once that it is
        awake, and then even its metrics wait."""
        if path.startswith("/slots/"):
            return True
        if self.clock() < self.loaded_at:
            return path == "/metrics" or path in info_endpoints.WAKING
        return self.sleeping and path in info_endpoints.WAKING

    @property
    def busy(self) -> int:
        return self.slots.busy

    @property
    def peak_busy(self) -> int:
        return self.slots.peak_busy

    @property
    def queued(self) -> int:
        """Requests that wait in the node for a slot."""
        return len(self.slots.waiting)

    @property
    def connections(self) -> int:
        return len(self.open_connections)

    # Start and stop.

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()
        if self._claim is not None:
            self._claim.close()
        if self.failures:
            raise ExceptionGroup("the emulator failed", self.failures)

    async def accept(self) -> None:
        """Listens, on the same port as before."""
        if self._server is not None:
            return
        if not self.port:
            self._claim = claim_port(self.host)
            self.port = claimed_port(self._claim)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self),
            self.host,
            self.port,
            backlog=4096,
            reuse_port=self._claim is not None,
        )

    async def refuse(self) -> None:
        """Refuses new connections; open ones stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def kill(self) -> None:
        """Ends as by kill -9: refuses, resets every connection, drops all work and caches."""
        await self.refuse()
        for connection in list(self.open_connections):
            connection.reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.engine.compute is not None:
            self.engine.compute.close()
        self.slots.clear_prompts()
        await self.until(lambda: not self.open_connections)

    async def revive(self, *, loading: bool = False) -> None:
        """Listens again on the same port with empty slots; `loading`: answers 503 until unset."""
        self.loading = loading
        self.marker = _marker()
        await self.accept()

    async def until(self, condition: Callable[[], bool], limit: float = 30.0) -> None:
        """Waits until a condition holds; raises TimeoutError after `limit` seconds."""
        async with asyncio.timeout(limit):
            while not condition():  # noqa: ASYNC110  # any condition of a test, over many objects
                await asyncio.sleep(0.001)

    # What a connection calls.

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        needs_slot = request.path in SLOT_PATHS
        is_question = request.body == b"{}"  # refused at once, without a slot
        if needs_slot and not is_question:
            self.requests += 1
            self.seen.append(request)
        else:
            self.control_requests += 1
        tag = request.headers.get(TAG_HEADER)
        control = is_question or not needs_slot
        fault = self.faults and self.faults.take(
            request.path, control=control, reused=request.reused, tag=tag
        )
        how = {
            "closing": not request.keep_alive or connection.served >= self.keepalive_requests,
            "closes_streams": self.close_after_stream,
        }
        if fault:
            response: Response = FaultyResponse(connection, fault, self.faults, **how)
        else:
            response = self.response_class(connection, **how)
        connection.response = response
        if fault or needs_slot or self._waits_for_model(request.path):
            connection.task = self._begin(self._serve(connection, request, response))
            return
        try:
            response.write_plain(*self._info_response(request))
        except RefusedError as refused:
            response.write_plain(refused.status, to_json(refused.value))
        connection.finished(response)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        try:
            await self._respond(request, response)
        except (ClientGoneError, asyncio.CancelledError):
            response.closing = True
            if isinstance(response, ProxiedResponse):
                await response.break_off()
        except Exception as error:  # noqa: BLE001  # raised when the node ends
            self.failures.append(error)
            connection.reset()
        finally:
            if request.path in SLOT_PATHS:
                self.active_at = self.clock()
            connection.finished(response)

    async def _respond(self, request: ReceivedRequest, response: Response) -> None:
        if isinstance(response, FaultyResponse) and await response.replace_response():
            return
        try:
            if request.path in SLOT_PATHS:
                await self._do_work(request, response)
            else:
                if self._waits_for_model(request.path):
                    self._check_key(request)
                    await self._wake()
                if request.method == "POST" and request.path.startswith("/slots/"):
                    given = read_json(request.body)
                    value = await slot_action(self, request.path, request.query, given)
                    await response.plain(200, to_json(value))
                    return
                await response.plain(*self._info_response(request))
        except RefusedError as refused:
            await response.plain(refused.status, to_json(refused.value))

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        """Status, body and content type of a response that needs no slot."""
        self._check_key(request)
        path = request.path
        kind = JSON
        if path == "/slots":
            self.active_at = self.clock()  # others of `WAKING` keep nothing awake
        if request.method == "GET":
            if path == "/metrics":
                return 200, info_endpoints.metrics(self).encode(), "text/plain; version=0.0.4"
            if path in info_endpoints.GETS:
                return 200, to_json(info_endpoints.GETS[path](self, request.query)), kind
        elif request.method == "POST" and path in info_endpoints.POSTS:
            return 200, to_json(info_endpoints.POSTS[path](read_json(request.body))), kind
        raise RefusedError(404, "not_found_error", "File Not Found")

    async def _do_work(self, request: ReceivedRequest, response: Response) -> None:
        self._check_key(request)
        path = request.path
        if request.method != "POST":
            raise RefusedError(404, "not_found_error", "File Not Found")
        self._check_supported(path)
        await self._wake()
        if path == _TRANSCRIPTIONS:
            # In the form of the real server's answer.
            await response.plain(200, to_json({"type": "transcript.text.done", "text": "heard"}))
            return
        body = read_json(request.body)
        if path in _EMBEDDINGS:
            native = path == "/embedding"
            value: Any = await embeddings.embeddings(self.engine, body, native=native)
            await response.plain(200, to_json(value))
            return
        if path in _RERANKS:
            await response.plain(200, to_json(await embeddings.rerank(self.engine, body)))
            return
        if not self.progress:
            body.pop("return_progress", None)
        if path == "/infill":
            body["prompt"] = f"{body.get('input_prefix', '')}{body.get('input_suffix', '')}"
        api = _APIS.get(path, "native")
        generation = read_generation_request(api, body, len(self.slots.slots))
        tag = request.headers.get(TAG_HEADER)
        tally = None if tag is None else self.engine.tally(tag)
        await self.engine.generate(generation, response, tally)

    async def _wake(self) -> None:
        if self.sleeping:
            self.slots.clear_prompts()
            self.woken.set()
            self.loaded_at = self.clock() + self.load_seconds
        await asyncio.sleep(max(0.0, self.loaded_at - self.clock()))
        self.active_at = self.clock()

    def _check_key(self, request: ReceivedRequest) -> None:
        if self.loading:
            raise RefusedError(503, "unavailable_error", "Loading model")
        if self.api_key is None or request.path in info_endpoints.PUBLIC:
            return
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key not in {key, request.headers.get("x-api-key")}:
            raise RefusedError(401, "authentication_error", "Invalid API Key")

    def _check_supported(self, path: str) -> None:
        if path in _EMBEDDINGS and not self.embeddings:
            message = "This server does not support embeddings. Start it with `--embeddings`"
        elif path in _RERANKS and not self.rerank:
            message = "This server does not support reranking. Start it with `--reranking`"
        elif path == _TRANSCRIPTIONS and not self.audio:
            message = "The current model does not support audio input."
        elif path == "/infill" and not self.infill:
            parts = ("prefix", "suffix", "middle")
            missing = "".join(f"{part} token is missing. " for part in parts)
            message = f"Infill is not supported by this model: {missing}"
        else:
            return
        raise RefusedError(501, "not_supported_error", message)
