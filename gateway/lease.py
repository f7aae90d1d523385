"""The messages between those who ask for a node's slots and the scheduler, which gives leases.

Plain values only: a message names a request by its id and nodes by their names, and says how long
something takes or has taken, never when it was. So either side may have a clock of its own.
"""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol
from urllib.parse import quote

import msgspec

from gateway.config.keys import NodeLabels
from gateway.terms import Endpoint, Priority

HASH_KEY_BYTES = 32
_DIGEST_BYTES = 8


class KeyedHash:
    """Digests of 8 bytes (BLAKE2b) that are the same in all processes with the same key.

    Nobody without the key can make two prompts whose digests are equal. Both processes of a
    handover have one key, and so must all those that ask one scheduler.
    """

    __slots__ = ("_empty", "key")

    def __init__(self, key: bytes | None = None) -> None:
        self.set_key(key or secrets.token_bytes(HASH_KEY_BYTES))

    def set_key(self, key: bytes) -> None:
        """Make digests with this key from now on; they agree with none from before."""
        self.key = key
        self._empty = blake2b(digest_size=_DIGEST_BYTES, key=key)

    def digest(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """The digest of all parts together, wherever one ends and the next begins."""
        state = self._empty.copy()
        for part in parts:
            state.update(part)
        return state.digest()

    def chain(self, before: bytes, parts: Iterable[bytes]) -> list[bytes]:
        """A digest for each part, which stands for all parts up to its end.

        `before`: the digest of what precedes the first part, or any other mark.
        """
        # A new state for each digest: it costs less than to go on with one, whose last bytes
        # would be compressed once for the digest and once more with what follows.
        copy, digests = self._empty.copy, []
        for part in parts:
            state = copy()
            state.update(before + part)
            before = state.digest()
            digests.append(before)
        return digests


def block_numbers(digests: Sequence[bytes]) -> tuple[int, ...]:
    """Digests as numbers of 64 bits, signed."""
    return struct.unpack(f"<{len(digests)}q", b"".join(digests))


class PromptKey(msgspec.Struct, frozen=True, eq=False):
    """A prompt, reduced to what caches depend on: its prefixes and its length.

    The prompts of running requests are told apart by their `id`.
    """

    blocks: tuple[int, ...]
    """Each stands for the prompt up to its end, never for itself alone; 64 bits, signed."""
    tokens: float  # an estimate of the whole prompt's tokens
    ends: tuple[int, ...] = ()
    """The prompt's size at the end of each block, bytes; empty: blocks of one size."""
    size: int = 0  # bytes of the whole prompt; 0: it ends where its last block does
    omits_volatile: bool = False
    """Whether the blocks leave out lines that the node gets, and may ignore or not."""

    def share_of(self, blocks: int) -> float:
        """The share of the prompt that its first so many blocks are."""
        if not blocks:
            return 0.0
        if not self.ends:
            return blocks / len(self.blocks)
        return self.ends[blocks - 1] / (self.size or self.ends[-1])

    @property
    def ends_on_block(self) -> bool:
        """Whether the last block ends where the prompt does."""
        return bool(self.blocks) and self.size in {0, self.ends[-1] if self.ends else 0}


# Structs of msgspec: a frozen dataclass of so many fields takes sixteen times as long to make. The
# garbage collector need not look at them: plain values are never part of a cycle.
class LeaseCaller(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Who asks, with which priority, and how long the request may wait."""

    id: str
    fairness_key: str  # who shares fairly: the caller, or the end user that a trusted caller names
    priority: Priority = Priority.NORMAL
    session: str | None = None
    """The session that a header names, within its fairness key; None: no header does."""
    time_limit: float | None = None
    """Seconds from the request's receipt until the client stops waiting for the response."""
    admitted: bool = False
    """Whether it is part of an admitted request, so that a full queue does not refuse it."""
    patient: bool = False
    """Whether it waits until its time limit, however long that is. In a full queue it gives way to
    other requests of its caller."""
    yields: bool = False
    """Whether it gives up its slot to a higher class that would have to wait, and goes on later. It
    is patient, too."""
    times_yielded: int = 0  # how often it has done so


class WantedNode(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a node must have and be able to do."""

    model: str  # the public name that the client asked for, or the default
    model_names: tuple[str, ...]
    """The names that `model` stands for once aliases are resolved, in order of preference."""
    endpoint: Endpoint = "chat"
    needs_vision: bool = False
    llama_cpp_only: bool = False  # whether only llama.cpp's own server will do
    node_labels: NodeLabels = ()  # labels that its node must have: its pool. Empty: any node.
    stream: bool = False
    may_assemble: bool = False
    """Whether a plain response may be assembled from the events of a stream."""
    prompt_cache: bool = True  # whether a node may serve its prompt from its cache
    resume_key: tuple[object, ...] | None = None
    """For a node of the same kind: its `ServerProperties.resume_key`; None: any will do."""
    feature: str = ""  # what the error calls it if no node supports it; no decision depends on it
    prompt_field: str | None = None  # the body's field that holds the prompt, for errors
    slots_field: str = "n"  # the body's field that asks for so many slots, for errors


class RequestSize(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How much work the request is for a node."""

    slots: int = 1
    generates: bool = True  # whether tokens are generated; embeddings, for one, only read a prompt
    prompt_tokens: int = 0  # estimated tokens of the prompt; rather too few than too many
    text_bytes: float = 0
    exact_tokens: int = 0  # tokens of the prompt that are known exactly, as they were sent as ids
    media_tokens: int = 0  # most tokens of its images and sounds
    max_tokens: int | None = None
    body_bytes: int = 0  # bytes of the whole body, a bound of the prompt's tokens
    prompt_key: PromptKey | None = None
    """Identifies the prompt's prefixes; None: too short to be cached."""


class LeaseRequest(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All that the scheduler may know of a request; it does not change while the request waits."""

    id: str  # the request's, unique in this process
    caller: LeaseCaller
    wanted: WantedNode
    size: RequestSize


@dataclass(frozen=True, slots=True)
class Tried:
    """What the earlier attempts of a request have shown about nodes and about the request."""

    failed_nodes: frozenset[str] = frozenset()
    """Nodes that failed this request; others are preferred."""
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes that can't serve this request; never tried again."""
    unsupported_nodes: frozenset[str] = frozenset()
    """Those of `excluded_nodes` that answered with 501: they lack the feature."""
    unsupported_hint: str | None = None  # the advice of the last node that answered with 501
    min_context: int = 0
    """Tokens of context that a node must have, known from an overflow elsewhere."""
    statuses: tuple[int, ...] = ()
    """Server errors of nodes; the same from two nodes is the request's own fault."""
    may_assemble: bool = True
    """False: a stream could not be assembled, so a plain response is asked for."""
    pool_overflows: int = 0
    """How often it ended because the pool of tokens that the slots of its node share was full."""
    limited_nodes: frozenset[str] = frozenset()
    """Those of `failed_nodes` that want no request for a while (429), as they said last."""
    retry_after: float | None = None
    """The shortest time for which one of them wants none, in seconds; None: none has said it."""

    @property
    def is_limited(self) -> bool:
        """Whether nodes want no request for a while, and all others that it was at refused it."""
        return bool(self.limited_nodes) and (
            self.failed_nodes <= self.limited_nodes | self.excluded_nodes
        )

    @property
    def was_sent(self) -> bool:
        """Whether it has been at a node, which has not served it."""
        return bool(self.failed_nodes or self.pool_overflows)

    def overflowed_on(self, node: str) -> Tried:
        """What is known after the shared pool of this node was full.

        The node may serve it later; if it failed though it ran alone, others are preferred.
        """
        tried = self.failed_on(node) if self.pool_overflows > 1 else self
        return replace(tried, pool_overflows=self.pool_overflows + 1)

    def failed_on(self, node: str) -> Tried:
        """What is known after this node has failed the request."""
        return replace(
            self,
            failed_nodes=self.failed_nodes | {node},
            limited_nodes=self.limited_nodes - {node},
        )

    def limited_by(self, node: str, retry_after: float | None) -> Tried:
        """What is known after this node has said that it wants no request for so many seconds."""
        waits = [one for one in (self.retry_after, retry_after) if one is not None]
        return replace(
            self.failed_on(node),
            limited_nodes=self.limited_nodes | {node},
            retry_after=min(waits, default=None),
        )

    def refused_by(self, node: str) -> Tried:
        """What is known after this node has refused the request for good."""
        return replace(self, excluded_nodes=self.excluded_nodes | {node})

    def unsupported_by(self, node: str, hint: str | None) -> Tried:
        """What is known after this node has said, with a hint, that it lacks the feature (501)."""
        nodes = self.unsupported_nodes | {node}
        return replace(self, unsupported_nodes=nodes, unsupported_hint=hint)


NOTHING_TRIED = Tried()


class QueuePosition(msgspec.Struct, frozen=True, eq=False):
    """The place of one waiting request in the queue."""

    request_id: str
    position: int  # 1: it is likely to go first
    waited_seconds: float
    expected_seconds: float | None = None  # seconds until it is expected to start; None: unknown


class BatchRoom(msgspec.Struct, frozen=True, eq=False):
    """The room for requests of class `batch` on the nodes that serve one model."""

    slots: int  # slots that the class may use at all: those outside the reserve, busy ones included
    free: int  # of them, those that it could take now
    soon: int
    """Of them, those that are expected to come free within the seconds that were asked for."""
    waiting: int  # slots for which requests of this class wait already
    ahead: int  # slots for which requests of higher classes wait
    nodes: int = 1  # nodes that have these slots


class BatchRoomService(Protocol):
    """The scheduler, as it is seen by those who feed it with work that can wait."""

    def raise_class(self, request_ids: Collection[str], priority: Priority) -> set[str]:
        """Let requests wait in this class if theirs is lower, and yield no more while they run.

        Returns the ids of those that wait; some may not be known.
        """

    def batch_room(
        self,
        model_names: Sequence[str],
        seconds: float,
        *,
        endpoint: Endpoint = "chat",
        node_labels: NodeLabels = (),
    ) -> BatchRoom:
        """The room for requests for these names, as in `LeaseRequest`, within so many `seconds`.

        It looks at all nodes of the model and at all that waits: to be asked twice a second or so.
        """


# What is granted.


class NodeInfo(msgspec.Struct, frozen=True, eq=False):
    """A node, as far as those know it who send requests to it.

    Made once for each node, and anew when its inventory entry or its server's properties change.
    """

    name: str
    tier: str  # `cpu` or `gpu`
    kind: str  # `llama.cpp` or `openai`
    connect_timeout: float | None  # seconds; None: as the settings say. So are the next three.
    first_byte_timeout: float | None
    silence_timeout: float | None
    total_timeout: float | None
    context: int | None  # tokens of one slot; None: unknown
    resume_key: tuple[object, ...]
    """Equal on two nodes if one can resume the other's stream; see `WantedNode.resume_key`."""
    started_by_up: bool = False  # whether `llama-gateway up` started its server
    query: str = ""
    """Of every request to it, so that a router loads no model for it; empty: its server is no
    router. One that has this is one of a router's models, and each request must name it."""
    connections: object = None
    """The node's `transport.pool.ConnectionPool`, which rides along within one process. It is no
    part of the message: another process would open connections of its own."""

    def target(self, path: str, model: str = "") -> bytes:
        """A path as it is requested of the node; `model`: its own name, where no body has it."""
        if not self.query:
            return path.encode()
        named = f"model={quote(model, safe='')}&" if model else ""
        return f"{path}{'&' if '?' in path else '?'}{named}{self.query}".encode()


class ExpectedReading(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How long the node is expected to read the prompt; in seconds."""

    prompt_tokens: int = 0
    seconds: float | None = None
    """Until it is expected to have been read; None: the node's speed is unknown."""
    grace: float = 0.0  # that the node may take to read it, whatever the settings say
    wake: float = 0.0
    """That the node may take besides, since its server sleeps or may have fallen asleep."""


class GrantedLease(msgspec.Struct, frozen=True, eq=False):
    """Slots of a node, granted to one request until its attempt is reported as ended."""

    id: int
    node: NodeInfo
    model: str  # the one of the request's `model_names` for which it was granted
    served_name: str  # the node's own name for this model
    stream: bool
    """Whether the node must be asked for a stream; False also where it is known not to stream."""
    reading: ExpectedReading
    slots: int = 1
    fallback: str | None = None
    """Why the node is not of the tier that the request's class belongs to."""


# What is reported.


class Fault(enum.Enum):
    """Who is to blame for the end of an attempt."""

    NOBODY = "nobody"
    NODE = "node"
    NODE_OR_REQUEST = "node or request"
    """A request can make a node too slow, kill it, or have it send an unusable response, and would
    do so on every node."""


class NodeError(msgspec.Struct, frozen=True, eq=False):
    """What the error response of a node shows about the node."""

    is_loading: bool = False
    retry_after: float | None = None  # seconds for which it wants no request; None: it does not say
    lacks_endpoint: bool = False  # whether it would refuse all requests of this endpoint
    hint: str | None = None  # its advice with that refusal
    key_rejected_at: str | None = None
    """The path for which it rejected the gateway's key; None: it did not."""


class AttemptReport(msgspec.Struct, frozen=True, eq=False, array_like=True, tag=True):
    """How the attempt under a lease ended."""

    lease_id: int
    outcome: str  # the word of metrics and logs: `ok`, or the failure
    status: int  # the response's; 0: its head had not come
    sent: bool
    node_done: bool
    """Whether the node has nothing left to do for it. Else its slots are held until they are seen
    to be idle."""
    response_began: bool
    """Whether its response was the client's, or the beginning of it. `settle` follows then."""
    fault: Fault = Fault.NOBODY
    error: NodeError | None = None  # what its error response shows about the node
    unreachable: str | None = None  # why no connection could be made, in words
    prompt_read: tuple[int, int] | None = None
    """Tokens of the prompt that the node had read or cached by then, and those that it had cached,
    as it said itself; None: it did not."""
    came_plain: bool = False  # whether the response came plain though a stream was asked for
    resumes: bool = False  # whether it was to resume a response, whose tokens are counted already


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one response; `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: dict[str, Any] | None = None  # llama.cpp's own figures of the generation, unchecked


class UsageReport(msgspec.Struct, frozen=True, eq=False, array_like=True, tag=True):
    """What the response of an ended attempt took."""

    lease_id: int
    attempt: Usage  # of this attempt: as the node reported it, else as it was counted
    reported: Usage | None
    """Of the client's own prompt and the whole response, resumed or not, as nodes reported it;
    None: this node reported nothing."""
    sent_tokens: int  # tokens of this attempt that went to the client, as counted
    complete: bool = True  # whether the response ended by itself


class AttemptCharge(msgspec.Struct, frozen=True, gc=False):
    """What an ended attempt took of its node."""

    cost: float = 0.0  # in the settings' currency
    slot_seconds: float = 0.0  # seconds for which it held its slots, times their number
    prompt_tokens: int = 0
    """Tokens of the prompt that the node has read, as far as is known. It is 0 where the node has
    reported its tokens, as are the next two."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_seconds: float | None = None  # from its grant to its first content; None: unknown
    decode_seconds: float | None = None  # and from then to its end


NOTHING_CHARGED = AttemptCharge()


NodeQuestion = Literal["has_other_node", "has_larger_context", "has_cpu_node", "unsupported_error"]
"""Whether a node is alive that could take a request and has not failed it; whether one has the
context that it is known to need; whether a CPU node of its pool is alive that has not failed it.
The last is answered with no, or raised: the error of a request that no node supports (501)."""


class LeaseService(Protocol):
    """The scheduler, as the proxy sees it: asked for leases, and told how their attempts go.

    Each lease ends with one report to `ended`. Then `settle` may follow some time later, when
    nobody waits for it.
    """

    # Ask for a lease.

    def lease_now(self, request: LeaseRequest, tried: Tried, age: float, /) -> GrantedLease | None:
        """A lease for a request that was received `age` seconds ago; None: it must wait.

        Raises: GatewayError, if no node can serve it, or not in time.
        """

    async def wait_for_lease(
        self, request: LeaseRequest, tried: Tried, age: float, *, response_started: bool = False
    ) -> GrantedLease:
        """Queue until a slot is granted; call after `lease_now` returned None.

        `response_started`: the client has the head of a response. Raises: GatewayError.
        """

    # Ask where else a request could go.

    async def ask_nodes(
        self, what: NodeQuestion, request: LeaseRequest, tried: Tried, *, but_paused: bool = False
    ) -> bool:
        """Ask one of `NodeQuestion`; `but_paused`: nodes that want no request now don't count.

        Raises: GatewayError, also where no node serves the request.
        """

    def resume_key_of(self, props: object) -> tuple[object, ...]:
        """The `resume_key` of a server that answers `/props` like this."""

    def most_slots_of_a_host(self) -> int:
        """The slots of the largest host: all its requests may have to move at once."""

    # Report how the attempt goes.

    def may_start(self, lease_id: int) -> bool:
        """Whether the request may be written to the node now, at once; asked just before.

        False: its lease is too old, and void. `ended` follows, and the request asks again.
        """

    def reading_began(self, lease_id: int) -> None:
        """The head of a streamed response has come: a slot reads the prompt."""

    def content_began(self, lease_id: int) -> None:
        """The first content has come: the prompt has been read."""

    def content_went_on(self, lease_id: int, tokens: int) -> None:
        """More content has come since the last report, a second ago or so: the node is alive.

        `tokens`: how many have come of the stream, as counted by events; 0: it is not known how
        fast the node writes them, for example since the client lags.
        """

    def response_received(self, lease_id: int) -> None:
        """The whole response has come: the slots are free, though the client still reads it."""

    def answered(self, lease_id: int) -> None:
        """The node answers a request that other nodes have failed: those were to blame."""

    def is_silence_excused(self, lease_id: int) -> bool | None:
        """Whether the node reads another prompt, so that it may be silent meanwhile.

        None: that is being found out.
        """

    def pool_overflowed(self, lease_id: int) -> bool:
        """The node says that its context is full: whether its slots share that, as is known now."""

    # Report how it ended.

    def ended(self, report: AttemptReport) -> AttemptCharge:
        """The attempt is over. Each lease ends exactly once.

        Returns what it took if no response began; else `settle` does.
        """

    def settle(self, report: UsageReport, request: LeaseRequest) -> AttemptCharge:
        """Count what an ended response took.

        `request`: the client's own, of which the attempt may be a resumption.
        """

    def discard(self, request_id: str) -> None:
        """What the attempts of this request took so far has brought its client nothing.

        So the operator pays for it. `request_id`: as in `LeaseRequest`.
        """
