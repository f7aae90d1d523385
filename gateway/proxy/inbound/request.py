"""A request on its way through the proxy: what the HTTP edge has read and nodes are sent.

A completion with several prompts holds each as a request of its own; `proxy/multi_prompt.py` serves
them as one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.lease import LeaseRequest
from gateway.proxy.inbound.edits import raw_fields
from gateway.proxy.inbound.large_body import FULL_PARSE_BYTES, Body, TimeSlicer
from gateway.proxy.json_values import ITEMS_DECODER
from gateway.request import Caller


# A struct of msgspec: a frozen dataclass of so many fields takes sixteen times as long to make.
class Request(msgspec.Struct, frozen=True, eq=False):
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
    bodies: Mapping[str, Body]
    """The body for each of the model names."""
    model_in_body: str | None
    """The model's name in these bodies; None: they name none."""
    caller: Caller
    received_at: float
    lease_request: LeaseRequest
    """All that the scheduler may know of it."""
    stream: bool = False
    """Whether the client asked for a stream."""
    logprobs: bool = False
    """Whether the response contains log probabilities."""
    deadline: float | None = None
    """When the client stops waiting for the complete response."""
    client_has_timer: bool = False
    """Whether the client times out by itself at `deadline`, so that it needs no error."""
    prompt_list: PromptList | None = None
    """The prompts, if there are several to answer one by one (`proxy/multi_prompt.py`)."""


SubRequestMaker = Callable[[int, bytes], Generator[None, None, Request]]
"""Makes a prompt's request of its index and body, in short steps. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class PromptList:
    """The prompts of one request."""

    prompts: list[msgspec.Raw]
    other_fields: dict[str, msgspec.Raw]
    """The body's other fields, which are sent with each prompt."""
    make_request: SubRequestMaker

    async def sub_request(self, index: int, time_slicer: TimeSlicer) -> Request:
        """The request of one prompt. Raises: GatewayError."""
        body = msgspec.json.encode(self.other_fields | {"prompt": self.prompts[index]})
        return await time_slicer.run(self.make_request(index, body))


# Several prompts.

MOST_PROMPTS_BYTES = FULL_PARSE_BYTES
"""Bytes of several prompts together: they are split in one go."""

MOST_REPEATED_BYTES = 8 << 20
"""Bytes of the other fields, times the prompts that they are sent with."""


def split_prompts(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The prompts of a completion's `prompt`, as llama.cpp counts them; empty: it is one.

    A list of numbers, or of numbers and strings mixed, is one prompt; in any other list each item
    is one.
    """
    start = bytes(memoryview(raw)[:64])
    # Text and token ids need no parsing.
    if start[:1] != b"[" or start[1:].lstrip()[:1] not in _PROMPT_STARTS:
        return []
    try:
        items = ITEMS_DECODER.decode(raw)
    except msgspec.DecodeError:
        return []
    if len(items) < 2 or any(bytes(item)[:1] not in _PROMPT_STARTS for item in items):
        return []
    return items


_PROMPT_STARTS = frozenset({b'"', b"[", b"{", b""})
"""The first byte of an item that is a prompt by itself; none: white space comes before it."""


def parse_prompt_list(
    body: Body, raw: msgspec.Raw, limits: LimitSettings, make_request: SubRequestMaker
) -> PromptList | None:
    """The prompts of this body; None: it has one. Raises: GatewayError 400."""
    prompts: list[msgspec.Raw] = []
    if isinstance(body, bytes):
        prompts = split_prompts(raw)
        count = len(prompts)
    else:
        count = body.count_prompts()
    if count < 2:
        return None
    if count > limits.prompts:
        raise errors.invalid_request(
            f"'prompt' holds {count} prompts, the most is {limits.prompts}.", "prompt"
        )
    size = memoryview(raw).nbytes
    if size > MOST_PROMPTS_BYTES:
        raise errors.invalid_request(
            f"'prompt' holds {size} bytes in {count} prompts, the most is {MOST_PROMPTS_BYTES}. "
            "Send fewer at a time.",
            "prompt",
        )
    other_bytes = len(body) - size
    if other_bytes * count > MOST_REPEATED_BYTES:
        raise errors.invalid_request(
            f"The body has {other_bytes} bytes besides 'prompt', which are sent with each of "
            f"{count} prompts: more than {MOST_REPEATED_BYTES} bytes in all. Send fewer at a time.",
            "prompt",
        )
    fields = raw_fields(body)
    fields.pop("prompt")
    return PromptList(prompts or split_prompts(raw), fields, make_request)
