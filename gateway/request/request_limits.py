"""Limits on what a request can make a node do: grammars, schemas, and options of sampling.

llama.cpp parses grammars, and converts schemas to grammars, recursively and in more than linear
time. With the demo model a grammar of 50,000 parentheses ends the server, a schema of 4,000 levels
keeps it busy for more than 40 s, and 250 KB of alternatives for 7 s. An object of 800 optional
properties takes it 5 s, one of 4,400, 120 KB in all, more than two minutes: the time grows with the
cube of their number. A thousand optional items in a row take 20 s for each token. So all of them
are measured before a node sees them, also on paths that generate nothing: those convert schemas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from gateway import errors
from gateway.api.json_values import ITEMS_DECODER, JSON_ERRORS, TEXT_DECODER, VALUE_DECODER
from gateway.config.listeners import LimitSettings
from gateway.request.body import MISSING, ParsedBody, depth_of_parentheses, nesting_depth

# `text` holds a schema only as an object: as a string it is the input of an embeddings server.
_SCHEMA_FIELDS = ("json_schema", "response_format", "text", "output_config", "output_format")

# Literals, character classes and comments of a GBNF grammar; an unclosed one runs to its end.
_UNGROUPED = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\[[^\]\\]*+(?:\\.[^\]\\]*+)*+(?:\]|\\?\Z)|#[^\r\n]*',
    re.DOTALL,
)

_NO_PARENTHESES = bytes(set(range(256)) - set(b"()"))


def check_supported(parsed: ParsedBody, refused: Mapping[str, str]) -> None:
    """Check that the body has none of these fields, each with why. Raises: GatewayError 400."""
    for name, why in refused.items():
        if bytes(memoryview(getattr(parsed, name))[:4]) not in {b"", b"null", b'""'}:
            raise errors.invalid_field(name, f"is not supported: {why}")


def has_grammar(parsed: ParsedBody) -> bool:
    """Whether the body has a grammar, or a field that may hold a schema."""
    return any(raw is not MISSING for raw in _grammars(parsed))


_grammars = attrgetter("tools", "grammar", *_SCHEMA_FIELDS)


def check_grammars(parsed: ParsedBody, body_depth: int, limits: LimitSettings) -> None:
    """Check sizes and depths of grammars and schemas. Raises: GatewayError 400.

    `body_depth`: how deeply the whole body is nested; 0: unknown.
    """
    most = limits.grammar_bytes
    if len(parsed.tools) > limits.tools_bytes:
        problem = f"has more than {limits.tools_bytes} bytes ('limits.tools_bytes')."
        raise errors.invalid_field("tools", problem)
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
# It may spell the name of a field; encoders write letters of ASCII as they are.
_ESCAPED_LETTER = re.compile(rb"\\u00[67]")
_REPEATS = re.compile(r"[?*{|]")
# Of all patterns of a field that repeat anything. Those of an agent's tools are some hundreds; so
# many are counted in 10 ms.
MOST_PATTERN_BYTES = 16 << 10
# Optional properties of one object that cost a node no more than an optional item in a row.
PROPERTIES_PER_OPTIONAL = 16


def _check_row(name: str, count: int, limits: LimitSettings) -> None:
    most = limits.grammar_optionals
    if count > most:
        raise errors.invalid_field(
            name,
            f"holds a grammar or pattern with {count} or more optional items in a row "
            "('?', '*', '{m,n}', repeats multiplied), which would stop a node for seconds at each "
            f"token; the most is {most} ('limits.grammar_optionals'). Put something that must be "
            "there between them, or ask the operator to raise the limit.",
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
            raise errors.invalid_field(
                name,
                f"holds a schema whose objects have more than {most} properties that may be left "
                f"out, of several objects the cubes added up ('limits.{setting}').",
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
            problem = f"holds patterns of more than {MOST_PATTERN_BYTES} bytes. Shorten them."
            raise errors.invalid_field(name, problem)
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
    return depth_of_parentheses(parentheses, limit)


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
    problem = f"holds a grammar or schema of more than {most} bytes ('limits.grammar_bytes')."
    return errors.invalid_field(name, problem)


def _too_deep(name: str, most: int) -> errors.GatewayError:
    problem = f"holds a grammar or schema nested deeper than {most} levels"
    return errors.invalid_field(name, f"{problem} ('limits.grammar_depth').")


# Bytes of one event that a byte of the request's body may become: a `logit_bias` for each character
# of a text is 24 bytes, and blanks sent as a token's id grow up to 21 times.
ECHO_FACTOR = 32
# Of `samplers` and `dry_sequence_breakers`; the names of all llama.cpp's samplers are 150.
MOST_OPTION_BYTES = 1024
MOST_SAMPLERS = 32  # llama.cpp has 12; each that is named has memory of its own
_NUMBER_OR_SWITCH = msgspec.json.Decoder(bool | int | float | None)


def check_sampling(parsed: ParsedBody, limits: LimitSettings) -> None:
    """Check the sizes of options that a node repeats or searches. Raises: GatewayError 400."""
    for name, most, setting in (
        ("stop", limits.stop_bytes, "stop_bytes"),
        ("stop_sequences", limits.stop_bytes, "stop_bytes"),
        ("logit_bias", limits.logit_bias_bytes, "logit_bias_bytes"),
        ("response_fields", limits.logit_bias_bytes, "logit_bias_bytes"),
        ("samplers", MOST_OPTION_BYTES, None),
        ("dry_sequence_breakers", MOST_OPTION_BYTES, None),
    ):
        if len(getattr(parsed, name)) > most:
            remedy = f", or ask the operator to raise 'limits.{setting}'" if setting else ""
            raise errors.invalid_field(name, f"has more than {most} bytes. Shorten it{remedy}.")
    samplers = VALUE_DECODER.decode(parsed.samplers) if parsed.samplers else ""
    if isinstance(samplers, str | list) and len(samplers) > MOST_SAMPLERS:
        problem = f"names more than {MOST_SAMPLERS} samplers. Name each once."
        raise errors.invalid_field("samplers", problem)
    if bytes(parsed.grammar_triggers) not in _NO_TRIGGERS:
        # Type 2 is a pattern for C++'s std::regex: `((.*)*)*b` stops all slots for ever.
        problem = "is set by the server itself; a request can't set it."
        raise errors.invalid_field("grammar_triggers", problem)


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
        raise errors.invalid_field("logprobs", "must be a number, or true or false.")
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


# How many optional items a node keeps in mind at once for a grammar, or for a schema's pattern.
#
# llama.cpp follows every way through a grammar at once, for each token of its vocabulary. Where
# optional items follow each other, each is such a way, and each next letter of a token leads from
# it into all the later ones: a row of 32 `[a-z ]?` takes the demo model up to half a second for one
# token, a row of 64 more than 20 s, and all slots stand still meanwhile. What can't be left out
# ends the row: 1,000 optional items with a letter after each 50th cost nothing. docs/security.md
# has the measurements. So the longest row is counted, through parentheses, repeats and rules:
#
# `x?`, `(x | )`                      1, or half of what `x` ends with; of alternatives each, a text
#                                     a quarter
# `x*`, `x{m,}`, a rule that may be   2
# empty and names itself
# `("text" x)?`, of four letters      a quarter of that
# `x{m,n}`                            (n - m) ^ 0.3; if `x` itself may be empty, n times its count
#
# A rule that names itself may double the ways with each letter: where it does so three times in a
# row, or twice before something else, that is above all limits. Nothing is expanded, so the work is
# proportional to the grammar's length: 128 KiB take 40 ms.

ENDLESS = 10  # Copies of `x` that cost as much as `x*`
# Measured in rows of `[a-z ]{0,n}`, with n from 1 to 100: so many fewer of them cost a second.
COPIES_EXPONENT = 0.3

_GBNF = re.compile(
    r"""\s+|\#[^\r\n]*
    |(?P<operator>[?*+](?:\s*+[?*+])*+|\{(?:[\s\d,]|\#[^\r\n]*+)*+\})
    |(?P<bracket>[()|])
    |(?P<empty>"")
    |(?P<text>"(?:[^"\\]|\\.)*+(?:"|\\?\Z))
    |(?P<item>\[(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)|!?<[^<>]*+>|\.)
    |(?P<rule>[A-Za-z0-9_-]+)(?:\s*+(?P<definition>::=))?
    |.""",
    re.VERBOSE | re.DOTALL,
)

_REGEX = re.compile(
    r"""(?P<operator>[?*+]++|\{[\s\d,]*\}\??)
    |(?P<bracket>\((?:\?[:=!])?|[)|])
    |(?P<item>\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)|\\[A-Za-z]|\.)
    |(?P<text>\\.|[^\^$])
    |.""",
    re.VERBOSE | re.DOTALL,
)

_COMMENT = re.compile(r"#[^\r\n]*")
_COUNTS = re.compile(r"\{\s*(\d{0,9})\d*\s*(,?)\s*(\d{0,9})")
_Tokens = list[tuple[str, str]]  # Kinds, by the groups of the pattern, and texts
# A part of a grammar: whether it may be empty; its optional items in a row: all of them if it may,
# at its start, at its end, the longest row; the ways into it, which it counts once it is optional.
# Plain tuples: named ones would double the time.
_Shape = tuple[bool, float, float, float, float, float]
_END, _LONGEST, _WAYS = 3, 4, 5
_ITEM: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 1.0)
# Few tokens begin like a certain text: four such ways cost no more than one.
_TEXT: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 0.25)
# Hardly a token has it twice: optional parts that begin with it cost what this figure says.
_LONG_TEXT: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 0.24)
# 128 of `("a" [a-z ])?` take 10 s, of `("then" [a-z ])?` 0.06 s, of `("aaaa" [a-z ])?` 0.05 s.
LONG_TEXT = len('"four"')
_NOTHING: _Shape = (True, 0.0, 0.0, 0.0, 0.0, 0.0)
_OPTIONAL: _Shape = (True, 1.0, 1.0, 1.0, 1.0, 1.0)
# To a rule that may be empty or end with such a one: the next may begin at any letter.
_REFERENCE = _OPTIONAL
_CLOSED: _Shape = (False, 0.0, 0.4, 0.0, 0.4, 1.0)  # Of one that ends with something else
# Anything else: it ends a row, and makes two references before it too many: more than 2.1.
_BETWEEN: _Shape = (False, 0.0, 0.4, 0.0, 0.4, 1e-6)
# No figure gets higher: rules that name each other twice would soon pass the largest float.
_PLENTY = 1e9


def longest_row(grammar: str, enough: float = math.inf) -> int:
    """Optional items in a row of a GBNF grammar. One above `enough` is not counted to its end."""
    rules: dict[str, _Tokens] = {}
    tokens: _Tokens = []
    for token in _GBNF.finditer(grammar):
        kind = token.lastgroup
        if kind == "definition":
            tokens = rules[token["rule"]] = []
        elif kind is not None:
            tokens.append((kind, token[0]))
    shapes: dict[str, _Shape] = {}
    longest = 0.0
    for cycle, recursive in _in_order(rules):
        for name in cycle:
            shape = _shape_of(rules[name], shapes, enough)
            if name in recursive and shape[0]:
                shape = (True, *(2.0 * figure for figure in shape[1:]))  # type: ignore[assignment]
            shapes[name] = shape = _bounded(shape)
            longest = max(longest, shape[_LONGEST])
        if cycle[-1] in recursive and _doubles(cycle, rules, shapes):
            longest = _PLENTY
        if longest > enough:
            break
    return math.ceil(longest)


def longest_row_of_pattern(pattern: str, enough: float = math.inf) -> int:
    """As `longest_row`, of a regular expression, which llama.cpp makes a grammar of."""
    tokens = [(token.lastgroup, token[0]) for token in _REGEX.finditer(pattern) if token.lastgroup]
    return math.ceil(min(_shape_of(tokens, {}, enough)[_LONGEST], _PLENTY))


def _in_order(rules: dict[str, _Tokens]) -> Iterator[tuple[list[str], set[str]]]:
    """The rules, each after those that it names, those that name each other together.

    With them, those that name themselves, if only by the ones before.
    """
    reached: dict[str, int] = {}
    lowest: dict[str, int] = {}
    ended: dict[str, int] = {}
    known: set[str] = set()
    recursive: set[str] = set()
    waiting: list[str] = []
    for root in ("root", *rules):  # as a node, from the root
        path = [root] if root in rules and root not in reached else []
        left = {root: iter(rules.get(root, ()))}
        while path:
            name = path[-1]
            if name not in reached:
                reached[name] = lowest[name] = len(reached)
                waiting.append(name)
            for kind, named in left[name]:
                if kind != "rule" or named not in rules:
                    continue
                if named not in reached:
                    path.append(named)
                    left[named] = iter(rules[named])
                    break
                if named not in ended:
                    recursive.add(named)
                if named not in known:
                    lowest[name] = min(lowest[name], lowest[named])
            else:
                path.pop()
                ended[name] = len(ended)
                if path:
                    lowest[path[-1]] = min(lowest[path[-1]], lowest[name])
                if lowest[name] == reached[name]:
                    cycle = [waiting.pop()]
                    while cycle[-1] != name:
                        cycle.append(waiting.pop())
                    known.update(cycle)
                    yield sorted(cycle, key=ended.__getitem__), recursive


def _doubles(cycle: list[str], rules: dict[str, _Tokens], shapes: dict[str, _Shape]) -> bool:
    """Whether each letter may double the ways: as in `a ::= [a-z] a? a? a?`.

    References to rules of the cycle are counted, and whether anything comes after them: the ways
    double where a letter may be in either of two, and for each something else is left to come.
    Letters are not compared, so that alternatives are not: `a ::= [a-z] a "x" | [a-z] a "y"`.
    """
    known = dict.fromkeys(cycle, _REFERENCE)
    others = {True: (True, *_BETWEEN[1:]), False: _BETWEEN}
    for name in cycle:
        for kind, text in rules[name]:
            if kind == "rule" and text not in known:
                known[text] = others[shapes.get(text, _ITEM)[0]]
    longest = 0.0
    for _ in range(3):  # until those that end with something else are found, or nearly all
        longest, before = 0.0, known.copy()
        for name in cycle:
            shape = _shape_of(rules[name], known, math.inf, references=True)
            count = max(1.0, min(shape[1], 3.0)) if shape[0] else 1.0
            is_open = shape[0] or shape[_END] >= 0.5
            known[name] = (True, count, count, count, count, count) if is_open else _CLOSED
            longest = max(longest, shape[_LONGEST])
        if known == before:
            break
    return longest > 2.1


def _with_operator_on_references(shape: _Shape, operator: str) -> _Shape:
    """`a?` is one reference, `a*` one and a half: it is harmless before something else (0.4)."""
    least, most = _copies(operator)
    empty, through, start, end, longest, ways = shape
    through = min(through, 3.0) if empty else 0.0
    whole = _repeated((empty, through, start, end, longest, ways), least, least)
    if most is not None and most <= least:
        return whole
    copies = 1.5 if most is None else float(most - least) if through >= 0.5 else 1.0
    count = max(through, min(ways, 1.0)) * copies
    inside = longest if through >= 0.5 or most == least + 1 else max(longest, end + start)
    return _joined(
        whole,
        (True, count, max(count, start), max(count, end), max(count, inside), count),
    )


def _shape_of(
    tokens: _Tokens, rules: dict[str, _Shape], enough: float, *, references: bool = False
) -> _Shape:
    """The shape of these alternatives; a rule that is not known yet counts as an item.

    `references`: of references to rules of a cycle alone.
    """
    with_operator = _with_operator_on_references if references else _with_operator
    item, short_text, long_text = (_BETWEEN,) * 3 if references else (_ITEM, _TEXT, _LONG_TEXT)
    outer: list[tuple[list[_Shape], _Shape]] = []
    alternatives: list[_Shape] = []
    before = last = _NOTHING
    for kind, text in tokens:
        if kind == "operator":
            last = with_operator(last, text)
            continue
        if last is not _NOTHING:
            before = _joined(before, last)
            if before[_LONGEST] > enough:
                return before
        last = _NOTHING
        if kind == "item":
            last = item
        elif kind == "text":
            last = short_text if len(text) < LONG_TEXT or "\\" in text else long_text
        elif kind == "rule":
            last = rules.get(text, item)
        elif text == "|":
            alternatives.append(before)
            before = _NOTHING
        elif text == ")":
            last = _either([*alternatives, before], with_operator)
            alternatives, before = outer.pop() if outer else ([], _NOTHING)
        elif kind == "bracket":
            outer.append((alternatives, before))
            alternatives, before = [], _NOTHING
    whole = _either([*alternatives, _joined(before, last)], with_operator)
    for alternatives, before in reversed(outer):  # some are never closed
        whole = _either([*alternatives, _joined(before, whole)], with_operator)
    return whole


def _bounded(shape: _Shape) -> _Shape:
    empty, *figures = shape
    return (empty, *(min(figure, _PLENTY) for figure in figures))  # type: ignore[return-value]


def _joined(one: _Shape, two: _Shape) -> _Shape:
    """One behind the other."""
    empty, through, start, end, longest, ways = one
    empty2, through2, start2, end2, longest2, ways2 = two
    return (
        empty and empty2,
        through + through2,
        max(start, through + start2) if empty else start,
        max(end2, through2 + end) if empty2 else end2,
        max(longest, longest2, end + start2),
        ways + ways2 if empty else ways,
    )


def _either(shapes: list[_Shape], with_operator: Callable[[_Shape, str], _Shape]) -> _Shape:
    """Alternatives."""
    if len(shapes) == 1:
        return shapes[0]
    some = [shape for shape in shapes if shape[_WAYS]]
    if not some:
        return _NOTHING
    empty, through, start, end, longest, _ = map(max, zip(*some, strict=True))
    whole = (bool(empty), through, start, end, longest, sum(shape[_WAYS] for shape in some))
    return whole if len(some) == len(shapes) else with_operator(whole, "?")


def _with_operator(shape: _Shape, operator: str) -> _Shape:
    if operator == "?" and (shape is _ITEM or shape is _TEXT or shape is _LONG_TEXT):
        return _OPTIONAL  # nearly always
    return _repeated(shape, *_copies(operator))


def _copies(operator: str) -> tuple[int, int | None]:
    """The least and the most that it asks for; None: any number."""
    counts = _COUNTS.match(_COMMENT.sub("", operator))
    if counts is None:
        kinds = set(operator) & {"?", "*", "+"}
        return int(kinds == {"+"}), 1 if kinds == {"?"} else None
    least = int(counts[1] or 0)
    most = int(counts[3]) if counts[3] else None if counts[2] else least
    return least, most


def _repeated(shape: _Shape, least: int, most: int | None) -> _Shape:
    """From `least` to `most` copies; None: any number."""
    empty, through, start, end, longest, ways = _bounded(shape)
    copies = ENDLESS if most is None else max(0, most - least)
    whole = _NOTHING
    if least:
        again = through * (least - 1)
        whole = (
            empty,
            through * least,
            start + again,
            end + again,
            max(longest, end + through * (least - 2) + start) if least > 1 else longest,
            ways * least if empty else ways,
        )
    if copies:
        # The copies are nested, so only their number of ways is kept in mind.
        led = 0.0 < ways <= _LONG_TEXT[_WAYS]
        count = (ways if led else max(1.0, ways)) * (copies if empty else copies**COPIES_EXPONENT)
        count = max(count, end / 2)
        inside = max(longest, end + start if copies > 1 else 0.0)
        optional = (True, count, count, max(count, end), max(inside, count), count)
        whole = _joined(whole, optional)
    return whole
