"""What a request binds its answer by: a grammar, or schemas that the node makes one of.

llama.cpp reads them by recursion and in more than linear time. With the demo model a grammar of
50,000 parentheses ends the server, a schema of 4,000 levels keeps it busy for more than 40 s, and
250 KB of alternatives for 7 s. An object of 800 properties that may be left out takes it 5 s, one
of 4,400, 120 KB in all, more than two minutes: the time goes with the cube of their number. So all
of it is measured before any node sees it, on paths that generate nothing as well: they convert
schemas, too.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.proxy.inbound.parsed_body import MISSING, ParsedBody, nesting_depth
from gateway.proxy.json_values import JSON_ERRORS

# As text alone, `text` is what a server of embeddings reads.
_SCHEMAS = ("json_schema", "response_format", "text", "output_config", "output_format")

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])

_TEXT = msgspec.json.Decoder(str)

_ANY = msgspec.json.Decoder()

_OPAQUE = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\[[^\]\\]*+(?:\\.[^\]\\]*+)*+(?:\]|\\?\Z)|#[^\n]*',
    re.DOTALL,
)
"""Of a grammar in GBNF: texts, sets of characters, comments. One that has no end ends with it."""

_NO_PARENTHESES = bytes(set(range(256)) - set(b"()"))


def has_grammar(parsed: ParsedBody) -> bool:
    """Whether the body has any of these fields."""
    return not (
        parsed.tools
        is parsed.grammar
        is parsed.json_schema
        is parsed.response_format
        is parsed.text
        is parsed.output_config
        is parsed.output_format
        is MISSING
    )


def check_grammars(parsed: ParsedBody, body_depth: int, limits: LimitSettings) -> None:
    """See that none is larger or deeper than it may. Raises: GatewayError 400.

    `levels`: how deeply the whole body is nested; 0: not worth counting.
    """
    most = limits.grammar_bytes
    if len(parsed.tools) > limits.tools_bytes:
        raise errors.invalid_request(
            f"'tools' has more than {limits.tools_bytes} bytes ('limits.tools_bytes').", "tools"
        )
    if len(parsed.tools) > most and any(len(tool) > most for tool in _items(parsed.tools)):
        raise _too_large("tools", most)
    for name in ("grammar", *_SCHEMAS):
        raw = getattr(parsed, name)
        if len(raw) > most and (name != "text" or bytes(memoryview(raw)[:1]) == b"{"):
            raise _too_large(name, most)
    _check_properties(parsed, limits.grammar_properties)
    deepest = limits.grammar_depth
    if (
        parsed.grammar is not MISSING
        and parenthesis_depth(_text(parsed.grammar), deepest) > deepest
    ):
        raise _too_deep("grammar", deepest)
    if 0 < body_depth <= deepest:
        return
    for name in ("tools", *_SCHEMAS):
        if nesting_depth(bytes(getattr(parsed, name)), deepest) > deepest:
            raise _too_deep(name, deepest)


def _check_properties(peeked: ParsedBody, most: int) -> None:
    """See that nowhere are more properties optional than a node can make a grammar of."""
    for name in ("tools", *_SCHEMAS):
        raw = getattr(peeked, name)
        if len(raw) <= most:
            continue  # not even a byte for each
        parts = _items(raw) if name == "tools" else [raw]
        # Each property has a colon. Only where there are so many is it worth a closer look.
        if sum(bytes(part).count(b":") ** 3 for part in parts) <= most**3:
            continue
        if sum(map(_work, parts)) > most**3:
            raise errors.invalid_request(
                f"'{name}' holds a schema whose objects have more than {most} properties that "
                "may be left out, of several objects the cubes added up "
                "('limits.grammar_properties').",
                name,
            )


def _work(raw: msgspec.Raw) -> int:
    """What a node has to do for the optional properties of this schema's objects."""
    try:
        waiting: list[Any] = [_ANY.decode(raw)]
    except JSON_ERRORS:
        return 0
    work = largest = 0
    merged: list[list[Any]] = []
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            count = _optional(item)
            largest = max(largest, count)
            work += count**3
            together = item.get("allOf")
            if isinstance(together, list):
                merged.append(together)
            waiting.extend(item.values())
    for parts in merged:
        # They make one object; what a reference stands for may be the largest of all.
        work += (
            sum(
                largest if "$ref" in part else _optional(part)
                for part in parts
                if isinstance(part, dict)
            )
            ** 3
        )
    return work


def _optional(schema: dict[str, Any]) -> int:
    """How many properties of an object may be left out."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    if not isinstance(required, list):
        return len(properties)
    named = {name for name in required if isinstance(name, str)}
    return len(properties.keys() - named)


def parenthesis_depth(grammar: bytes, limit: int) -> int:
    """How deeply parentheses of a grammar are nested, as far as it may matter."""
    if grammar.count(b"(") <= limit:
        return 0
    parentheses = _OPAQUE.sub(b"", grammar).translate(None, _NO_PARENTHESES)
    levels, too_many = 0, b"(" * (limit + 1)
    while parentheses and levels <= limit:
        if too_many in parentheses:
            return limit + 1
        outer = parentheses.replace(b"()", b"")  # without the innermost ones
        if len(outer) == len(parentheses):
            return levels + outer.count(b"(")  # some have no end
        parentheses = outer
        levels += 1
    return levels


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _ITEMS.decode(raw)
    except JSON_ERRORS:
        return [raw]


def _text(raw: msgspec.Raw) -> bytes:
    try:
        return _TEXT.decode(raw).encode()
    except JSON_ERRORS:
        return b""  # null, or what the node refuses


def _too_large(name: str, most: int) -> errors.GatewayError:
    message = (
        f"'{name}' holds a grammar or schema of more than {most} bytes ('limits.grammar_bytes')."
    )
    return errors.invalid_request(message, name)


def _too_deep(name: str, most: int) -> errors.GatewayError:
    message = (
        f"'{name}' holds a grammar or schema nested deeper than {most} levels "
        "('limits.grammar_depth')."
    )
    return errors.invalid_request(message, name)


ECHO_FACTOR = 32
"""Bytes of one event that a byte of the request's body may become: a bias for each character of a
text is 24 bytes (above), and blanks that were sent as a token's id are up to 21 times as long."""

MOST_OPTION_BYTES = 1024
"""Largest `samplers` and `dry_sequence_breakers`: all samplers that llama.cpp has are 150 bytes."""

_NUMBER = msgspec.json.Decoder(bool | int | float | None)


def check_sampling(parsed: ParsedBody, limits: LimitSettings) -> None:
    """See that none is larger than it may. Raises: GatewayError 400."""
    for name, setting in (
        ("stop", "stop_bytes"),
        ("stop_sequences", "stop_bytes"),
        ("logit_bias", "logit_bias_bytes"),
        ("response_fields", "logit_bias_bytes"),
    ):
        most = getattr(limits, setting)
        if len(getattr(parsed, name)) > most:
            raise errors.invalid_request(
                f"'{name}' has more than {most} bytes. Shorten it, or ask the operator to raise "
                f"'limits.{setting}'.",
                name,
            )
    for name in ("samplers", "dry_sequence_breakers"):
        if len(getattr(parsed, name)) > MOST_OPTION_BYTES:
            raise errors.invalid_request(
                f"'{name}' has more than {MOST_OPTION_BYTES} bytes. Shorten it.", name
            )
    if bytes(parsed.grammar_triggers) not in _NO_TRIGGERS:
        # One of type 2 is a pattern of C++'s std::regex: `((.*)*)*b` stops all slots for ever.
        raise errors.invalid_request(
            "'grammar_triggers' are the server's own; requests can't have them.",
            "grammar_triggers",
        )


_NO_TRIGGERS = (b"", b"null", b"[]")


def logprobs_count(raw: msgspec.Raw) -> int | float | None:
    """The number that `logprobs` is, llama.cpp's other name for `n_probs`; None: it is none.

    In a chat it is true or false. Raises: GatewayError 400.
    """
    if raw is MISSING:
        return None
    try:
        value = _NUMBER.decode(raw) if len(raw) < MOST_OPTION_BYTES else ""
    except JSON_ERRORS:
        value = ""
    if isinstance(value, str):
        raise errors.invalid_request("'logprobs' must be a number, or true or false.", "logprobs")
    return None if isinstance(value, bool) else value


def wants_logprobs(parsed: ParsedBody) -> bool:
    """Whether the answer has probabilities, some thousands of bytes for each token."""
    return bool(
        parsed.n_probs
        or parsed.top_logprobs
        or (parsed.logprobs is not MISSING and bytes(parsed.logprobs) not in _NO_LOGPROBS)
    )


_NO_LOGPROBS = (b"null", b"false", b"0")


def max_event_bytes(body_bytes: int, limits: LimitSettings, *, logprobs: bool) -> int:
    """Bytes of the largest event that a request with a body of so many bytes may cause.

    With probabilities the tokens of a `stop` text that is held back count each as thousands.
    """
    most = max(limits.response_bytes, limits.event_bytes)
    return most if logprobs else min(limits.event_bytes + ECHO_FACTOR * body_bytes, most)
