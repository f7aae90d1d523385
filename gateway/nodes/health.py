"""Watches one node: probes it over HTTP when due, and judges its state from all that is known."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

from gateway.nodes.lifecycle import (
    QUICK_PROBE_DELAY,
    WAKE_SLACK,
    LifecyclePhase,
    ProbeAnswer,
    ProbeResult,
    probe_delay,
    read_is_sleeping,
)
from gateway.nodes.node import Lease, LeasePhase, Node, NodeState
from gateway.nodes.router import (
    LARGEST_RUNNING,
    RUNNING_PATHS,
    EventLines,
    LoadPhase,
    ModelLoad,
    RoutedModel,
    read_endpoint,
    read_list,
    read_running,
)
from gateway.nodes.server_properties import (
    LONGEST_PROPERTY,
    UNREADABLE,
    Purpose,
    count_processing,
    count_slots,
    parse_models,
    parse_props,
)
from gateway.transport.connection import LoopTimeout
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    LocalResourcesExhausted,
    UpstreamError,
)

# Bytes; `/slots` of a server with many slots and `/props` with a long template are far smaller.
LARGEST_RESPONSE = 4 << 20
LARGEST_REFUSAL = 64 * 1024  # bytes of the answer to an empty request
NOT_FOUND_STATUSES = frozenset({404, 405, 501})
KEY_REJECTED_STATUSES = frozenset({401, 403})
# Seconds after which a node is tried again with endpoints that it refused with 501.
RETRY_REFUSED_AFTER = 300.0
_HEADER_LINES = b"accept: */*\r\naccept-encoding: identity\r\nuser-agent: llama-gateway\r\n"
_POST_HEADER_LINES = _HEADER_LINES + b"content-type: application/json\r\n"
_ENCODING = b"content-encoding"
NAME_MODEL_HINT = "say in the inventory what it serves (model: ...)"


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """A status and a whole body."""

    status: int
    body: bytes

    def json(self) -> object:
        """The body's value; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except UNREADABLE:
            return None

    def error_words(self) -> str | None:
        """The server's own words about an error, on one line; None: there are none."""
        answer = self.json()
        error = answer.get("error") if isinstance(answer, dict) else None
        words = error.get("message") if isinstance(error, dict) else None
        return " ".join(words.split())[:LONGEST_PROPERTY] if isinstance(words, str) else None


async def fetch(
    node: Node,
    path: str,
    *,
    body: bytes | None = None,
    largest: int = LARGEST_RESPONSE,
    limit: float = 0.0,
) -> ProbeResponse | ProbeResult:
    """GET `path`, or POST `body`, limited in time and bytes; a ProbeResult if that failed.

    `limit` in seconds; 0: as probes are.
    """
    limit, pool = limit or node.settings.health.timeout, node.upstream
    target = node.info.target(path, "" if body else node.spec.instance or "")
    if body is None:
        head = pool.address.request_head(b"GET", target, _HEADER_LINES)
    else:
        head = pool.address.request_head(b"POST", target, _POST_HEADER_LINES, len(body))
    try:
        async with (
            LoopTimeout(limit),
            pool.response(head, body or b"", connect_timeout=limit) as connection,
        ):
            encodings = {value.lower() for name, value in connection.headers if name == _ENCODING}
            # A compressed body of some bytes may have millions; none was asked for.
            if not encodings <= {b"", b"identity"}:
                detail = f"{path} is compressed, though asked not to be"
                return ProbeResult(ProbeAnswer.FAILED, detail)
            found = bytearray()
            while part := await connection.read():
                found += part
                if len(found) > largest:
                    return ProbeResult(ProbeAnswer.FAILED, f"{path} answers without end")
            return ProbeResponse(connection.status, bytes(found))
    except (TimeoutError, ConnectTimedOut):
        answer, detail = ProbeAnswer.TIMED_OUT, f"no answer to {path} within {limit:g} s"
        # A TLS server does not leave plain HTTP waiting, as a plain one does with a handshake.
        detail += "" if pool.address.tls is None else _scheme_hint(node)
    except ConnectFailed as error:
        answer = ProbeAnswer.CONNECTION_REFUSED
        detail = f"no connection to {node.spec.url} ({_why_not(error)})"
    except Exception as error:  # noqa: BLE001 - no error of one node may stop the watch of others
        is_ours = isinstance(error, LocalResourcesExhausted)
        answer = ProbeAnswer.TIMED_OUT if is_ours else ProbeAnswer.FAILED
        detail = f"{path} could not be requested ({error_line(error)})"
        if isinstance(error, UpstreamError) and not is_ours:
            detail = f"{path} broke off ({error_line(error)}){_scheme_hint(node)}"
    return ProbeResult(answer, detail)


async def check_alive(node: Node) -> ProbeResult:
    """Whether the node can take work, by its cheapest endpoint."""
    if node.spec.kind == "openai":
        return await discover(node)
    reply = await fetch(node, "/health")
    if isinstance(reply, ProbeResult):
        return reply
    return _judge(node, "/health", reply.status, reply.body)


async def discover(node: Node) -> ProbeResult:
    """Read the server's properties into `node.properties`; UP even if some could not be read."""
    properties = node.properties
    paths = ["/v1/models"] if node.spec.kind == "openai" else ["/v1/models", "/props"]
    if node.router is not None:
        paths = ["/props"]  # The router's list was read already.
    before = properties.version_key()
    for path in paths:
        reply = await fetch(node, path)
        if isinstance(reply, ProbeResult):
            return reply
        judged = _judge(node, path, reply.status)
        if not judged.up:
            return judged
        if reply.status == HTTPStatus.OK:
            properties.clear_remembered()
            if path == "/props":
                node.probe_history.props_read(_note_sleep(node, reply.body))
                properties.read_props(parse_props(reply.body))
            else:
                properties.read_models(parse_models(reply.body))
    if (
        node.spec.kind == "llama.cpp"
        and not (properties.models or properties.is_router)
        and node.spec.models is None
    ):
        # A server from before 2024, which would always be ready and never get work.
        detail = f"its /v1/models and /props name no model: {NAME_MODEL_HINT}"
        return ProbeResult(ProbeAnswer.NO_MODEL, detail)
    long_ago = node.clock() >= node.endpoint_refused_at + RETRY_REFUSED_AFTER
    is_new = properties.version_key() != before or node.probe_history.discovered_at is None
    if long_ago or is_new:
        # Another build or model, or a new process, perhaps with other options: earlier refusals
        # prove nothing. Nor do they for ever.
        properties.refused.clear()
    is_unasked = not properties.purpose_asked or (is_new and properties.process is None)
    asks = node.spec.kind == "llama.cpp" and not properties.is_router
    if is_unasked and not node.sleep.sleeping and asks:
        purpose, hints = await _ask_purpose(node)
        properties.purpose_found(purpose)
        node.refusal_hints.update(hints)
    return ProbeResult(ProbeAnswer.UP, "")


async def _ask_purpose(node: Node) -> tuple[Purpose | None, dict[str, str]]:
    """What the server was started for, and its words about endpoints that it lacks.

    None: it did not answer.

    It says so nowhere, but checks whether it does embeddings and reranking (501) before the body
    (400). So an empty one is refused at once, also while it is busy, and takes no slot. Yet the
    question wakes a sleeping server, and begins its idle time anew: each process is asked once.
    Any other answer tells nothing: ik_llama.cpp's server checks the body alone and has no rerank
    (404), a proxy may pass one path only, and a router wants a model's name first.
    """
    purpose: Purpose = "chat"
    hints: dict[str, str] = {}
    questions: tuple[tuple[Purpose, bytes], ...] = (("embeddings", b"input"), ("rerank", b"query"))
    model = node.spec.instance
    body = b"{}" if model is None else msgspec.json.encode({"model": model})
    for endpoint, needed_field in questions:
        reply = await fetch(node, f"/v1/{endpoint}", body=body, largest=LARGEST_REFUSAL)
        if isinstance(reply, ProbeResult):
            return None, {}
        if reply.status == HTTPStatus.BAD_REQUEST and needed_field in reply.body:
            purpose = endpoint
        elif reply.status != HTTPStatus.NOT_IMPLEMENTED:
            return "unknown", {}
        elif words := reply.error_words():
            hints[endpoint] = words
    return purpose, hints


async def has_changed(node: Node) -> bool:
    """Whether `/props` is no longer what was read: perhaps another process, with another model.

    One small query tells, which is not decoded. A node that fails it counts as unchanged.
    """
    if node.probe_history.props_digest is None:
        return False
    reply = await fetch(node, "/props")
    if isinstance(reply, ProbeResult) or reply.status != HTTPStatus.OK:
        return False
    differs = node.probe_history.props_differ(_note_sleep(node, reply.body))
    if differs:
        node.sleep.restarted()
    return differs


def _note_sleep(node: Node, props: bytes) -> bytes:
    """Take in whether the server sleeps; returns the rest of its answer to `/props`."""
    asleep, rest = read_is_sleeping(props)
    node.sleep.props_read(asleep, node.clock(), asked=any(one.wake for one in node.leases))
    return rest


async def probe_slots(node: Node) -> tuple[int, ...] | None:
    """The tokens of each slot that the node reports as busy; None: unknown.

    Learns whether it has `/slots`. It wakes a server that sleeps, and begins the time anew of one
    that may fall asleep.
    """
    asked_at = node.slots_asked()
    return read_busy(node, "/slots", await fetch(node, "/slots"), asked_at)


def read_busy(
    node: Node, path: str, reply: ProbeResponse | ProbeResult, asked_at: float
) -> tuple[int, ...] | None:
    """As `probe_slots`, from the answer to `/slots`, or to `/metrics`, which knows no tokens."""
    if isinstance(reply, ProbeResult):
        if reply.answer is not ProbeAnswer.CONNECTION_REFUSED:
            return None
        # Without a process no slot is busy.
        node.slots_told(frozenset(), asked_at)
        return ()
    refused = reply.status in NOT_FOUND_STATUSES | KEY_REJECTED_STATUSES
    if path == "/metrics":
        busy = count_processing(reply.body) if reply.status == HTTPStatus.OK else None
        if refused or (busy is None and reply.status == HTTPStatus.OK):
            node.properties.path_refused(path)
        if busy == 0:
            node.slots_told(frozenset(), asked_at)
        return None if busy is None else (0,) * busy
    if refused:
        node.properties.path_refused(path)
    if reply.status != HTTPStatus.OK or (counts := count_slots(reply.body)) is None:
        return None
    node.properties.slots_reported(counts.total)
    node.slots_told(counts.tasks, asked_at)
    return counts.busy_tokens


def _judge(node: Node, path: str, status: int, body: bytes = b"") -> ProbeResult:
    """What a status, and the body of an error, on this path say of the node."""
    is_missing, is_locked = status in NOT_FOUND_STATUSES, status in KEY_REJECTED_STATUSES
    told = f"{path} answers {status}"
    if node.spec.kind == "openai":
        # Some services hide their list of models, even from keys that may use them.
        is_hidden = is_missing or (is_locked and node.spec.api_key is not None)
        may_lack, hint = is_hidden and node.spec.models is not None, NAME_MODEL_HINT
    else:
        may_lack = is_missing and path != "/health"
        hint = "is this a llama.cpp server? Another one needs kind: openai in the inventory"
    if status == HTTPStatus.OK or may_lack:
        return ProbeResult(ProbeAnswer.UP, "")
    if status == HTTPStatus.SERVICE_UNAVAILABLE and b"loading model" in body.lower():
        return ProbeResult(ProbeAnswer.LOADING, "the server is loading its model")
    if is_locked:
        return ProbeResult(ProbeAnswer.KEY_REJECTED, key_rejected_reason(path, status))
    if is_missing:
        told += f": {hint}"
    elif status == HTTPStatus.BAD_REQUEST:
        told += _scheme_hint(node)
    return ProbeResult(ProbeAnswer.FAILED, told)


def key_rejected_reason(path: str, status: int) -> str:
    """The reason, for an operator, when this status on this path means a wrong key."""
    return (
        f"it refuses our key ({status} on {path}): set api_key_env or api_key_file in the inventory"
    )


def _scheme_hint(node: Node) -> str:
    """What to write in the inventory if the node speaks the other scheme; nothing, if it was up."""
    if node.probe_history.up:
        return ""
    if node.upstream.address.tls is None:
        return ": if it speaks TLS, write https:// in its url"
    return ": if it speaks plain HTTP, write http:// in its url"


# By what OpenSSL says, the first that fits: what mends it.
_TLS_REMEDIES = (
    ("mismatch", "use a name of its certificate in the url, or give it in tls.server_name"),
    ("not valid for", "use a name of its certificate in the url, or give it in tls.server_name"),
    ("expired", "renew its certificate"),
    ("CERTIFICATE_VERIFY_FAILED", "tls.ca must name the authority behind its certificate"),
    ("CERTIFICATE_REQUIRED", "name a certificate of ours in tls.cert and tls.key"),
    ("HANDSHAKE_FAILURE", "if it wants a certificate of ours, name it in tls.cert and tls.key"),
    ("WRONG_VERSION_NUMBER", "write http:// in its url if it speaks plain HTTP"),
    ("RECORD_LAYER_FAILURE", "write http:// in its url if it speaks plain HTTP"),
    ("PACKET_LENGTH_TOO_LONG", "write http:// in its url if it speaks plain HTTP"),
)
_TLS_CODES = re.compile(r"\[SSL: \w+\] | \(_ssl.*")


def _why_not(error: Exception) -> str:
    """Why there is no connection; of TLS, with what mends it."""
    told = error_line(error)
    remedy = next((f": {remedy}" for sign, remedy in _TLS_REMEDIES if sign in told), "")
    return _TLS_CODES.sub("", told) + remedy


def error_line(error: Exception) -> str:
    """What went wrong, on one line."""
    return str(error).strip()[:200] or type(error).__name__


MOST_SLEEP = 3600.0
# Seconds between two readings of a router's list though its events come faster.
LIST_PAUSE = 0.1
# Seconds after which a router's events are asked for anew: a silent connection may be dead.
LONGEST_FOLLOW = 600.0
FOLDER_SECONDS = 10.0  # seconds between two readings of a router's folder, by itself
INSTANCES_AT_ONCE = 8  # models of one router that are asked for their slots at the same time


LARGE_LIST = 256 * 1024  # bytes from which on a router's list is read in a thread


@dataclass(eq=False)
class HealthMonitor:
    """Probes one node and keeps its state current, in a task of its own; a router with its models.

    `refresh_state` is called whenever the state may have changed, and `models_listed` with each
    list of a router. `gate` bounds how many nodes are probed at the same time. `fleet_works` tells
    whether any node has had work lately.
    """

    node: Node
    refresh_state: Callable[[Node], None]
    gate: asyncio.Semaphore
    rng: random.Random
    fleet_works: Callable[[], bool]
    models_listed: Callable[[Node, list[RoutedModel], float], None]
    _follower: asyncio.Task[None] | None = None
    _list_due: bool = False
    _folder_due_at: float = -math.inf
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"watch {self.node.name}")

    def cancel(self) -> asyncio.Task[None]:
        """Stop watching; the caller awaits the task."""
        self._task.cancel()
        return self._task

    def wake(self) -> None:
        """Check again what is due."""
        self._wake.set()

    def probe_soon(self) -> None:
        """A request has failed: do not wait for the next regular probe.

        The server may be another process by now, with another model.
        """
        history = self.node.probe_history
        history.rediscover()
        self.probe_by((history.last_probe_at or 0.0) + QUICK_PROBE_DELAY)

    def probe_by(self, at: float) -> None:
        """The next probe is due then at the latest."""
        if self.node.probe_history.probe_by(at):
            self._wake.set()

    def read_models(self) -> None:
        """Something may have changed about a router's models: read its list soon."""
        self._list_due = True
        self._wake.set()

    def reschedule(self) -> None:
        """The interval has changed: choose a random moment in it."""
        node, interval = self.node, self.node.settings.health.interval
        node.probe_history.probe_by(node.clock() + self.rng.uniform(0.0, interval))
        self._wake.set()

    async def probe(self) -> ProbeResult:
        """Probe now, and ask for the server's properties and refused endpoints anew."""
        async with self._probing:
            self.node.probe_history.rediscover()
            return await self._cycle()

    async def _run(self) -> None:
        node = self.node
        try:
            while True:
                if self._is_due():
                    async with self._probing, self.gate:
                        # An operator's probe may have come first.
                        if self._is_due():
                            await self._cycle()
                elif self._may_read_list():
                    self._list_due = False
                    async with self._probing, self.gate:
                        await self._read_models(ProbeResult(ProbeAnswer.UP, ""))
                    self._look_again()
                    await asyncio.sleep(LIST_PAUSE)
                self.refresh_state(node)
                now = node.clock()
                due = node.probe_history.next_probe_at if node.in_service else now + MOST_SLEEP
                due = min(due, node.next_change(now))
                for model in node.instances.values():
                    if model.load is not None and model.load.retry_due(now):
                        self.refresh_state(model)
                    due = min(due, model.next_change(now))
                wait = 0.0 if self._may_read_list() else max(0.0, due - now)
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
        finally:
            if self._follower is not None:
                self._follower.cancel()
                await asyncio.gather(self._follower, return_exceptions=True)

    def _may_read_list(self) -> bool:
        """Whether a router's list is to be read; while it is down the next probe does that."""
        return self._list_due and self.node.in_service and self.node.probe_history.up

    def _is_due(self) -> bool:
        return self.node.in_service and self.node.clock() >= self.node.probe_history.next_probe_at

    async def _cycle(self) -> ProbeResult:
        """Probe: is it alive, what are its properties if that is due, how busy are its slots."""
        node, history, health = self.node, self.node.probe_history, self.node.settings.health
        first = not history.probed
        history.probe_began(node.clock())
        result = await check_alive(node)
        comes_up = not history.up
        if result.up and (
            history.discovered_at is None
            or node.clock() - history.discovered_at >= health.discover_interval
            or await has_changed(node)
            or (node.is_purpose_unknown and not node.sleep.sleeping)
        ):
            # An `openai` node has just been asked for them. After most failures it gets work all
            # the same: `/health` shows that it lives, and the next probe asks again.
            found = result if node.spec.kind == "openai" else await discover(node)
            if found.up:
                history.discovered(node.clock())
            elif found.answer in {ProbeAnswer.KEY_REJECTED, ProbeAnswer.NO_MODEL}:
                result = found
        models = node.instances.values()
        if node.is_router:
            await self._probe_models(result)
        elif models:
            self.models_listed(node, [], node.clock())  # It is a plain server by now.
        waking = node.spec.kind == "llama.cpp" and any(
            one.sleep.waking_since is not None for one in (node, *models)
        )
        if result.up and comes_up:
            # Before it gets work, the load that other clients put on it must be known.
            await self._read_slots(node, comes_up=True)
        if count_result(node, result) and not first:
            node.calibration.server_started(node.requests)
        if not history.up:
            node.sleep.restarted()
        delay = probe_delay(health.interval, self.rng, first=first, unstable=history.unstable)
        history.schedule(node.clock() + delay)
        self.refresh_state(node)
        if result.up and not comes_up:
            await self._read_slots(node)
            self.refresh_state(node)
        if history.unread or waking:
            history.probe_by(node.clock() + QUICK_PROBE_DELAY)
        self._look_again()
        return result

    # A router's models.

    def _look_again(self) -> None:
        """Probe soon again if something about a router's models is to be found out."""
        node = self.node
        if any(
            one.load is not None and (one.load.unsettled or one.probe_history.unstable)
            for one in node.instances.values()
        ):
            node.probe_history.probe_by(node.clock() + QUICK_PROBE_DELAY)

    async def _probe_models(self, result: ProbeResult) -> None:
        """Bring a router's models up to date, after a probe of the router itself."""
        node = self.node
        if not result.up:
            self._record(node.instances.values(), result)
            if self._follower is not None and node.probe_history.down:
                self._follower.cancel()  # Nobody tells it that the machine is gone.
            return
        if node.spec.kind != "llama.cpp":
            await self._read_models(result)
            return
        now, path = node.clock(), "/v1/models"
        if now >= self._folder_due_at:
            # So it reads its folder again, the head of each file, and forgets which loads failed.
            # It ends a model whose file is gone, or whose preset has changed; streams are resumed.
            path += "?reload=1"
            self._folder_due_at = now + FOLDER_SECONDS
        await self._read_models(result, path)
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow(), name=f"follow {node.name}")

    async def _read_models(self, result: ProbeResult, path: str = "/v1/models") -> None:
        """Read a router's list, and ask those of its models that run."""
        node = self.node
        asked_at = node.clock()
        reply = await fetch(node, path)
        if isinstance(reply, ProbeResponse):
            body = reply.body if reply.status == HTTPStatus.OK else b""
            if node.spec.kind == "openai":
                listed, declared = parse_models(body), frozenset((node.spec.models or {}).values())
                # Where the list is hidden, there are those of the inventory.
                if listed is not None or (declared and _judge(node, "", reply.status).up):
                    running = await self._read_running()
                    self.models_listed(node, read_endpoint(listed, declared, running), asked_at)
            elif body:
                is_large = len(body) > LARGE_LIST
                models = await asyncio.to_thread(_read, body) if is_large else _read(body)
                if models is not None:
                    self.models_listed(node, models, asked_at)
        instances = node.instances.values()
        loaded = [one for one in instances if one.load is not None and one.load.loaded]
        self._record([one for one in instances if one not in loaded], result)
        at_once = asyncio.Semaphore(INSTANCES_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for one in loaded:
                tasks.create_task(self._probe_model(one, at_once, result))

    async def _read_running(self) -> dict[str, bool] | None:
        """What an endpoint that loads models by itself says that it holds; None: it does not."""
        node, record = self.node, self.node.router_record
        for path in record.running_paths if node.probe_history.up else RUNNING_PATHS:
            reply = await fetch(node, path, largest=LARGEST_RUNNING)
            if isinstance(reply, ProbeResult) or reply.status >= 500:
                return None  # It says nothing now.
            running = read_running(reply.json()) if reply.status == HTTPStatus.OK else None
            if running is not None:
                record.tells_running((path,))
                return running
        record.tells_running(())
        return None

    async def _probe_model(
        self, model: Node, at_once: asyncio.Semaphore, result: ProbeResult
    ) -> None:
        """Read what a loaded model's server says of itself, and how busy it is if it has work.

        `result`: of its router, whose children may hang by themselves.
        """
        (_, load), history = model.routed, model.probe_history
        async with at_once:
            reply = await fetch(model, "/props") if _may_hang(model, load) else None
            hangs = isinstance(reply, ProbeResult) and reply.answer is ProbeAnswer.TIMED_OUT
            self._record((model,), reply if isinstance(reply, ProbeResult) and hangs else result)
            if load.doubted:
                if not isinstance(reply, ProbeResponse) or reply.status != HTTPStatus.OK:
                    return
                load.doubt(doubted=False)
            if hangs:
                return
            is_read = model.spec.kind != "llama.cpp" or history.discovered_at is not None
            if not is_read and (await discover(model)).up:
                history.discovered(model.clock())
            if not model.removed:
                await self._read_slots(model)
                self.refresh_state(model)

    def _record(self, models: Iterable[Node], result: ProbeResult) -> None:
        for model in models:
            if count_result(model, result) or not result.up:
                self.refresh_state(model)

    async def _follow(self) -> None:
        """Follow a router's events, until they break off; the next probe begins anew."""
        node, lines = self.node, EventLines()
        pool, limit = node.upstream, node.settings.health.timeout
        head = pool.address.request_head(b"GET", b"/models/sse", _HEADER_LINES)
        try:
            async with (
                LoopTimeout(LONGEST_FOLLOW),
                pool.response(head, b"", connect_timeout=limit) as connection,
            ):
                if connection.status != HTTPStatus.OK:
                    if connection.status in NOT_FOUND_STATUSES:
                        node.router_record.following(None)
                    return
                node.router_record.following(node.clock())
                self.read_models()  # What has changed before it listened.
                while part := await connection.read():
                    for event in lines.add(part):
                        model = node.instances.get(event.model or "")
                        if event.progress is None or model is None or model.load is None:
                            self.read_models()
                        else:
                            model.load.progressed(event.progress)
                            self.refresh_state(model)
        except TimeoutError:
            return
        except UpstreamError:
            pass
        finally:
            if node.router_record.followed_since is not None:
                node.router_record.following(math.inf)
        # The router has ended, or does not tell any more.
        self.probe_soon()

    async def _read_slots(self, node: Node, *, comes_up: bool = False) -> None:
        """Ask how many slots are busy, by what does not keep an idle server from sleeping."""
        history, asked_at = node.probe_history, node.clock()
        path = node.load_endpoint(asked_at, comes_up=comes_up, fleet_works=self.fleet_works())
        told_at = node.slots_asked()
        if path is None:
            node.occupancy.clear_foreign()
            if node.sleep.asleep:
                node.slots_told(frozenset(), told_at)
            rests = node.reports_slots and not node.sleep.asleep
            history.slots_read(left_alone=rests)
            if rests:
                node.sleep.woke()
            return
        with node.occupancy.slots_query(asked_at) as query:
            reply = await fetch(node, path)
            busy = read_busy(node, path, reply, told_at)
            if busy and path != "/slots":
                # It is awake and busy: `/slots` changes nothing, and tells more.
                reply = await fetch(node, "/slots")
                busy = read_busy(node, "/slots", reply, told_at)
        now = node.clock()
        if not isinstance(reply, ProbeResult):
            history.slots_read()
            node.sleep.woke()
        elif reply.answer is ProbeAnswer.TIMED_OUT and not is_excused(node, asked_at, now):
            history.slots_unread(asked_at, node.settings.health.fall)
        if busy is not None:
            node.occupancy.record_busy(busy, query, now)


def _read(body: bytes) -> list[RoutedModel] | None:
    listed = parse_models(body)
    return None if listed is None else read_list(listed)


def count_result(node: Node, result: ProbeResult) -> bool:
    """Count the result of a probe; whether the node has come up by it."""
    history, health, now = node.probe_history, node.settings.health, node.clock()
    was_up = history.up
    sign = sign_of_life(node, now) if result.answer is ProbeAnswer.TIMED_OUT else None
    history.record(result, rise=health.rise, fall=health.fall, sign_of_life=sign)
    comes_up = history.up and not was_up
    if comes_up:
        node.circuit.server_restarted(now)
        node.degradation.server_restarted()
    return comes_up


def _may_hang(model: Node, load: ModelLoad) -> bool:
    """Whether a loaded model's server is to show that it answers: it has work, or did not before.

    One that reads a prompt answers `/props` all the same, whatever its slots do.
    """
    history = model.probe_history
    fails = history.down or history.mute or history.failures_in_a_row > 0
    return model.spec.kind == "llama.cpp" and bool(model.leases or fails or load.doubted)


# A prefill may take so many times longer than predicted before it stops being a sign of life.
PREFILL_GRACE_FACTOR = 4.0


def prefill_grace(lease: Lease) -> float:
    """Seconds for which this request's prefill is a sign of life of its node."""
    grace = max(
        lease.node.settings.health.prefill_grace,
        PREFILL_GRACE_FACTOR * (lease.expected_prefill or 0.0),
    )
    return grace + WAKE_SLACK if lease.wake else grace


def sign_of_life(node: Node, now: float) -> str | None:
    """Why a node that answers no probe is alive, in words; None if nothing shows it."""
    silence = node.silence_timeout
    for lease in node.leases:
        if lease.last_content_at is not None and now - lease.last_content_at < silence:
            return "one of its streams moves"
        if _is_prefilling(lease, now):
            return "it reads a prompt"
    return None


def is_excused(node: Node, asked_at: float, now: float) -> bool:
    """Whether our own work, or waking up, explains that its slots could not be read.

    A stream without a head does not: a slot that reads its prompt has sent the head.
    """
    if node.sleep.waking_since is not None:
        return not node.sleep.is_overdue(node.properties.size, now)
    return any(
        (lease.last_content_at is not None and lease.last_content_at >= asked_at)
        or (
            not (lease.stream and lease.phase is LeasePhase.WAITING_HEAD)
            and _is_prefilling(lease, now)
        )
        for lease in node.leases
    )


def another_prefills(lease: Lease, now: float) -> bool:
    """Whether the node reads another request's prompt, which delays this one."""
    return any(other is not lease and _is_prefilling(other, now) for other in lease.node.leases)


def _is_prefilling(lease: Lease, now: float) -> bool:
    # A prefill goes on to its end even after the client has left.
    phase = lease.abandoned_phase if lease.phase is LeasePhase.RECLAIM else lease.phase
    reads = phase is LeasePhase.WAITING_HEAD or phase is LeasePhase.PREFILL
    return reads and now - lease.prefill_began_at < prefill_grace(lease)


def judge_state(node: Node, now: float) -> tuple[NodeState, str]:
    """The node's state and the reason for it: the first in the order of `NodeState` that holds."""
    history = node.probe_history
    if (kept_off := _kept_off(node)) is not None:
        return kept_off
    if history.down:
        return NodeState.DOWN, history.detail
    if node.key_rejection.active(now):
        return NodeState.DOWN, node.key_rejection.reason
    if (not_loaded := _not_loaded(node, now)) is not None:
        return not_loaded
    if not history.probed:
        return NodeState.STARTING, "not probed yet"
    if (phase := node.circuit.phase(now)) != "closed":
        what_follows = (
            f"no work for about {node.circuit.open_seconds:.0f} s, then one on trial"
            if phase == "open"
            else "the next one is on trial"
        )
        failed = f"{node.circuit.failures} requests in a row failed"
        return NodeState.EJECTED, f"{failed}; {what_follows}"
    if history.mute:
        return NodeState.MUTE, history.detail
    if history.frozen:
        return NodeState.MUTE, (
            f"/health answers but /slots has not for {now - history.unread_since:.0f} s though "
            "nothing is being read: a request may have frozen its loop (a huge grammar?); restart "
            "the server if it lasts"
        )
    if node.degradation.degraded:
        return NodeState.DEGRADED, node.degradation.reason(now, endpoint=node.spec.kind == "openai")
    if node.concurrency_limit is not None and node.concurrency_limit.paused(now):
        left = node.concurrency_limit.paused_until - now
        return NodeState.READY, f"it refused work (402, 429 or 503): none for about {left:.0f} s"
    if node.is_router:
        # One of kind `openai` that is open may not be loaded: then it sleeps.
        loaded = sum(
            one.load is not None
            and one.load.loaded
            and not (one.spec.kind == "openai" and one.sleep.sleeping)
            for one in node.instances.values()
        )
        words = f"a router: {loaded} of {len(node.instances)} models are loaded"
        if node.router_record.stopped(now):
            left = node.router_record.stopped_until - now
            words += f"; it gets no commands for {left:.0f} s, since others load and unload them"
        return NodeState.READY, words
    return NodeState.READY, "answers its probes"


def _not_loaded(node: Node, now: float) -> tuple[NodeState, str] | None:
    """The state of a node whose model is not in its memory; None: it is, as far as is known."""
    history, load = node.probe_history, node.load
    if load is not None and load.phase is not LoadPhase.READY and history.probed:
        return _load_state(node, load, now)
    if load is not None and load.doubted:
        return NodeState.LOADING, "a request has found it not loaded"
    if load is not None and load.restoring:
        return NodeState.LOADING, "it is loaded; its saved prompts are restored"
    hangs = history.silent and node.sleep.is_overdue(node.properties.size, now)
    if node.sleep.sleeping and not hangs:
        return NodeState.SLEEPING, _sleeping_reason(node, now)
    if history.loading:
        return NodeState.LOADING, "the server is loading its model"
    return None


def _load_state(node: Node, load: ModelLoad, now: float) -> tuple[NodeState, str]:
    expected = node.sleep.wake_seconds(node.properties.size)
    words = reason = load.reason
    if load.phase is LoadPhase.UNLOADED:
        words = f"not loaded; its load takes about {expected:.2g} s"
        if load.held:
            words = "its server holds it still, and it gets no requests"
        words += f" ({reason})" if reason else ""
        words += f"; {load.saved} of its prompts are saved" if load.saved else ""
    elif load.phase is LoadPhase.LOADING:
        done = "" if load.progress is None else f", {load.progress:.0%} of it is done"
        words = f"it is loaded since {now - load.since:.0f} s, in about {expected:.2g} s{done}"
        words += f": {reason}" if reason else ""
    elif load.phase is LoadPhase.RETIRING:
        return NodeState.UNLOADING, f"it ends its requests and is unloaded then: {reason}"
    elif load.phase is LoadPhase.FAILED:
        words = f"{reason}; it is tried again in {max(0.0, load.retry_at - now):.0f} s"
    return NodeState(load.phase.value), words


_DRAINED = NodeState.DRAINING, "drained by an operator, until it is resumed"
_LEAVING_PHASES = frozenset({LifecyclePhase.RETIRING, LifecyclePhase.STOPPING})


def _kept_off(node: Node) -> tuple[NodeState, str] | None:
    """The state that the inventory, an operator or the node's hooks impose; None: it may work."""
    if node.router is not None:
        return _kept_off(node.router) or (_DRAINED if node.draining else None)
    spec, history, lifecycle = node.spec, node.probe_history, node.lifecycle
    if not spec.enabled:
        return NodeState.STANDBY, "enabled: false in the inventory"
    if spec.standby and not spec.autoscaled:
        return NodeState.STANDBY, "standby: true in the inventory, without start and stop"
    if spec.autoscaled and lifecycle.phase is LifecyclePhase.OFF:
        return NodeState.STANDBY, lifecycle.reason
    if spec.autoscaled and lifecycle.phase is LifecyclePhase.UNKNOWN and history.down:
        return NodeState.STANDBY, "it does not run"
    if node.draining:
        return _DRAINED
    if spec.autoscaled and lifecycle.phase in _LEAVING_PHASES:
        return NodeState.DRAINING, lifecycle.reason
    if (
        spec.autoscaled
        and lifecycle.phase is LifecyclePhase.STARTING
        and not (history.up or history.loading)
    ):
        detail = f"; not up yet: {history.detail}" if history.detail else ""
        return NodeState.STARTING, lifecycle.reason + detail
    return None


def _sleeping_reason(node: Node, now: float) -> str:
    seconds = node.sleep.seconds_left(node.properties.size, now)
    waking_since = node.sleep.waking_since
    waited = 0.0 if waking_since is None else now - waking_since
    if node.load is not None and node.spec.kind == "openai":
        if waking_since is None:
            return f"the next request loads it, in about {seconds:.2g} s: {node.load.reason}"
        return f"its load takes {waited:.0f} s so far, for the first request: {node.load.reason}"
    if waking_since is not None:
        return f"it wakes up: it has loaded its model for {waited:.0f} s"
    return (
        "it has unloaded its model while it was idle (--sleep-idle-seconds); the next request "
        f"wakes it, in about {seconds:.2g} s"
    )
