"""The messages between those who ask for a node's slots and the scheduler, which gives leases.

Plain values only: a message names a request by its id and nodes by their names, and says how long
something takes or has taken, never when it was. So either side may have a clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from gateway.request import Endpoint, Priority


class PromptKey(msgspec.Struct, frozen=True, eq=False):
    """A prompt, reduced to what caches depend on: its prefixes and its length.

    The prompts of running requests are told apart by their `id`.
    """

    blocks: tuple[int, ...]
    """Each stands for the prompt up to its end, never for itself alone; 64 bits, signed."""
    tokens: float
    """An estimate of the whole prompt's tokens."""
    ends: tuple[int, ...] = ()
    """The prompt's size at the end of each block, bytes; empty: blocks of one size."""
    size: int = 0
    """Bytes of the whole prompt; 0: it ends where its last block does."""
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


# Structs of msgspec: a frozen dataclass of so many fields takes sixteen times as long to make.
class LeaseRequest(msgspec.Struct, frozen=True, eq=False):
    """All that the scheduler may know of a request; it does not change while the request waits."""

    id: str
    """The request's, unique in this process."""
    model: str
    """The public name that the client asked for, or the default."""
    model_names: tuple[str, ...]
    """The names that `model` stands for once aliases are resolved, in order of preference."""
    endpoint: Endpoint
    priority: Priority
    caller: str
    """The caller's id."""
    fairness_key: str
    """Who shares fairly: the caller, or the end user that a trusted caller names."""
    slots: int = 1
    generates: bool = True
    """Whether tokens are generated; embeddings, for one, only read a prompt."""
    stream: bool = False
    """Whether the response must be a stream."""
    may_assemble: bool = False
    """Whether a plain response may be assembled from the events of a stream."""
    needs_vision: bool = False
    llama_cpp_only: bool = False
    """Whether only llama.cpp's own server will do."""
    prompt_tokens: int = 0
    """Estimated tokens of the prompt; rather too few than too many."""
    text_bytes: float = 0
    """Bytes of text in the prompt."""
    exact_tokens: int = 0
    """Tokens of the prompt that are known exactly, as they were sent as ids."""
    media_tokens: int = 0
    """Most tokens of its images and sounds."""
    max_tokens: int | None = None
    body_bytes: int = 0
    """Bytes of the whole body, a bound of the prompt's tokens."""
    prompt_key: PromptKey | None = None
    """Identifies the prompt's prefixes; None: too short to be cached."""
    session: str | None = None
    """The session that a header names, within its fairness key; None: no header does."""
    time_limit: float | None = None
    """Seconds from the request's receipt until the client stops waiting for the response."""
    feature: str = ""
    """What the error calls it if no node supports it; no decision depends on it."""
    prompt_field: str | None = None
    """The body's field that holds the prompt, for errors."""
    slots_field: str = "n"
    """The body's field that asks for so many slots, for errors."""
    admitted: bool = False
    """Whether it is part of an admitted request, so that a full queue does not refuse it."""
    resume_key: tuple[object, ...] | None = None
    """For a node of the same kind: its `ServerProperties.resume_key`; None: any will do."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What the earlier attempts of a request have shown about nodes and about the request."""

    failed_nodes: frozenset[str] = frozenset()
    """Nodes that failed this request; others are preferred."""
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes that can't serve this request; never tried again."""
    unsupported_nodes: frozenset[str] = frozenset()
    """Those of `excluded_nodes` that answered with 501: they lack the feature."""
    unsupported_hint: str | None = None
    """The advice of the last node that answered with 501."""
    min_context: int = 0
    """Tokens of context that a node must have, known from an overflow elsewhere."""
    statuses: tuple[int, ...] = ()
    """Server errors of nodes; the same from two nodes is the request's own fault."""
    may_assemble: bool = True
    """False: a stream could not be assembled, so a plain response is asked for."""

    def failed_on(self, node: str) -> Tried:
        """The same after this node has failed the request."""
        return replace(self, failed_nodes=self.failed_nodes | {node})

    def refused_by(self, node: str) -> Tried:
        """The same after this node has refused the request for good."""
        return replace(self, excluded_nodes=self.excluded_nodes | {node})

    def unsupported_by(self, node: str, hint: str | None) -> Tried:
        """The same after this node has said that it lacks the feature (501), with its own hint."""
        nodes = self.unsupported_nodes | {node}
        return replace(self, unsupported_nodes=nodes, unsupported_hint=hint)


NOTHING_TRIED = Tried()


class QueuePosition(msgspec.Struct, frozen=True, eq=False):
    """The place of one waiting request in the queue."""

    request_id: str
    position: int
    """1: it is likely to go first."""
    waited_seconds: float
    expected_seconds: float | None = None
    """Seconds until it is expected to start; None: unknown."""
