"""Events of the gateway, and the bus that hands them to subscribers: metrics and logs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from gateway.lease import AttemptCharge
from gateway.terms import Priority, RequestTrace


@dataclass(slots=True)
class RequestRecord:
    """A request and its outcome. Times in seconds.

    It is made when the request arrives, filled while the request runs, and published at its end.
    """

    x_request_id: str
    path: str
    model: str = "unknown"  # A name that the fleet serves, or `unknown`
    priority: Priority = Priority.NORMAL
    caller: str = "unknown"
    status: int = 200
    """The true outcome: 499 if the client left, the error's status even after a heartbeat's 200."""
    reason: str | None = None  # The error code, if the request failed
    stream: bool = False
    node: str | None = None
    tier: str | None = None
    fallback: str | None = None  # Why it ran on another tier than that of its class, if it did
    attempts: int = 0
    queue_seconds: float = 0.0  # Seconds spent waiting for a slot
    ttft: float | None = None  # Seconds until the first content was sent; None if none was
    duration_seconds: float = 0.0
    overhead_seconds: float | None = None
    """Seconds between arrival and dispatch, less those spent waiting for a slot."""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # Part of `prompt_tokens`
    completion_tokens: int = 0
    cost: float = 0.0
    slot_seconds: float = 0.0
    """Seconds for which its attempts held slots, times their number; like tokens and cost, without
    attempts that failed and were retried."""
    prefill_seconds: float | None = None
    """Of the time on nodes, the part until the first content; of several prompts the sum. None:
    unknown, as is `decode_seconds`, the rest of it."""
    decode_seconds: float | None = None
    resumptions: int = 0  # How often its stream went on on another node, or after it had yielded
    request_id: str = ""  # The gateway's own id, unique in this process
    ended_at: float = 0.0  # Monotonic seconds of the gateway's clock
    trace: RequestTrace | None = None  # Its part of a trace; None: it is not traced
    _open_parts: int = 0  # Sub-requests whose tokens are not yet counted
    _on_complete: Callable[[], None] | None = None

    def fail(self, status: int, reason: str) -> None:
        """The request ends with this status and error code."""
        self.status, self.reason = status, reason

    def identify(self, caller: str) -> None:
        """The caller is known."""
        self.caller = caller

    def classify(self, priority: Priority) -> None:
        """The class is known."""
        self.priority = priority

    def traced(self, trace: RequestTrace) -> None:
        """The request is traced."""
        self.trace = trace

    def describe(self, *, stream: bool, model: str | None) -> None:
        """The body is understood; `model` is None if no node serves it."""
        self.stream = stream
        if model is not None:
            self.model = model

    def finish(self, received_at: float, now: float) -> RequestRecord:
        """The request is over; returns the complete record."""
        self.duration_seconds = now - received_at
        self.ended_at = now
        return self

    def waited(self, seconds: float) -> None:
        """The request has waited so long for a slot."""
        self.queue_seconds += seconds

    def attempt_began(self, node: str, tier: str, fallback: str | None) -> None:
        """An attempt begins on this node."""
        self.attempts += 1
        self.node, self.tier, self.fallback = node, tier, fallback

    def attempt_withdrawn(self) -> None:
        """The last attempt has sent nothing: it does not count."""
        self.attempts -= 1

    def dispatched(self, received_at: float, sent_at: float) -> None:
        """The request was sent to a node; only the first time counts."""
        if self.overhead_seconds is None:
            overhead = sent_at - received_at
            if self.queue_seconds:
                overhead = max(0.0, overhead - self.queue_seconds)
            self.overhead_seconds = overhead

    def first_content_sent(self, seconds: float) -> None:
        """The first content is on its way to the client, so long after the request came."""
        self.ttft = seconds

    def count_tokens(
        self, prompt: int, cached: int, completion: int, *, replace: bool = False
    ) -> None:
        """Add the tokens of an attempt; `replace`: they include those of all before."""
        if replace:
            self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.completion_tokens += completion

    def sub_request_answered(self, part: RequestRecord) -> None:
        """Take node and times from the first sub-request, and the most attempts of any."""
        self.attempts = max(self.attempts, part.attempts)
        if self.node is None:
            self.node, self.tier, self.fallback = part.node, part.tier, part.fallback
            self.queue_seconds, self.overhead_seconds = part.queue_seconds, part.overhead_seconds

    def charge(
        self,
        took: AttemptCharge | RequestRecord,
        tokens: bool = False,  # noqa: FBT001, FBT002 - a callback
    ) -> None:
        """Add what an attempt or a sub-request took: money, time, and its `tokens` if asked."""
        if tokens:
            self.count_tokens(took.prompt_tokens, took.cached_tokens, took.completion_tokens)
        self.cost += took.cost
        self.slot_seconds += took.slot_seconds
        if took.prefill_seconds is not None:
            self.prefill_seconds = took.prefill_seconds + (self.prefill_seconds or 0.0)
        if took.decode_seconds is not None:
            self.decode_seconds = took.decode_seconds + (self.decode_seconds or 0.0)

    def resumed(self) -> None:
        """Its stream goes on on another node, or after it had yielded its slot."""
        self.resumptions += 1

    def discard_attempts(self) -> None:
        """What its attempts took so far brought the caller nothing: the operator pays for it."""
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.cost = self.slot_seconds = 0.0
        self.prefill_seconds = self.decode_seconds = None

    def sub_request_began(self) -> None:
        """A sub-request begins, whose tokens will be counted here."""
        self._open_parts += 1

    def sub_request_ended(self, part: RequestRecord) -> None:
        """Add what a sub-request took."""
        self.charge(part, tokens=True)
        self.resumptions += part.resumptions
        self._open_parts -= 1
        if not self._open_parts and self._on_complete is not None:
            on_complete, self._on_complete = self._on_complete, None
            on_complete()

    def when_complete(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call `callback` when the tokens of all sub-requests are counted; perhaps at once.

        A sub-request that is cancelled ends somewhat later than the request.
        """
        if self._open_parts:
            self._on_complete = partial(callback, *arguments)
        else:
            callback(*arguments)


@dataclass(slots=True)
class LimitReached:
    """A request was refused, since a limit is reached."""

    limit: str  # The limit's name in the settings
    scope: str  # Whose it is: `total`, `group`, `key` or `user`


class AttemptEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An attempt on one node has ended. `outcome` is a word of a small set, never free text."""

    x_request_id: str
    node: str
    outcome: str
    seconds: float
    status: int | None = None


class StreamResumed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A stream whose node failed was resumed on another node, or could not be."""

    x_request_id: str
    failed_node: str
    resumed_on: str | None  # The replacement node; None: the stream could not be resumed
    tokens: int  # About how many tokens had been sent
    failure: str | None = None  # Why the stream could not be resumed; never any of its text


# What can become of an attempt; `failed`: it is tried again; `refused`: 410, no more.
WEBHOOK_OUTCOMES = ("delivered", "failed", "refused", "given_up")


@dataclass(slots=True)
class WebhookAttempted:
    """An event was sent to a webhook, or could not be."""

    outcome: str  # One of `WEBHOOK_OUTCOMES`


@dataclass(slots=True)
class SlotYielded:
    """A batch request gave up its slot to one of a higher class, and has gone on or failed to."""

    x_request_id: str
    node: str  # Whose slot it was
    resumed_on: str | None  # The node on which it goes on; None: it does not
    tokens: int  # About how many tokens it had by then
    waited_seconds: float  # From the cut until it went on


@dataclass(slots=True)
class EdgeLost:
    """A process that relays has ended without having been told to, or with requests under way."""

    edge: str
    reason: str
    requests: tuple[str, ...]  # the `X-Request-ID` of each that broke off


@dataclass(slots=True)
class NodeChanged:
    """A node's state has changed; `reason` tells an operator why."""

    node: str
    old_state: str | None  # None: the node is new
    new_state: str | None  # None: the node has left the fleet
    reason: str


@dataclass(slots=True)
class InventoryChanged:
    """The inventory was reloaded; with `error`, nothing changed."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class SettingsChanged:
    """The settings were reloaded; with `error`, nothing changed."""

    needs_restart: tuple[str, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class NodeDrift:
    """A node differs from what the inventory declares."""

    node: str
    differences: tuple[str, ...]


@dataclass(slots=True)
class ModelLoadChanged:
    """A router has begun to load one of its models, has loaded it, or has it no longer."""

    node: str  # the router
    model: str
    change: str  # `loading`, `loaded`, `unloaded`, `failed` or `died`
    seconds: float | None  # that a load took, if its begin was seen
    reason: str
    by_others: bool  # whether it was not this gateway's
    cause: str = ""  # of what is `unloaded` or has `died`: one of `router.UNLOAD_CAUSES`


@dataclass(slots=True)
class PromptsKept:
    """Prompts of a router's model were saved before its unload, or restored after its load."""

    node: str  # the router's model
    action: str  # of `PROMPT_ACTIONS`
    prompts: int  # 1 for a failure
    tokens: int
    detail: str = ""  # what was wrong


# `mismatch`: what was restored was not what was saved, and is erased; `failed`: the server did not
# save or restore.
PROMPT_ACTIONS = ("saved", "restored", "mismatch", "failed")


@dataclass(slots=True)
class ModelsDiffer:
    """The differences between nodes that serve the same model have changed."""

    differences: tuple[str, ...]  # Those that there are now, a sentence each


# How calibrations end; `warmed`: the node's speed was known already.
CALIBRATION_OUTCOMES = ("done", "warmed", "given_up", "timed_out", "failed")


@dataclass(slots=True)
class NodeCalibrated:
    """A calibration of a node has ended."""

    node: str
    outcome: str  # One of `CALIBRATION_OUTCOMES`
    seconds: float
    prefill_tps: float | None  # What it showed; None: nothing
    decode_tps: float | None
    detail: str  # Why it failed, for an operator


@dataclass(slots=True)
class HookEnded:
    """A hook that starts or stops a standby node has ended or was aborted."""

    node: str
    hook: str  # `start` or `stop`
    outcome: str  # `ok`, `failed`, `timeout` or `error`
    seconds: float
    detail: str  # For an operator, without secrets
    output: str = ""  # The end of the command's output or of the HTTP response; without secrets


MOST_KINDS = 2048  # Kinds of requests that are known at a time; one more forgets the oldest


class EndedKind:
    """Requests that are alike in all but their ids, times, tokens and cost, and sums of these.

    The sums are of the requests since `EndedRequests.tell_sums`.
    """

    __slots__ = (
        "attempts", "cached", "caller", "completion", "cost", "model", "node", "path", "priority",
        "prompt", "readers", "reason", "requests", "status", "stream", "tier", "timed",
    )  # fmt: skip

    def __init__(self, record: RequestRecord) -> None:
        self.path = record.path
        self.model = record.model
        self.priority = record.priority
        self.caller = record.caller
        self.status = record.status
        self.reason = record.reason
        self.stream = record.stream
        self.node = record.node
        self.tier = record.tier
        self.attempts = record.attempts
        self.timed = record.ttft is not None  # Whether the time of the first content is known
        self.readers: tuple[Callable[[RequestRecord], object], ...] = ()
        self.clear()

    def clear(self) -> None:
        """Begin the sums anew."""
        self.requests = self.prompt = self.cached = self.completion = 0
        self.cost = 0.0


class EndedRequests:
    """Reads the record of each request that has ended, once for the log, metrics and history.

    Each of them makes a reader for each kind of requests, which is called with every record, and
    gets what is only added up when somebody asks for it.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], EndedKind] = {}
        self._make_readers: list[Callable[[EndedKind], Callable[[RequestRecord], object]]] = []
        self._take_sums: list[Callable[[EndedKind], None]] = []

    def read_by(
        self,
        make_reader: Callable[[EndedKind], Callable[[RequestRecord], object]],
        take_sums: Callable[[EndedKind], None] | None = None,
    ) -> None:
        """Have later records read by what `make_reader` makes for their kind."""
        self.forget_kinds()
        self._make_readers.append(make_reader)
        if take_sums is not None:
            self._take_sums.append(take_sums)

    def read(self, record: RequestRecord) -> None:
        """Read the record of a request that has ended."""
        key = (
            record.path, record.model, record.priority, record.caller, record.status,
            record.reason, record.stream, record.node, record.tier, record.attempts,
            record.ttft is None,
        )  # fmt: skip
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MOST_KINDS:
                # Not all of them, which would take long in one turn of the event loop.
                self._tell(self._kinds.pop(next(iter(self._kinds))))
            kind = self._kinds[key] = EndedKind(record)
            kind.readers = tuple(make(kind) for make in self._make_readers)
        kind.requests += 1
        kind.prompt += record.prompt_tokens
        kind.cached += record.cached_tokens
        kind.completion += record.completion_tokens
        kind.cost += record.cost
        for read in kind.readers:
            read(record)

    def tell_sums(self) -> None:
        """Hand over what has been added up since the last call."""
        for kind in self._kinds.values():
            self._tell(kind)

    def _tell(self, kind: EndedKind) -> None:
        if kind.requests:
            for take in self._take_sums:
                take(kind)
            kind.clear()

    def forget_kinds(self) -> None:
        """Have the readers of each kind made anew."""
        self.tell_sums()
        self._kinds.clear()


E = TypeVar("E")
DEFER_SECONDS = 0.05  # Longest delay of deferred work, in seconds
MOST_DEFERRED = 512  # Pieces of work that may be deferred; one more flushes them all
# As many between a brain and its edges, where questions wait behind all that was told before.
FEW_DEFERRED = 32


def call_later(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` on the running event loop after so many seconds."""
    asyncio.get_running_loop().call_later(seconds, work)


class EventBus:
    """Hands each event to its subscribers, in order. Subscribers must not raise.

    Work that nobody waits for is deferred and done in batches: code that runs many times in a row
    is about twice as fast as code that runs once between other work. `call_later` calls a
    function after so many seconds; without it nothing is deferred.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
        most_deferred: int = MOST_DEFERRED,
    ) -> None:
        self._subscribers: dict[type, list[Callable[[Any], None]]] = defaultdict(list)
        self._call_later, self._most_deferred = call_later, most_deferred
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.ended = EndedRequests()
        self.subscribe(RequestRecord, self.ended.read)

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call `subscriber` with every later event of exactly this type."""
        self._subscribers[kind].append(subscriber)

    def publish(self, event: object) -> None:
        """Call the subscribers of this type, after all deferred work."""
        if self._deferred:
            self.flush()
        self.tell(event)

    def tell(self, event: object) -> None:
        """Call the subscribers of this type at once: for work that is deferred itself."""
        for subscriber in self._subscribers.get(type(event), ()):
            subscriber(event)

    def publish_deferred(self, event: object) -> None:
        """Publish within `DEFER_SECONDS`."""
        self.defer(self.tell, event)

    def defer(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` within `DEFER_SECONDS`, and before any event that is published later."""
        deferred = self._deferred
        deferred.append((work, arguments))
        if self._call_later is None or len(deferred) >= self._most_deferred:
            self.flush()
        elif len(deferred) == 1:
            self._call_later(DEFER_SECONDS, self.flush)

    def catch_up(self) -> None:
        """Do the deferred work now, and tell the sums of the requests that have ended."""
        self.flush()
        self.ended.tell_sums()

    def flush(self) -> None:
        """Do the deferred work now."""
        deferred, self._deferred = iter(self._deferred), []
        try:
            for work, arguments in deferred:
                work(*arguments)
        except BaseException:
            # The work behind it settles other leases: it must not be lost.
            self._deferred[:0] = deferred
            if self._deferred and self._call_later is not None:
                self._call_later(DEFER_SECONDS, self.flush)
            raise
