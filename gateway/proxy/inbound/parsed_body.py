"""What the gateway needs to know of a body, read without building the rest of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from gateway import errors
from gateway.proxy.inbound.media import MediaCost, measure_media

Number = int | float | None


MISSING = msgspec.Raw()
"""What a field is that the body does not have."""


class ParsedBody(msgspec.Struct):
    """The fields that decide where a request goes; everything else stays bytes.

    Fields that are only ever taken out or bounded are here so that their presence is known.
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


_PEEK = msgspec.json.Decoder(ParsedBody)

_NO_OPTIONS = (MISSING,) * 14

_ANY = msgspec.json.Decoder()

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])

_PATH = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<key>[^`]*)`$", re.DOTALL)


def parse_body(body: bytes) -> ParsedBody:
    """Read `body`. Raises: GatewayError 400."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise errors.invalid_json(f"byte {error.start} is not UTF-8") from None
    try:
        peeked = _PEEK.decode(body)
        # Mostly the model's name stands there once, and nothing but an escape could hide another.
        if body.lower().count(b'"model"') != (peeked.model is not None) or (
            body.find(b"\\") >= 0 and _may_spell(body)
        ):
            _check_names(body)
        return peeked
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.match(text)
        if found is None:
            raise errors.invalid_request(f"The body is not what was expected: {text}.") from None
        key = found["key"] or None
        message = f"'{key}': {found['what']}." if key else f"{found['what']}."
        raise errors.invalid_request(message, key) from None
    except msgspec.DecodeError as error:
        detail = "it is empty" if not body.strip() else str(error)
        raise errors.invalid_json(detail) from None
    except RecursionError:
        # How deep is too deep differs between Pythons, but not the answer: `prepare` refuses what
        # is nested less deeply than any of them minds.
        raise errors.invalid_request("The body is nested too deeply.") from None


def has_limited_options(parsed: ParsedBody) -> bool:
    """Whether it has any field that `grammar.check` and `sampling.check` look at."""
    # As one tuple: to look at each by itself costs twice as much.
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
    ) != _NO_OPTIONS


def _may_spell(body: bytes) -> bool:
    """Whether an escape spells a letter of `model`, or one of its neighbours."""
    return body.find(b"\\u004") >= 0 or body.find(b"\\u006") >= 0


def _check_names(body: bytes) -> None:
    if any(map(is_misspelt_model, _NAMES.decode(body))):
        raise misspelt_model_error()


def is_misspelt_model(name: str) -> bool:
    """Whether a field's name is `model` but for its case.

    JSON in Go takes it for the model's name, and servers in Go may stand behind the gateway. No
    character beyond ASCII folds to one of these letters.
    """
    return len(name) == len("model") and name != "model" and name.lower() == "model"


def misspelt_model_error() -> errors.GatewayError:
    """400: what is meant differs between servers."""
    return errors.invalid_request(
        "The model's name is given under 'model', in lower case.", "model"
    )


TOKEN_IDS_START = re.compile(rb"\s*\[\s*\d")

SHORTEST_IMAGE = 256
"""Bytes; a prompt shorter than that has no picture."""


class PromptSize(NamedTuple):
    """How large a prompt is, for who estimates its tokens (`scheduling/token_estimates.py`)."""

    text_bytes: int = 0
    """Bytes of text, as UTF-8."""
    exact_tokens: int = 0
    """Tokens that the client sent as such."""
    media_tokens: int = 0
    """Tokens that pictures and sound are guessed to be."""


def measure_prompt(*fields: msgspec.Raw) -> PromptSize:
    """The size of a prompt that these fields of a body make up, missing ones included."""
    text = ids = media = 0
    for raw in fields:
        data = bytes(raw)
        if _are_ids(data):
            ids += data.count(b",") + 1
            continue
        found = measure_media(data) if _may_hold_media(data) else _NO_MEDIA_COST
        text += len(data) - found.base64_bytes
        media += found.tokens
        if data.find(b"\\") >= 0:
            # What is escaped with \u is three bytes in most alphabets, all else one.
            text -= data.count(b"\\") + 2 * data.count(b"\\u")
    return PromptSize(max(0, text), ids, media)


def estimate_min_tokens(raw: msgspec.Raw, bytes_per_token: float) -> int:
    """A low guess at a prompt's tokens: exact for token ids, by length for text.

    Pictures count by the fewest tokens that one of their size is, and not by their base64.
    """
    data = bytes(raw)
    if data[:1] != b'"' and _are_ids(data):
        return data.count(b",") + 1
    size = len(data)
    if data.find(b"\\") >= 0:
        # An escaped character counts as one byte, since it is at most about one token.
        size -= 5 * data.count(b"\\u")
    if len(data) <= SHORTEST_IMAGE or not _may_hold_media(data):
        return int(size / bytes_per_token)
    found = measure_media(data)
    return int((size - found.base64_bytes) / bytes_per_token) + found.min_tokens


def _may_hold_media(data: bytes) -> bool:
    return len(data) > SHORTEST_IMAGE and (b";base64," in data or b'data"' in data)


def _are_ids(data: bytes) -> bool:
    return data[:2] not in _NO_IDS and TOKEN_IDS_START.match(data) is not None


_NO_IDS = frozenset({b"", b'["', b"[{"})
"""How prompts that are texts or messages mostly begin."""

_NO_MEDIA_COST = MediaCost()


def nesting_depth(body: bytes, limit: int) -> int:
    """How deeply the JSON is nested, as far as it may matter: at most `limit` + 1."""
    if len(body) <= limit or body.count(b"[") + body.count(b"{") <= limit:
        return 0
    text = body
    if text.find(b"\\") >= 0:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # What stands outside of strings is every other piece between quotes.
    brackets = b"".join(text.split(b'"')[::2]).translate(_SQUARE, _NO_BRACKETS)
    levels, too_many = 0, b"[" * (limit + 1)
    while brackets and levels <= limit:
        if brackets.find(too_many) >= 0:
            return limit + 1
        outer = brackets.replace(b"[]", b"")  # without the innermost ones
        if len(outer) == len(brackets):
            return levels + outer.count(b"[")  # some have no end
        brackets = outer
        levels += 1
    return levels


_SQUARE = bytes.maketrans(b"{}", b"[]")

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

MEDIA_KEYS = frozenset(
    {"image_url", "video_url", "audio_url", "file_url", "input_audio", "input_video", "input_image"}
)

# No set: the `type` in a tool's schema may be a list, which no set can be asked for.
IMAGE_TYPES = ("image_url", "input_image", "image")


_MARKS = (b"_url", b"input_", b"multimodal_data", b"mcp_servers")


def may_have_links(body: bytes) -> bool:
    """Whether `body` could hold a picture or a link to one; an escape could spell anything."""
    # Spelt out, single bytes first: a search for one is several times as fast as for a word. And
    # `in` would first ask whether what it looks for is a number, at the price of the search.
    return (
        (body.find(b"_") >= 0 and any(body.find(mark) >= 0 for mark in _MARKS))
        or (body.find(b"\\") >= 0 and body.find(b"\\u") >= 0)
        or body.find(b'"source"') >= 0
    )


def find_links(body: bytes) -> tuple[list[str], bool]:
    """The addresses that a server might fetch for this body, and whether it holds a picture."""
    value = _ANY.decode(body)
    found: list[str] = []
    pictures = False
    waiting: list[Any] = [value]
    if isinstance(value, dict):
        # Servers of tools are asked by the server itself, whatever their address looks like.
        for name, key in (("tools", "server_url"), ("mcp_servers", "url")):
            listed = value.get(name)
            for item in listed if isinstance(listed, list) else ():
                url = item.get(key) if isinstance(item, dict) else None
                if isinstance(url, str):
                    found.append(url)
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            pictures = pictures or item.get("type") in IMAGE_TYPES or "multimodal_data" in item
            for key, inner in item.items():
                if key in MEDIA_KEYS or (
                    key == "source" and isinstance(inner, dict) and inner.get("type") != "base64"
                ):
                    found.extend(_addresses(inner))
                elif key == "multimodal_data" and isinstance(inner, list):
                    found.extend(text for text in inner if isinstance(text, str) and ":" in text)
            waiting.extend(item.values())
    return found, pictures


def _addresses(media: object) -> list[str]:
    """The addresses in a part: the text itself, or what its `url` and `data` say."""
    if isinstance(media, str):
        return [media] if may_be_url(media) else []
    if isinstance(media, dict):
        url, data = media.get("url"), media.get("data")
        found = [url] if isinstance(url, str) and may_be_url(url) else []
        return [*found, data] if isinstance(data, str) and ":" in data else found
    return []


def may_be_url(text: str) -> bool:
    """Whether a server might take it for one."""
    # Some clients of HTTP, curl's library for one, take an address without its `://`.
    return ":" in text or text.lstrip()[:4].lower() == "http"
