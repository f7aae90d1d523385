"""What happened, told once to whoever subscribed: metrics, logs, later usage and the dashboard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.request import Priority


@dataclass(slots=True)
class RequestFinished:
    """A request has ended, however it did. Seconds and tokens."""

    x_request_id: str
    path: str
    model: str = "unknown"
    """A name that the fleet serves, or `unknown`."""
    priority: Priority = Priority.NORMAL
    caller: str = "unknown"
    status: int = 200
    """The true outcome: 499 when the client left, the error's code after a heartbeat's 200."""
    reason: str | None = None
    """The contract's error code, if it failed."""
    stream: bool = False
    node: str | None = None
    tier: str | None = None
    fallback: str | None = None
    """Why it ran on another tier than its class belongs to, if it did."""
    attempts: int = 0
    queue_seconds: float = 0.0
    """Seconds spent waiting for a slot."""
    ttft: float | None = None
    """Seconds until the first content went out; None when none did."""
    duration_seconds: float = 0.0
    overhead_seconds: float | None = None
    """Seconds between arrival and dispatch that were not spent waiting for a slot."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens`."""
    completion_tokens: int = 0
    cost: float = 0.0

    def fail(self, status: int, reason: str) -> None:
        """The request ends with this status and error code."""
        self.status, self.reason = status, reason

    def waited(self, seconds: float) -> None:
        """The request has waited so long for a slot."""
        self.queue_seconds += seconds

    def attempt_began(self, node: str, tier: str, fallback: str | None) -> None:
        """An attempt begins on this node."""
        self.attempts += 1
        self.node, self.tier, self.fallback = node, tier, fallback

    def dispatched(self, received_at: float, sent_at: float) -> None:
        """The request was sent to a node; only the first time counts."""
        if self.overhead_seconds is None:
            self.overhead_seconds = max(0.0, sent_at - received_at - self.queue_seconds)

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

    def sub_request_answered(self, part: RequestFinished) -> None:
        """Take node and times from the first sub-request, and the most attempts of any."""
        self.attempts = max(self.attempts, part.attempts)
        if self.node is None:
            self.node, self.tier, self.fallback = part.node, part.tier, part.fallback
            self.queue_seconds, self.overhead_seconds = part.queue_seconds, part.overhead_seconds

    def charge(self, cost: float) -> None:
        """Add what an attempt has cost."""
        self.cost += cost


@dataclass(slots=True)
class AttemptEnded:
    """One attempt on one node is over. `outcome` is a word of a small set, never free text."""

    x_request_id: str
    node: str
    outcome: str
    seconds: float
    status: int | None = None


@dataclass(slots=True)
class StreamResumed:
    """An answer whose node failed goes on elsewhere, or can't: then `node` is None."""

    x_request_id: str
    failed_node: str
    """The node that did."""
    resumed_on: str | None
    """The one that goes on."""
    tokens: int
    """That had gone out, about."""
    failure: str | None = None
    """Why nobody can; never any of the answer's text."""


@dataclass(slots=True)
class NodeChanged:
    """A node's state has changed; `reason` is for an operator to act on."""

    node: str
    old_state: str | None
    """None: the node is new."""
    new_state: str | None
    """None: the node has left the fleet."""
    reason: str


@dataclass(slots=True)
class InventoryChanged:
    """The inventory was read again; with `error`, nothing changed."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class SettingsChanged:
    """The settings were read again; with `error`, nothing changed."""

    needs_restart: tuple[str, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class NodeDrift:
    """A node differs from what the inventory declares."""

    node: str
    differences: tuple[str, ...]


@dataclass(slots=True)
class HookEnded:
    """A hook that starts or stops a standby node has ended, or was broken off."""

    node: str
    hook: str
    """`start` or `stop`."""
    outcome: str
    """`ok`, `failed`, `timeout` or `error`."""
    seconds: float
    detail: str
    """For an operator, without secrets."""
    output: str = ""
    """The end of what it wrote, or of what it was answered; without secrets."""


E = TypeVar("E")


DEFER_SECONDS = 0.05
"""Seconds that work which nobody waits for may be put off."""

MOST_DEFERRED = 512
"""Pieces of such work; more are done at once."""


class EventBus:
    """Hands each event to its subscribers, in order. Subscribers must not raise.

    What nobody waits for is put off a little and then done in one go: the same code run many
    times over is about twice as fast as code run once between other things. `later` calls a
    function after so many seconds; without it nothing is put off.
    """

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        self._subscribers: dict[type, list[Callable[[Any], None]]] = defaultdict(list)
        self._later = call_later
        self._put_off: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call `subscriber` with every later event of exactly this type."""
        self._subscribers[kind].append(subscriber)

    def publish(self, event: object) -> None:
        """Tell everybody who asked for events of this type, after all that was put off."""
        if self._put_off:
            self.flush()
        for subscriber in self._subscribers.get(type(event), ()):
            subscriber(event)

    def publish_deferred(self, event: object) -> None:
        """The same, within `SOON` seconds."""
        self.defer(self._tell, event)

    def defer(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` within `SOON` seconds, before anything that is published after this."""
        put_off = self._put_off
        put_off.append((work, arguments))
        if self._later is None or len(put_off) >= MOST_DEFERRED:
            self.flush()
        elif len(put_off) == 1:
            self._later(DEFER_SECONDS, self.flush)

    def flush(self) -> None:
        """Do what was put off."""
        put_off, self._put_off = self._put_off, []
        for work, arguments in put_off:
            work(*arguments)

    def _tell(self, event: object) -> None:
        for subscriber in self._subscribers.get(type(event), ()):
            subscriber(event)
