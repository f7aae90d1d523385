"""A request as a plain value: what the HTTP edge has read and later steps decide by."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Headers = list[tuple[bytes, bytes]]
"""Header fields in wire order, with names in lower case."""

Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]
"""What a node can do, by the names of `endpoints` in the inventory."""


class SegmentedBody(Protocol):
    """A large body, which is sent piece by piece."""

    def __len__(self) -> int:
        """Bytes of all pieces."""

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces; they never change."""


class Priority(enum.IntEnum):
    """The classes, highest first: a smaller number is served first."""

    URGENT = 0
    PREMIUM = 1
    NORMAL = 2
    BATCH = 3

    # Enum's own hash runs in Python, several times per request.
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The class's name on the wire: `urgent`, `premium`, `normal`, `batch`."""
        return _LABELS[self]

    @classmethod
    def parse(cls, word: str) -> Priority | None:
        """The class with this label, or None."""
        return _BY_LABEL.get(word.strip().lower())


_LABELS = {priority: priority.name.lower() for priority in Priority}

_BY_LABEL = {label: priority for priority, label in _LABELS.items()}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the holder of a key, or an anonymous address."""

    id: str
    name: str
    max_priority: Priority
    """The highest class that its requests may have."""
    models: frozenset[str] | None = None
    """Public names of the models that it may use; None: all."""
    anonymous: bool = False
    trust_user_headers: bool = False
    """Whether it may name its end users by a header."""
    default_priority: Priority = Priority.NORMAL
    """The class of a request that asks for none."""

    def may_use(self, model: str) -> bool:
        """Whether this caller may use the model of this public name."""
        return self.models is None or model in self.models


@dataclass(slots=True, eq=False)
class Request:
    """A request that can be sent to a node, more than once if attempts fail.

    Times are monotonic seconds of the gateway's clock.
    """

    id: str
    """Unique in this process; not chosen by the client."""
    x_request_id: str
    """`X-Request-ID`: the client's own if it sent a valid one, else `id`."""
    path: str
    """The path as nodes know it, for example `/v1/chat/completions`."""
    header_lines: bytes
    """The client's header lines that nodes get, each with its line end."""
    bodies: dict[str, Any]
    """The body for each name of `model_names`: bytes or a `SegmentedBody`."""
    model_in_body: str | None
    """The model's name in these bodies; None: they name none."""
    caller: Caller
    priority: Priority
    model: str
    """The public name that the client asked for, or the default."""
    model_names: tuple[str, ...]
    """The names that `model` stands for once aliases are resolved, in order of preference."""
    endpoint: Endpoint
    received_at: float
    stream: bool = False
    may_assemble: bool = False
    """Whether a plain response may be assembled from the events of a stream."""
    needs_vision: bool = False
    prompt_field: str | None = None
    """The body's field that holds the prompt."""
    slots: int = 1
    logprobs: bool = False
    """Whether the response contains log probabilities."""
    prompt_tokens: int = 0
    """Estimated tokens of the prompt; rather too few than too many."""
    max_tokens: int | None = None
    llama_cpp_only: bool = False
    """Whether only llama.cpp's own server knows the path."""
    deadline: float | None = None
    """When the client stops waiting for the complete response."""
    client_has_timer: bool = False
    """Whether the client times out by itself at `deadline`, so that it needs no error."""
    failed_nodes: AbstractSet[str] = frozenset()
    """Nodes that failed this request; others are preferred."""
    excluded_nodes: AbstractSet[str] = frozenset()
    """Nodes that can't serve this request; never tried again."""
    unsupported_nodes: AbstractSet[str] = frozenset()
    """Those of `excluded_nodes` that answered with 501: they lack the feature."""
    unsupported_hint: str | None = None
    """The advice of the last node that answered with 501."""
    min_context: int = 0
    """Tokens of context that a node must have, known from an overflow elsewhere."""
    text_bytes: int = 0
    """Bytes of text in the prompt."""
    exact_tokens: int = 0
    """Tokens of the prompt that are known exactly, as they were sent as ids."""
    media_tokens: int = 0
    """Most tokens of its images and sounds."""
    generates: bool = True
    """Whether tokens are generated; embeddings, for one, only read a prompt."""
    prompt_key: Any = None
    """Identifies the prompt's prefixes (`fleet/prompt_tree.py`); None: too short to be cached."""
    expected_tokens: tuple[float, float] | None = None
    """Expected tokens of the prompt and of each answer, once they have been estimated."""
    fairness_key: str = ""
    """Who shares fairly: the caller, or the end user that a trusted caller names."""
    prompt_list: Any = None
    """The prompts, if there are several to answer one by one (`proxy/multi_prompt.py`)."""
    admitted: bool = False
    """Whether it is part of an admitted request, so that a full queue does not refuse it."""
    response_started: bool = False
    """Whether the client has got the head of the response, with a heartbeat."""
    session: str | None = None
    """The session that a header names, within its fairness key; None: no header does."""

    def note_response_started(self) -> None:
        """The client has got the head of the response."""
        self.response_started = True
