"""Completions with several prompts: `prompt` as a list of prompts, checked and split.

Each prompt becomes a request of its own; `proxy/multi_prompt.py` serves them as one.
"""

from __future__ import annotations

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.proxy.inbound.edits import raw_fields
from gateway.proxy.inbound.large_body import FULL_PARSE_BYTES, Body
from gateway.proxy.inbound.request import PromptList, SubRequestMaker
from gateway.proxy.json_values import ITEMS_DECODER

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
