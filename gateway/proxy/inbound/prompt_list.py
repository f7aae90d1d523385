"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.proxy.inbound.edits import raw_fields
from gateway.proxy.inbound.large_body import FULL_PARSE_BYTES, Body
from gateway.proxy.time_slicer import TimeSlicer
from gateway.request import Request

MOST_PROMPTS_BYTES = FULL_PARSE_BYTES
"""Of several prompts together: they are told apart in one go."""

MOST_REPEATED_BYTES = 8 << 20
"""Bytes of what is sent again with each prompt, of all of them together."""

_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


RequestMaker = Callable[[int, bytes], Generator[None, None, Request]]
"""Makes a request of a prompt's number and its body, a step at a time. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class PromptList:
    """The prompts of one request."""

    prompts: list[msgspec.Raw]
    other_fields: dict[str, msgspec.Raw]
    """All else that the body says: each of them is sent with it."""
    make_request: RequestMaker
    """Makes the request of one of them."""

    async def sub_request(self, index: int, time_slicer: TimeSlicer) -> Request:
        """The request of one prompt, made in these steps. Raises: GatewayError."""
        body = msgspec.json.encode(self.other_fields | {"prompt": self.prompts[index]})
        return await time_slicer.run(self.make_request(index, body))


def split_prompts(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The prompts that a completion's `prompt` holds, as llama.cpp counts them; empty: it is one.

    A list of numbers, or of numbers and strings mixed, is one prompt; any other list holds one
    an item.
    """
    begin = bytes(memoryview(raw)[:64])
    # Text and token ids need no second look.
    if begin[:1] != b"[" or begin[1:].lstrip()[:1] not in _SEVERAL:
        return []
    try:
        items = _RAWS.decode(raw)
    except msgspec.DecodeError:
        return []
    if len(items) < 2 or any(bytes(item)[:1] not in _SEVERAL for item in items):
        return []
    return items


_SEVERAL = frozenset({b'"', b"[", b"{", b""})
"""How an item begins that is a prompt by itself; nothing: white space stands before it."""


def parse_prompt_list(
    body: Body, raw: msgspec.Raw, limits: LimitSettings, make_request: RequestMaker
) -> PromptList | None:
    """The prompts of this body; None: it is one. Raises: GatewayError 400."""
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
    beside = len(body) - size
    if beside * count > MOST_REPEATED_BYTES:
        raise errors.invalid_request(
            f"The body has {beside} bytes beside 'prompt', which are sent with each of {count} "
            f"prompts: more than {MOST_REPEATED_BYTES} bytes in all. Send fewer at a time.",
            "prompt",
        )
    fields = raw_fields(body)
    fields.pop("prompt")
    return PromptList(prompts or split_prompts(raw), fields, make_request)
