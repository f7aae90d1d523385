"""One request as a plain value: what the edge has read, and all that later steps decide by."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Headers = list[tuple[bytes, bytes]]
"""Header fields in wire order, names in lower case."""

Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]
"""What a node can do, as `endpoints` in the inventory names it."""


class SegmentedBody(Protocol):
    """A large body: what is sent is its pieces, one after the other."""

    def __len__(self) -> int:
        """Bytes of all of them."""

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces, which nobody changes."""


class Priority(enum.IntEnum):
    """The classes, best first: a smaller number goes first."""

    URGENT = 0
    PREMIUM = 1
    NORMAL = 2
    BATCH = 3

    # Enum's own hash runs in Python, several times for each request.
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The class's name on the wire: `urgent`, `premium`, `normal`, `batch`."""
        return _LABELS[self]

    @classmethod
    def parse(cls, word: str) -> Priority | None:
        """The class of that name, or None."""
        return _BY_LABEL.get(word.strip().lower())


_LABELS = {priority: priority.name.lower() for priority in Priority}

_BY_LABEL = {label: priority for priority, label in _LABELS.items()}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a key's holder, or an anonymous address."""

    id: str
    name: str
    max_priority: Priority
    """The highest class this caller gets, whatever it asks for."""
    models: frozenset[str] | None = None
    """Public model names it may use; None: all."""
    anonymous: bool = False
    trust_user_headers: bool = False
    """Whether it is trusted to name its end users by header."""
    default_priority: Priority = Priority.NORMAL
    """The class of a request that names none."""

    def may_use(self, model: str) -> bool:
        """Whether this caller may use the public model name."""
        return self.models is None or model in self.models


@dataclass(slots=True, eq=False)
class Request:
    """A request that may be sent to a node, several times if need be.

    Times are monotonic seconds of the gateway's clock.
    """

    id: str
    """Unique in this process, whatever the client sent."""
    x_request_id: str
    """`X-Request-ID`: the client's own if it sent a sane one, else `id`."""
    path: str
    """The path as nodes know it, for example `/v1/chat/completions`."""
    header_lines: bytes
    """Header lines of the client's that are passed on, each with its line end."""
    bodies: dict[str, Any]
    """What is sent, for each name of `candidates`: bytes, or a large body (`Pieces`)."""
    model_in_body: str | None
    """The model's name in those bodies; None: they name none."""
    caller: Caller
    priority: Priority
    model: str
    """The public name asked for, or the default."""
    model_names: tuple[str, ...]
    """The names it stands for after aliases, in order of preference."""
    endpoint: Endpoint
    received_at: float
    stream: bool = False
    may_assemble: bool = False
    """Whether its plain answer may be made of a stream's events."""
    needs_vision: bool = False
    prompt_field: str | None = None
    """The body's field that holds the prompt."""
    slots: int = 1
    logprobs: bool = False
    """Whether the answer tells those of tokens that might have been."""
    prompt_tokens: int = 0
    """An estimate that would rather be too low; tokens."""
    max_tokens: int | None = None
    llama_cpp_only: bool = False
    """Only llama.cpp's own server knows the path."""
    deadline: float | None = None
    """When the client stops waiting for the whole answer."""
    client_has_timer: bool = False
    """Whether it does so by a timer of its own, and needn't be told in that moment."""
    failed_nodes: AbstractSet[str] = frozenset()
    """Nodes that failed this request: others go first."""
    excluded_nodes: AbstractSet[str] = frozenset()
    """Nodes that said they can't serve it: never asked again."""
    unsupported_nodes: AbstractSet[str] = frozenset()
    """Those of them that said that they don't do this at all (501)."""
    unsupported_hint: str | None = None
    """What the last of these advised."""
    min_context: int = 0
    """Tokens a node must have room for, learnt from an overflow elsewhere."""
    text_bytes: int = 0
    """Bytes of the prompt's text."""
    exact_tokens: int = 0
    """Tokens of the prompt that are known exactly, since they were sent as ids."""
    media_tokens: int = 0
    """Tokens that its pictures and sounds may have."""
    generates: bool = True
    """Whether the answer is generated; embeddings, say, are read only."""
    prompt_key: Any = None
    """Its fingerprint (`fleet/prompt_tree.py`); None: no cache is worth thinking of."""
    expected_tokens: tuple[float, float] | None = None
    """Expected tokens of the prompt and of each answer, once somebody has asked."""
    fairness_key: str = ""
    """Whom the queue is fair to: the caller, or the end user that a trusted one names."""
    prompt_list: Any = None
    """The prompts that are answered one by one (`proxy/multi_prompt.py`); None: it is one."""
    admitted: bool = False
    """Whether it is part of one that has been let in: no length of the line refuses it."""
    response_started: bool = False
    """Whether its client has had the head of a reply, to be told that it is not forgotten."""
    session: str | None = None
    """The conversation or editor that it belongs to, if a header names one; with its party."""
