"""What brain and edge tell each other: plain values, durations and never times of day.

The brain is the process that decides: it has the fleet, the scheduler, keys, limits, ledger and
the admin listener. An edge relays: it has connections to clients and to nodes, and asks the brain
for each lease. An `EdgeLink` carries the messages, in order and each once.

What an edge knows of keys and models is a snapshot of the brain's, told whenever those change.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec

from gateway import errors
from gateway.callers.keys import AnonymousAccess, HeldKey, KeyRing
from gateway.callers.limits import RateLimit
from gateway.catalog import ServerFigures
from gateway.config.keys import CacheSpec, LimitSpec, NodeLabels, has_labels
from gateway.errors import GatewayError
from gateway.events import AttemptEnded, RequestRecord, StreamResumed
from gateway.forward.attempt_ends import Losses
from gateway.lease import (
    AttemptReport,
    ExpectedReading,
    LeaseRequest,
    NodeInfo,
    NodeQuestion,
    QueuePosition,
    Tried,
    UsageReport,
)
from gateway.nodes.model_index import ModelIndex, server_figures
from gateway.nodes.node import Node
from gateway.terms import Caller, Priority

VERSION = 1
"""Of these messages. Brain and edge must have the same: an edge is started by its brain."""


class Message(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True, tag=True):
    """What is sent over a link."""


class WireError(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """A `GatewayError`."""

    status: int
    code: str
    message: str
    param: str | None
    retry_after: float | None
    retryable: bool
    details: dict[str, int]
    allow: str | None
    message_with_nodes: str | None

    @classmethod
    def of(cls, error: GatewayError) -> WireError:
        """The error as it is sent."""
        return cls(*[getattr(error, name) for name in cls.__struct_fields__])

    def error(self) -> GatewayError:
        """The error as it is raised."""
        return GatewayError(**msgspec.structs.asdict(self))


# From an edge to the brain.


class Hello(Message, frozen=True):
    """An edge's first message; in a cluster, what it carries from its last link follows."""

    version: int
    name: str
    pid: int
    epoch: int = 0  # the highest of a leader that it has seen; 0: none, or no cluster


class Opening(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """A request that an edge has taken in, and who sent it: to be admitted within its limits."""

    id: str
    x_request_id: str
    path: str
    caller: str
    user: str | None  # the end user that a trusted caller names
    anonymous: Priority | None  # of a caller without a key: the highest class that it may have
    trusted: bool  # whether that one is on the gateway's own machine
    request: LeaseRequest | None
    """Of all its prompts together; None: it is the one that asks for a lease."""
    prompts: int
    model: str  # a name that the fleet serves, or `unknown`
    stream: bool
    age: float  # seconds since it came
    trace: TraceOnWire | None  # None: it is not traced


class CarriedRequest(Message, frozen=True):
    """A request that another brain has admitted, and that has not ended, or is not booked yet."""

    opening: Opening  # with its whole age, and the request in any case
    record: EndedRecord  # what is known of it so far
    released: bool  # whether its response has ended


class CarriedLease(Message, frozen=True):
    """A lease that another brain has granted: its request runs, or is not accounted for yet."""

    lease_id: int
    request: LeaseRequest  # of the request, or of one prompt of it
    node: str
    model: str
    served_name: str
    stream: bool
    reading: ExpectedReading
    slots: int
    fallback: str | None
    age: float  # seconds since it was granted
    phase: Phase
    tokens: int  # events of content that have come


Phase = Literal["sent", "reading", "content", "received", "ended"]
"""How far a lease has come: what its node has sent of the response, or that it has ended."""


class Carried(Message, frozen=True):
    """All was told that an edge carries: `Adopted` answers."""


class AskLease(Message, frozen=True):
    """A request, or one prompt of it, needs slots: `Granted` or `Refused` answers."""

    ask: int  # numbers what is asked over a link
    request: LeaseRequest
    tried: Tried
    age: float
    response_started: bool
    opening: Opening | None
    """Of a request that was not admitted yet: it is, or this is refused."""


class Withdraw(Message, frozen=True):
    """Nobody waits for this lease any more. One that was granted meanwhile is given back."""

    ask: int


class GiveBack(Message, frozen=True):
    """A lease was not used: nobody waited for it any more, or it came too `late`."""

    lease_id: int
    late: bool


class KeepInQueue(Message, frozen=True):
    """The client of a request that waits has the head of a response."""

    request_id: str


class LeaseNews(Message, frozen=True):
    """A report of `LeaseService` that needs no more than its lease."""

    lease_id: int
    what: Literal[
        "reading_began", "content_began", "response_received", "answered", "pool_overflowed"
    ]


class ContentWentOn(Message, frozen=True):
    """`LeaseService.content_went_on`."""

    lease_id: int
    tokens: int


class Discarded(Message, frozen=True):
    """`LeaseService.discard`."""

    request_id: str


class Released(Message, frozen=True):
    """The response to an admitted request has ended; what it used is told later."""

    request_id: str


class EndedRecord(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """The fields of a `RequestRecord` that an edge knows: all but what its attempts cost."""

    x_request_id: str
    path: str
    model: str
    priority: Priority
    caller: str
    status: int
    reason: str | None
    stream: bool
    node: str | None
    tier: str | None
    fallback: str | None
    attempts: int
    queue_seconds: float
    ttft: float | None
    duration_seconds: float
    overhead_seconds: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    request_id: str
    resumptions: int = 0  # edges of versions before tell none

    @classmethod
    def of(cls, record: RequestRecord) -> EndedRecord:
        """The record as it is sent."""
        return cls(*[getattr(record, name) for name in cls.__struct_fields__])

    def record(self) -> RequestRecord:
        """The record as it is published."""
        return RequestRecord(**msgspec.structs.asdict(self))


class TraceOnWire(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """The trace that a request is part of, or would be if it were traced."""

    id: str | None  # None: it is not traced, but may be, since it has failed
    parent: str | None  # the client's span; None: the trace begins here
    traceparent: bytes | None = None  # the client's own header, where there is no id


class Quarantined(Message, frozen=True):
    """Nodes that were lost over a request, known by its digest. Both sides tell it.

    No nodes: one has completed it, so that the others did not die on it.
    """

    digest: bytes
    nodes: frozenset[str]
    age: float  # seconds since the last one was lost

    @classmethod
    def of(cls, digest: bytes, losses: Losses | None, age: float = 0.0) -> Quarantined:
        """What is told of such a request; None: one has completed it."""
        return cls(digest, frozenset() if losses is None else losses.nodes, age)

    def losses(self, now: float) -> Losses | None:
        """The same, as `Quarantine` takes it."""
        return Losses(self.nodes, now - self.age) if self.nodes else None


class Finished(Message, frozen=True):
    """A request is over, and what it used is known."""

    record: EndedRecord
    opening: Opening | None  # of one that has asked for no lease, and so was not admitted yet
    trace: TraceOnWire | None


class Leaving(Message, frozen=True):
    """The edge ends as it was told to, so that the end of its link is no failure."""


class Turned(Message, frozen=True):
    """A request was refused before it was to be admitted: by its head or its body."""

    record: EndedRecord
    trace: TraceOnWire | None


class AskNodes(Message, frozen=True):
    """A question of `LeaseService` about other nodes: `NodeAnswer` answers."""

    ask: int
    what: NodeQuestion
    request: LeaseRequest
    tried: Tried
    but_paused: bool = False


class AskExcused(Message, frozen=True):
    """`LeaseService.is_silence_excused`: `NodeAnswer` answers."""

    ask: int
    lease_id: int


class AskPosition(Message, frozen=True):
    """`RequestQueue.queue_position`: `Position` answers."""

    request_id: str


# From the brain to an edge.


class Configuration(Message, frozen=True):
    """What an edge serves by. Sent first, and whenever something of it changes."""

    version: int
    settings: bytes  # `Settings` in JSON
    hash_key: bytes  # of `KeyedHash`
    loopback: bool  # whether only this machine can reach the public listener
    edges: int  # how many edges share the limits
    epoch: int = 0  # of the leader; 0: there is no cluster
    grant_seconds: float = 10.0
    """Age of the news on which a lease rests, beyond which it starts nothing."""


class Adopted(Message, frozen=True):
    """The brain has taken over what the edge carries, and answers what it asks."""


class Booked(Message, frozen=True):
    """The ledger has the records of so many more `Finished` and `Turned` of this link, for good."""

    count: int


class KeyOnWire(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """An API key as a ring holds it."""

    id: str
    name: str
    digest: bytes
    max_priority: Priority
    default_priority: Priority
    models: frozenset[str] | None
    trust_user_headers: bool
    group: str | None
    specs: tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]
    """Limits, limits of each end user, and cache policy, as the settings write them."""
    expires_in: float | None  # seconds; negative: it has expired
    previous: bytes | None  # the digest of the secret before
    previous_for: float | None  # seconds for which that one still works


class Keys(Message, frozen=True):
    """Keys that are new or have changed, and the ids of those that are gone."""

    keys: tuple[KeyOnWire, ...]
    gone: tuple[str, ...]
    is_complete: bool
    access: AnonymousAccess
    last: bool  # whether all keys are known with this message; else more follow at once


class ServerGroup(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Servers that are alike: the models that they serve, their labels and their figures."""

    models: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]
    figures: ServerFigures
    count: int


class Models(Message, frozen=True, eq=True):
    """The models that nodes serve, as `ServedModels` tells of them."""

    names: tuple[str, ...]
    aliases: dict[str, str]
    links: dict[str, str]
    """For names of models that have several, one of them."""
    paused: frozenset[str]
    groups: tuple[ServerGroup, ...]
    silent: tuple[tuple[NodeLabels, str, str, str], ...]
    """Labels, name, state and reason of some nodes that have never said what they serve."""
    may_grow: bool  # whether a node may yet report any model
    nodes: int  # all nodes of the inventory
    most_slots_of_a_host: int


class NodeRoute(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How a node is reached."""

    host: str
    port: int
    path_prefix: bytes
    header_lines: bytes  # that all requests to it have: Host, the node's key
    server_name: str | None
    tls: dict[str, Any] | None  # the settings of its TLS; empty: the defaults. None: no TLS.
    version: int  # another one: what its files hold may have changed


class NodeMet(Message, frozen=True):
    """A node that leases will name from now on, or what has changed of it."""

    info: NodeInfo  # without connections
    route: NodeRoute


class NodeGone(Message, frozen=True):
    """No lease will name this node."""

    name: str


class Granted(Message, frozen=True):
    """A lease, as `GrantedLease`, for what was asked under this number."""

    ask: int
    id: int
    node: str
    model: str
    served_name: str
    stream: bool
    reading: ExpectedReading
    slots: int
    fallback: str | None
    shares_pool: bool  # whether the node's slots are known to share one pool of tokens
    rates: Rates | None


class Refused(Message, frozen=True):
    """There is no lease for what was asked under this number, and no admission if it asked."""

    ask: int
    error: WireError
    rates: Rates | None


Rates = tuple[RateLimit | None, RateLimit | None]
"""`LimitBook.rate_limits` of a caller that has some; the edge's own clock says `resets_at`."""


class NodeAnswer(Message, frozen=True):
    """The answer to `AskNodes` or `AskExcused`."""

    ask: int
    yes: bool
    error: WireError | None = None  # what the question raised


class Position(Message, frozen=True):
    """The answer to `AskPosition`."""

    request_id: str
    position: QueuePosition | None


class EndRequest(Message, frozen=True):
    """End a request with this error; `evict`: only if no other node takes it."""

    request_id: str
    error: WireError
    evict: bool


ToBrain = (
    Hello | AskLease | Withdraw | GiveBack | KeepInQueue | LeaseNews | ContentWentOn | AttemptReport
    | UsageReport | Discarded | Released | Finished | Turned | AttemptEnded | StreamResumed
    | AskNodes | AskExcused | AskPosition | Quarantined | CarriedRequest | CarriedLease | Carried
    | Leaving
)  # fmt: skip
ToEdge = (
    Configuration | Keys | Models | NodeMet | NodeGone | Granted | Refused | NodeAnswer | Position
    | EndRequest | Quarantined | Adopted | Booked
)  # fmt: skip


MOST_KEYS_TOLD = 500  # keys of one message
MOST_SILENT_TOLD = 16  # nodes that have not said what they serve, which errors name
LOOK_SECONDS = 2.0  # seconds between two looks at figures of servers, which change often


# Keys.


class KeySnapshots:
    """Tells an edge of the keys in a ring, as far as they have changed since the last call."""

    def __init__(self, ring: KeyRing, wall_clock: Callable[[], float] = time.time) -> None:
        self._ring, self._wall_clock = ring, wall_clock
        self._told: dict[str, HeldKey] = {}
        self._version: int | None = None

    def changes(self) -> Iterator[Keys]:
        """What the edge does not know yet, in one message or several."""
        ring = self._ring
        if ring.version == self._version:
            return
        self._version, held, told = ring.version, ring.held(), self._told
        gone = tuple(id_ for id_ in told if id_ not in held)
        changed = [key for id_, key in held.items() if told.get(id_) != key]
        self._told, now = dict(held), self._wall_clock()
        for begin in range(0, len(changed) or 1, MOST_KEYS_TOLD):
            some = changed[begin : begin + MOST_KEYS_TOLD]
            yield Keys(
                tuple([key_on_wire(key, now) for key in some]),
                () if begin else gone,
                ring.is_complete,
                ring.access,
                last=begin + MOST_KEYS_TOLD >= len(changed),
            )


class KeyCopies:
    """The keys that an edge was told of, and the ring that holds them."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self.ring = KeyRing(is_complete=False, clock=wall_clock)
        self._wall_clock = wall_clock
        self._keys: dict[str, HeldKey] = {}

    def begin_anew(self) -> None:
        """Another brain tells of all keys from now on. Until then the ring stays as it is."""
        self._keys = {}

    def take(self, message: Keys) -> None:
        """Take in a message; the ring follows with the last of several."""
        for id_ in message.gone:
            self._keys.pop(id_, None)
        now = self._wall_clock()
        self._keys.update((key.id, _held(key, now)) for key in message.keys)
        if message.last:
            self.ring.follow(
                self._keys.values(), access=message.access, is_complete=message.is_complete
            )


def key_on_wire(key: HeldKey, now: float) -> KeyOnWire:
    """A key as it is sent at this Unix time."""
    caller, is_rotated = key.caller, key.previous_until is not None
    specs = (caller.limits, caller.user_limits, caller.cache)
    limits, user_limits, cache = (
        None if spec is None else spec.model_dump(mode="json", exclude_none=True) for spec in specs
    )
    return KeyOnWire(
        key.id, caller.name, key.digest, caller.max_priority, caller.default_priority,
        caller.models, caller.trust_user_headers, caller.group, (limits, user_limits, cache),
        _left(key.expires_at, now),
        key.previous if is_rotated else None,
        _left(key.previous_until, now),
    )  # fmt: skip


def _held(key: KeyOnWire, now: float) -> HeldKey:
    limits, user_limits, cache = key.specs
    caller = Caller(
        key.id,
        key.name,
        key.max_priority,
        key.models,
        trust_user_headers=key.trust_user_headers,
        default_priority=key.default_priority,
        group=key.group,
        limits=None if limits is None else LimitSpec.model_validate(limits),
        user_limits=None if user_limits is None else LimitSpec.model_validate(user_limits),
        cache=None if cache is None else CacheSpec.model_validate(cache),
    )
    held = HeldKey(key.id, caller, key.digest, _moment(key.expires_in, now))
    if key.previous is None:
        return held
    return HeldKey(
        key.id, caller, key.digest, held.expires_at, key.previous, _moment(key.previous_for, now)
    )


def _left(moment: float | None, now: float) -> float | None:
    return None if moment is None else moment - now


def _moment(left: float | None, now: float) -> float | None:
    return None if left is None else now + left


# Models.


NO_MODELS = Models((), {}, {}, frozenset(), (), (), may_grow=True, nodes=0, most_slots_of_a_host=0)


class ModelSnapshots:
    """The models that nodes serve, as all edges are told of them: made once for all."""

    def __init__(
        self, index: ModelIndex, most_slots: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        """`most_slots`: of a host."""
        self._index, self._most_slots, self._clock = index, most_slots, clock
        self._models = NO_MODELS
        self._of: tuple[object, frozenset[str]] | None = None
        self._version: int | None = None
        self._looked_at = 0.0

    def current(self) -> Models:
        """What an edge must know: the same object until something of it changes."""
        index, now = self._index, self._clock()
        of = index.aliases, index.paused
        is_same = self._of is not None and self._of[0] is of[0] and self._of[1] == of[1]
        # If no model has come or gone, other figures need not be told at once.
        looks_late = index.version == self._version or now - self._looked_at < LOOK_SECONDS
        if not (is_same and looks_late):
            self._of, self._version, self._looked_at = of, index.version, now
            models = models_of(index, self._most_slots())
            if models != self._models:
                self._models = models
        return self._models


def models_of(index: ModelIndex, most_slots: int) -> Models:
    """The models of an index as they are told. Whether a server is up is not: that is no use."""
    names = index.model_names()
    served: dict[Node, list[str]] = defaultdict(list)
    for name in names:
        for node in index.nodes_for(name):
            served[node].append(name)
    alike = Counter(
        (tuple(models), tuple(sorted(node.spec.labels.items())), server_figures(node, is_up=True))
        for node, models in served.items()
    )
    return Models(
        names,
        dict(index.aliases),
        dict(index.links),
        index.paused,
        tuple([ServerGroup(*group, count) for group, count in alike.items()]),
        tuple(
            (tuple(node.spec.labels.items()), node.name, node.state.value, node.reason)
            for node in islice(index.silent, MOST_SILENT_TOLD)
        ),
        index.may_grow(),
        index.node_count,
        most_slots,
    )


class ModelCopies:
    """The models that nodes serve, as an edge was told last; answers as `ServedModels`."""

    def __init__(self) -> None:
        self._models = NO_MODELS
        self._groups: dict[str, list[ServerGroup]] = {}

    def take(self, models: Models) -> None:
        """What nodes serve has changed."""
        self._models, self._groups = models, defaultdict(list)
        for group in models.groups:
            for name in group.models:
                self._groups[name].append(group)

    @property
    def paused(self) -> frozenset[str]:
        """Public model names that an operator has paused, and other names of such models."""
        return self._models.paused

    @property
    def aliases(self) -> Mapping[str, str]:
        """For names that all nodes which serve them give to one model: its own name."""
        return self._models.aliases

    def model_names(self, labels: NodeLabels = ()) -> tuple[str, ...]:
        """The public model names that nodes serve, declared or reported, down or not."""
        names = self._models.names
        return tuple(name for name in names if self.serves(name, labels)) if labels else names

    def one_name_each(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of the names that servers give to one model: the one that most nodes serve."""
        links, found = self._models.links, dict[str, str]()
        for name in names:
            first = found.setdefault(links.get(name, name), name)
            if self._nodes_of(name) > self._nodes_of(first):
                found[links[name]] = name
        return tuple(found.values())

    def serves(self, model: str, labels: NodeLabels = ()) -> bool:
        """Whether some node serves this public model name, down or not."""
        return bool(self._groups_of(model, labels))

    def may_serve(self, model: str) -> bool:
        """Whether some node serves this public model name, or may yet report that it does."""
        return self._models.may_grow or self.serves(model)

    def not_found_error(
        self, model: str | None, labels: NodeLabels = (), targets: Sequence[str] = ()
    ) -> GatewayError:
        """Why no node can serve this model name; None: the request names no model."""
        silent = [one[1:] for one in self._models.silent if has_labels(dict(one[0]), labels)]
        if silent:
            return errors.no_node_reported(model, silent, self._models.nodes, targets)
        if model is None:
            return errors.invalid_request("'model' is missing, and there is none to use.", "model")
        return errors.model_not_found(model, list(self.model_names(labels)), targets)

    def servers_of(self, models: Iterable[str], labels: NodeLabels = ()) -> list[ServerFigures]:
        """The servers of any of these models, down or not: one of those that are alike."""
        groups = dict.fromkeys(group for name in models for group in self._groups_of(name, labels))
        return [group.figures for group in groups]

    def _groups_of(self, model: str, labels: NodeLabels = ()) -> list[ServerGroup]:
        groups = self._groups.get(model, [])
        return [one for one in groups if has_labels(dict(one.labels), labels)] if labels else groups

    def _nodes_of(self, model: str) -> int:
        return sum(group.count for group in self._groups_of(model))
