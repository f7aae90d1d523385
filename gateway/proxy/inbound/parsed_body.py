"""The fields of a JSON body that the gateway looks at, parsed without building the others."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from gateway import errors
from gateway.proxy.inbound.media import MediaCost, measure_media
from gateway.proxy.json_values import FIELDS_DECODER
from gateway.proxy.tokens import Number

BYTES_PER_TOKEN = 4
"""English text has about 4 bytes per token in the tokenizers of today's open models. JSON around
it makes estimates low on purpose, since they only ever exclude nodes."""

PROMPT_FIELDS = ("messages", "prompt", "input")
"""Fields of `ParsedBody` that hold a prompt."""

MISSING = msgspec.Raw()
"""The value of a field that the body does not have."""


class ParsedBody(msgspec.Struct):
    """The fields that decide where a request goes; everything else stays bytes.

    Fields that are only ever removed or bounded are here so that their presence is known.
    """

    model: str | None = None
    stream: bool | None = None
    n: Number = None
    max_tokens: Number = None
    max_completion_tokens: Number = None
    max_output_tokens: Number = None
    n_predict: Number = None
    n_probs: Number = None
    top_logprobs: Number = None
    logprobs: msgspec.Raw = MISSING
    n_cmpl: Number = None
    best_of: Number = None
    repeat_last_n: Number = None
    dry_penalty_last_n: Number = None
    priority: Any = None
    service_tier: Any = None
    id_slot: msgspec.Raw = MISSING
    lora: msgspec.Raw = MISSING
    suffix: msgspec.Raw = MISSING
    prompt: msgspec.Raw = MISSING
    messages: msgspec.Raw = MISSING
    input: msgspec.Raw = MISSING
    tools: msgspec.Raw = MISSING
    system: msgspec.Raw = MISSING
    instructions: msgspec.Raw = MISSING
    grammar: msgspec.Raw = MISSING
    json_schema: msgspec.Raw = MISSING
    response_format: msgspec.Raw = MISSING
    text: msgspec.Raw = MISSING
    output_config: msgspec.Raw = MISSING
    output_format: msgspec.Raw = MISSING
    stop: msgspec.Raw = MISSING
    stop_sequences: msgspec.Raw = MISSING
    logit_bias: msgspec.Raw = MISSING
    samplers: msgspec.Raw = MISSING
    dry_sequence_breakers: msgspec.Raw = MISSING
    response_fields: msgspec.Raw = MISSING
    grammar_triggers: msgspec.Raw = MISSING
    conversation: msgspec.Raw = MISSING


_PARSED_BODY = msgspec.json.Decoder(ParsedBody)

_ERROR_WITH_PATH = re.compile(r"^(?P<problem>.*?) - at `\$\.?(?P<field>[^`]*)`$", re.DOTALL)


def parse_body(body: bytes) -> ParsedBody:
    """Parse `body`. Raises: GatewayError 400."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise errors.invalid_json(f"byte {error.start} is not UTF-8") from None
    try:
        parsed = _PARSED_BODY.decode(body)
        # Usually "model" occurs once, and only an escape could hide another spelling of it.
        if body.lower().count(b'"model"') != (parsed.model is not None) or (
            body.find(b"\\") >= 0 and _may_spell_model(body)
        ):
            _check_field_names(body)
        return parsed
    except msgspec.ValidationError as error:
        text = str(error)
        found = _ERROR_WITH_PATH.match(text)
        if found is None:
            raise errors.invalid_request(f"The body is not what was expected: {text}.") from None
        name = found["field"] or None
        message = f"'{name}': {found['problem']}." if name else f"{found['problem']}."
        raise errors.invalid_request(message, name) from None
    except msgspec.DecodeError as error:
        detail = "it is empty" if not body.strip() else str(error)
        raise errors.invalid_json(detail) from None
    except RecursionError:
        # The depth that raises this differs between Pythons. All of them read more than
        # `limits.json_depth`, so `prepare` gives the same answer for what they can read.
        raise errors.invalid_request("The body is nested too deeply.") from None


def _may_spell_model(body: bytes) -> bool:
    """Whether an escape spells a letter of `model`, or one of its neighbours."""
    return body.find(b"\\u004") >= 0 or body.find(b"\\u006") >= 0


def _check_field_names(body: bytes) -> None:
    if any(map(is_misspelt_model, FIELDS_DECODER.decode(body))):
        raise misspelt_model_error()


def is_misspelt_model(name: str) -> bool:
    """Whether a field's name differs from `model` only in case.

    Go's JSON decoder would read it as the model's name, and servers in Go may stand behind the
    gateway. No character beyond ASCII folds to one of these letters.
    """
    return len(name) == len("model") and name != "model" and name.lower() == "model"


def misspelt_model_error() -> errors.GatewayError:
    """400: servers differ in how they read this name."""
    return errors.invalid_request(
        "The model's name is given under 'model', in lower case.", "model"
    )


def has_limited_options(parsed: ParsedBody) -> bool:
    """Whether any field is set that `request_limits` checks."""
    # Compared as one tuple: field by field costs twice as much.
    return (
        parsed.tools,
        parsed.grammar,
        parsed.json_schema,
        parsed.response_format,
        parsed.text,
        parsed.output_config,
        parsed.output_format,
        parsed.stop,
        parsed.stop_sequences,
        parsed.logit_bias,
        parsed.samplers,
        parsed.dry_sequence_breakers,
        parsed.response_fields,
        parsed.grammar_triggers,
    ) != _NO_LIMITED_OPTIONS


_NO_LIMITED_OPTIONS = (MISSING,) * 14


def has_edited_options(parsed: ParsedBody) -> bool:
    """Whether any field is set for which `edits.required_edit` may remove or lower something."""
    return (
        parsed.priority,
        parsed.n_probs,
        parsed.top_logprobs,
        parsed.logprobs,
        parsed.id_slot,
        parsed.lora,
        parsed.response_fields,
        parsed.repeat_last_n,
        parsed.dry_penalty_last_n,
    ) != _NO_EDITED_OPTIONS


_NO_EDITED_OPTIONS = (None, None, None, MISSING, MISSING, MISSING, MISSING, None, None)

TOKEN_IDS_START = re.compile(rb"\s*\[\s*\d")

SHORTEST_IMAGE = 256
"""Bytes; a shorter prompt holds no image."""


class PromptSize(NamedTuple):
    """A prompt's size, from which `scheduling/demand_model.py` estimates its tokens."""

    text_bytes: int = 0
    """Bytes of text, as UTF-8."""
    exact_tokens: int = 0
    """Tokens that the client sent as ids."""
    media_tokens: int = 0
    """Estimated tokens of images and audio."""


def measure_prompt(*fields: msgspec.Raw) -> PromptSize:
    """The size of the prompt that these fields form; missing fields count nothing."""
    text = ids = tokens = 0
    for raw in fields:
        if raw is MISSING:
            continue
        data = bytes(raw)
        if _are_token_ids(data):
            ids += data.count(b",") + 1
            continue
        media = measure_media(data) if _may_hold_media(data) else _NO_MEDIA_COST
        text += len(data) - media.base64_bytes
        tokens += media.tokens
        if data.find(b"\\") >= 0:
            # A character escaped with \u is three bytes in most alphabets, any other one byte.
            text -= data.count(b"\\") + 2 * data.count(b"\\u")
    return PromptSize(max(0, text), ids, tokens)


def estimate_min_tokens(raw: msgspec.Raw) -> int:
    """A low estimate of a prompt's tokens: exact for token ids, by length for text.

    Images count as the fewest tokens that one of their size costs; their base64 does not count.
    """
    data = bytes(raw)
    if data[:1] != b'"' and _are_token_ids(data):
        return data.count(b",") + 1
    size = len(data)
    if data.find(b"\\") >= 0:
        # An escaped character counts as one byte: it is rarely more than one token.
        size -= 5 * data.count(b"\\u")
    if len(data) <= SHORTEST_IMAGE or not _may_hold_media(data):
        return int(size / BYTES_PER_TOKEN)
    media = measure_media(data)
    return int((size - media.base64_bytes) / BYTES_PER_TOKEN) + media.min_tokens


def _may_hold_media(data: bytes) -> bool:
    return len(data) > SHORTEST_IMAGE and (b";base64," in data or b'data"' in data)


def _are_token_ids(data: bytes) -> bool:
    return data[:2] not in _USUAL_STARTS and TOKEN_IDS_START.match(data) is not None


_USUAL_STARTS = frozenset({b"", b'["', b"[{"})
"""The first two bytes of most prompts that are texts or messages."""

_NO_MEDIA_COST = MediaCost()


def nesting_depth(body: bytes, limit: int) -> int:
    """How deeply the JSON is nested, up to `limit` + 1; 0: clearly within `limit`."""
    if len(body) <= limit or body.count(b"[") + body.count(b"{") <= limit:
        return 0
    text = body
    if text.find(b"\\") >= 0:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Every other part between quotes is outside of strings.
    brackets = b"".join(text.split(b'"')[::2]).translate(_TO_SQUARE, _NO_BRACKETS)
    depth, too_deep = 0, b"[" * (limit + 1)
    while brackets and depth <= limit:
        if brackets.find(too_deep) >= 0:
            return limit + 1
        outer = brackets.replace(b"[]", b"")  # removes the innermost pairs
        if len(outer) == len(brackets):
            return depth + outer.count(b"[")  # some are never closed
        brackets = outer
        depth += 1
    return depth


_TO_SQUARE = bytes.maketrans(b"{}", b"[]")

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
