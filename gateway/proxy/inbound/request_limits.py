"""Limits on what a request can make a node do: grammars, schemas, and options of sampling.

llama.cpp parses grammars, and converts schemas to grammars, recursively and in more than linear
time. With the demo model a grammar of 50,000 parentheses ends the server, a schema of 4,000 levels
keeps it busy for more than 40 s, and 250 KB of alternatives for 7 s. An object of 800 optional
properties takes it 5 s, one of 4,400, 120 KB in all, more than two minutes: the time grows with the
cube of their number. A thousand optional items in a row take 20 s for each token
(`grammar_optionals.py`). So all of them are measured before a node sees them, also on paths that
generate nothing: those convert schemas, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.proxy.inbound.grammar_optionals import longest_row, longest_row_of_pattern
from gateway.proxy.inbound.parsed_body import MISSING, ParsedBody, nesting_depth
from gateway.proxy.json_values import ITEMS_DECODER, JSON_ERRORS, TEXT_DECODER, VALUE_DECODER

# `text` holds a schema only as an object: as a string it is the input of an embeddings server.
_SCHEMA_FIELDS = ("json_schema", "response_format", "text", "output_config", "output_format")

_UNGROUPED = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\[[^\]\\]*+(?:\\.[^\]\\]*+)*+(?:\]|\\?\Z)|#[^\r\n]*',
    re.DOTALL,
)
"""Literals, character classes and comments of a GBNF grammar; an unclosed one runs to its end."""

_NO_PARENTHESES = bytes(set(range(256)) - set(b"()"))


def check_supported(parsed: ParsedBody, refused: Mapping[str, str]) -> None:
    """Check that the body has none of these fields, each with why. Raises: GatewayError 400."""
    for name, why in refused.items():
        if bytes(memoryview(getattr(parsed, name))[:4]) not in {b"", b"null", b'""'}:
            raise errors.invalid_request(f"'{name}' is not supported: {why}", name)


def has_grammar(parsed: ParsedBody) -> bool:
    """Whether the body has a grammar, or a field that may hold a schema."""
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
    """Check sizes and depths of grammars and schemas. Raises: GatewayError 400.

    `body_depth`: how deeply the whole body is nested; 0: unknown.
    """
    most = limits.grammar_bytes
    if len(parsed.tools) > limits.tools_bytes:
        raise errors.invalid_request(
            f"'tools' has more than {limits.tools_bytes} bytes ('limits.tools_bytes').", "tools"
        )
    if len(parsed.tools) > most and any(len(tool) > most for tool in _decode_items(parsed.tools)):
        raise _too_large("tools", most)
    for name in ("grammar", *_SCHEMA_FIELDS):
        raw = getattr(parsed, name)
        if len(raw) > most and (name != "text" or bytes(memoryview(raw)[:1]) == b"{"):
            raise _too_large(name, most)
    _check_optional_properties(parsed, limits)
    deepest = limits.grammar_depth
    if parsed.grammar is not MISSING:
        grammar = _decode_text(parsed.grammar).partition("\0")[0]  # there llama.cpp ends it, too
        if parenthesis_depth(grammar.encode("utf-8", "replace"), deepest) > deepest:
            raise _too_deep("grammar", deepest)
        _check_row("grammar", longest_row(grammar, limits.grammar_optionals), limits)
    if 0 < body_depth <= deepest:
        return
    for name in ("tools", *_SCHEMA_FIELDS):
        if nesting_depth(bytes(getattr(parsed, name)), deepest) > deepest:
            raise _too_deep(name, deepest)


_PATTERN = re.compile(rb'"pattern"\s*+:\s*+("(?:[^"\\]|\\.)*+")', re.DOTALL)

_ESCAPED_LETTER = re.compile(rb"\\u00[67]")
"""It may spell the name of a field; encoders write letters of ASCII as they are."""

_REPEATS = re.compile(r"[?*{|]")

MOST_PATTERN_BYTES = 16 << 10
"""Of all patterns of a field that repeat anything. Those of an agent's tools are some hundreds; so
many are counted in 10 ms."""

PROPERTIES_PER_OPTIONAL = 16
"""Optional properties of one object that cost a node no more than an optional item in a row."""


def _check_row(name: str, count: int, limits: LimitSettings) -> None:
    most = limits.grammar_optionals
    if count > most:
        raise errors.invalid_request(
            f"'{name}' holds a grammar or pattern with {count} or more optional items in a row "
            "('?', '*', '{m,n}', repeats multiplied), which would stop a node for seconds at each "
            f"token; the most is {most} ('limits.grammar_optionals'). Put something that must be "
            "there between them, or ask the operator to raise the limit.",
            name,
        )


def _check_optional_properties(parsed: ParsedBody, limits: LimitSettings) -> None:
    """Check that no schema has more optional properties or items than a node can take.

    Raises: GatewayError 400.
    """
    most, setting = limits.grammar_properties, "grammar_properties"
    if PROPERTIES_PER_OPTIONAL * limits.grammar_optionals < most:
        most = PROPERTIES_PER_OPTIONAL * limits.grammar_optionals
        setting = f"grammar_optionals', {PROPERTIES_PER_OPTIONAL} of them for one"
    for name in ("tools", *_SCHEMA_FIELDS):
        raw = getattr(parsed, name)
        if raw is MISSING:
            continue
        _check_patterns(name, bytes(raw), limits)
        if len(raw) <= most:
            continue  # not even a byte for each
        parts = _decode_items(raw) if name == "tools" else [raw]
        # Each property has a colon: only so many colons make decoding worthwhile.
        if sum(bytes(part).count(b":") ** 3 for part in parts) <= most**3:
            continue
        if sum(map(_conversion_cost, parts)) > most**3:
            raise errors.invalid_request(
                f"'{name}' holds a schema whose objects have more than {most} properties that "
                f"may be left out, of several objects the cubes added up ('limits.{setting}').",
                name,
            )


def _check_patterns(name: str, schema: bytes, limits: LimitSettings) -> None:
    """Check the regular expressions of a schema. Raises: GatewayError 400."""
    if _ESCAPED_LETTER.search(schema):
        try:
            schema = msgspec.json.encode(VALUE_DECODER.decode(schema))
        except JSON_ERRORS:
            return
    if b'"pattern"' not in schema:
        return
    left = MOST_PATTERN_BYTES
    for found in _PATTERN.finditer(schema):
        pattern = _decode_text(found[1])
        if not _REPEATS.search(pattern):
            continue
        left -= len(pattern)
        if left < 0:
            raise errors.invalid_request(
                f"'{name}' holds patterns of more than {MOST_PATTERN_BYTES} bytes. Shorten them.",
                name,
            )
        _check_row(name, longest_row_of_pattern(pattern, limits.grammar_optionals), limits)


def _conversion_cost(raw: msgspec.Raw) -> int:
    """A node's work to convert a schema: per object, the cube of its optional properties."""
    try:
        pending: list[Any] = [VALUE_DECODER.decode(raw)]
    except JSON_ERRORS:
        return 0
    cost = largest = 0
    merged: list[list[Any]] = []
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            count = _optional_properties(item)
            largest = max(largest, count)
            cost += count**3
            parts = item.get("allOf")
            if isinstance(parts, list):
                merged.append(parts)
            pending.extend(item.values())
    for parts in merged:
        # The parts become one object; a reference may stand for the largest of all.
        cost += (
            sum(
                largest if "$ref" in part else _optional_properties(part)
                for part in parts
                if isinstance(part, dict)
            )
            ** 3
        )
    return cost


def _optional_properties(schema: dict[str, Any]) -> int:
    """How many properties of an object are not required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    if not isinstance(required, list):
        return len(properties)
    return len(properties.keys() - {name for name in required if isinstance(name, str)})


def parenthesis_depth(grammar: bytes, limit: int) -> int:
    """How deeply a grammar's parentheses nest, up to `limit` + 1; 0: clearly within `limit`."""
    if grammar.count(b"(") <= limit:
        return 0
    parentheses = _UNGROUPED.sub(b"", grammar).translate(None, _NO_PARENTHESES)
    depth, too_deep = 0, b"(" * (limit + 1)
    while parentheses and depth <= limit:
        if too_deep in parentheses:
            return limit + 1
        outer = parentheses.replace(b"()", b"")  # removes the innermost pairs
        if len(outer) == len(parentheses):
            return depth + outer.count(b"(")  # some are never closed
        parentheses = outer
        depth += 1
    return depth


def _decode_items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return ITEMS_DECODER.decode(raw)
    except JSON_ERRORS:
        return [raw]


def _decode_text(raw: bytes | msgspec.Raw) -> str:
    try:
        return TEXT_DECODER.decode(raw)
    except JSON_ERRORS:
        return ""  # null, or a value that the node refuses


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
"""Bytes of one event that a byte of the request's body may become: a `logit_bias` for each
character of a text is 24 bytes, and blanks sent as a token's id grow up to 21 times."""

MOST_OPTION_BYTES = 1024
"""Of `samplers` and `dry_sequence_breakers`; the names of all llama.cpp's samplers are 150."""

MOST_SAMPLERS = 32
"""llama.cpp has 12; each that is named has memory of its own."""

_NUMBER_OR_SWITCH = msgspec.json.Decoder(bool | int | float | None)


def check_sampling(parsed: ParsedBody, limits: LimitSettings) -> None:
    """Check the sizes of options that a node repeats or searches. Raises: GatewayError 400."""
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
    samplers = VALUE_DECODER.decode(parsed.samplers) if parsed.samplers else ""
    if isinstance(samplers, str | list) and len(samplers) > MOST_SAMPLERS:
        raise errors.invalid_request(
            f"'samplers' names more than {MOST_SAMPLERS} samplers. Name each once.", "samplers"
        )
    if bytes(parsed.grammar_triggers) not in _NO_TRIGGERS:
        # Type 2 is a pattern for C++'s std::regex: `((.*)*)*b` stops all slots for ever.
        raise errors.invalid_request(
            "'grammar_triggers' is set by the server itself; a request can't set it.",
            "grammar_triggers",
        )


_NO_TRIGGERS = (b"", b"null", b"[]")


def logprobs_count(raw: msgspec.Raw) -> int | float | None:
    """The number in `logprobs`, llama.cpp's other name for `n_probs`; None: no number.

    In a chat it is true or false. Raises: GatewayError 400.
    """
    if raw is MISSING:
        return None
    try:
        value = _NUMBER_OR_SWITCH.decode(raw) if len(raw) < MOST_OPTION_BYTES else ""
    except JSON_ERRORS:
        value = ""
    if isinstance(value, str):
        raise errors.invalid_request("'logprobs' must be a number, or true or false.", "logprobs")
    return None if isinstance(value, bool) else value


def wants_logprobs(parsed: ParsedBody) -> bool:
    """Whether the response has logprobs, some thousands of bytes for each token."""
    return bool(
        parsed.n_probs
        or parsed.top_logprobs
        or (parsed.logprobs is not MISSING and bytes(parsed.logprobs) not in _NO_LOGPROBS)
    )


_NO_LOGPROBS = (b"null", b"false", b"0")


def max_event_bytes(body_bytes: int, limits: LimitSettings, *, logprobs: bool) -> int:
    """Bytes of the largest event that a request with a body of `body_bytes` may cause.

    With logprobs, each token of a `stop` text that is held back adds thousands.
    """
    most = max(limits.response_bytes, limits.event_bytes)
    return most if logprobs else min(limits.event_bytes + ECHO_FACTOR * body_bytes, most)
