"""Limits on what a request can make a node do: grammars, schemas, options of sampling."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.api.sse import GROWTH_PER_EVENT, EventFramer
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.request import request_limits
from gateway.request.body import nesting_depth, parse_body
from gateway.request.request_limits import (
    ECHO_FACTOR,
    longest_row,
    longest_row_of_pattern,
    max_event_bytes,
)
from gateway.transport.errors import InvalidResponse
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, GENERATION_PATHS, proxy_over
from tests.request.test_request import prepared, refused
from tests.virtual import in_virtual_time

NO_SCHEMAS: tuple[Any, ...] = (None, "", 3, [], {})
LIMITS = LimitSettings(grammar_bytes=2000, grammar_depth=12)


def checked(body: bytes | dict[str, Any], limits: LimitSettings = LIMITS) -> str | None:
    """The field that is refused, or None."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    parsed = parse_body(data)
    if not request_limits.has_grammar(parsed):
        return "not checked"
    try:
        request_limits.check_grammars(parsed, nesting_depth(data, limits.json_depth), limits)
    except GatewayError as error:
        return error.param if error.code == "invalid_request" else error.code
    return None


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


def tool(schema: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


WHERE: list[tuple[str, Any, int]] = [
    ("json_schema", lambda schema: schema, 0),
    ("response_format", lambda schema: {"json_schema": {"schema": schema}}, 2),
    ("response_format", lambda schema: {"type": "json_object", "schema": schema}, 1),
    ("tools", lambda schema: [tool({}), tool(schema)], 3),
    ("tools", lambda schema: [{"name": "f", "input_schema": schema}], 2),
    ("text", lambda schema: {"format": {"schema": schema}}, 2),
    ("output_config", lambda schema: {"format": {"schema": schema}}, 2),
    ("output_format", lambda schema: {"schema": schema}, 1),
]
"""Where APIs have schemas, and the levels of nesting around them."""


@each_case(("name", "around", "levels"), WHERE)
def test_schemas_have_a_limit_of_size_and_of_depth(name: str, around: Any, levels: int) -> None:
    assert checked({name: around({"description": "x" * 1500})}) is None
    assert checked({name: around({"description": "x" * 2000})}) == name
    assert checked({name: around(nested(12 - levels))}) is None
    assert checked({name: around(nested(13 - levels))}) == name
    # Also where the whole body is worth counting, and elsewhere it may be deeper.
    many: dict[str, Any] = {"metadata": [[[]]] * 60}
    assert checked(many | {name: around(nested(12 - levels))}) is None
    assert checked(many | {name: around(nested(13 - levels))}) == name
    assert checked({"x": nested(70), name: around({})}) is None
    assert checked({"tools": [tool({"description": "x" * 500})] * 40}) is None, "together"


def test_grammars_have_a_size_and_a_depth_limit() -> None:
    assert checked({"grammar": "root ::= " + '"a" ' * 300}) is None
    assert checked({"grammar": "root ::= " + '"a" ' * 600}) == "grammar"
    assert checked({"grammar": "root ::= " + "(" * 12 + '"a"' + ")" * 12}) is None
    assert checked({"grammar": "root ::= " + "(" * 13 + '"a"' + ")" * 13}) == "grammar"
    assert checked(b'{"gr\\u0061mmar": "%b"}' % (b"(" * 20)) == "grammar"
    assert checked(b'{"grammar": "", "grammar": "%b"}' % (b"\\u0028" * 20)) == "grammar"


@each_case(
    ("text", "levels"),
    [
        (b'root ::= ("a" | ("b" ("c")) ) (("d"))', 3), (b"(()())(())((()))", 3),
        (b'"((((" [((((] # ((((\n (("\\"((" [\\]((])) # ((', 2), (b'(( "((((', 2),
        (b"(( [((((", 2), (b"))((", 2), (b")))" * 9 + b"((((", 4), (b"(" * 200, 10),
        (b"(()" * 200, 10), (b'"\\', 0), (b"# ((\r((((", 4),
    ],
)  # fmt: skip
def test_only_grouping_parentheses_count(text: bytes, levels: int) -> None:
    # There must be enough of them to be counted at all.
    padded = b"# " + b"(" * 10 + b"\n" + text
    assert min(request_limits.parenthesis_depth(padded, 9), 10) == levels
    assert request_limits.parenthesis_depth(text, 900) == 0


@each_case("unit", [b"(", b'"\\"', b"()", b'("")', b"[\\]", b"#("])
def test_no_grammar_takes_long_to_measure(unit: bytes) -> None:
    text = unit * (LimitSettings().grammar_bytes // len(unit))
    began = time.process_time()
    request_limits.parenthesis_depth(text, 64)
    # 20 ms; half a minute if the time grew with the square of the length.
    assert time.process_time() - began < 5


def test_a_body_with_neither_is_not_checked() -> None:
    assert checked({"messages": [], "x": nested(100)}) == "not checked"
    for value in NO_SCHEMAS:
        for name in ("grammar", "tools", "response_format"):
            assert checked({name: value}) is None, "the node reports the error itself"


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"a": 1} for n in range(count)}, **more}


NAMED = [f"p{n}" for n in range(50)]


@each_case(
    ("body", "field"),
    [
        ({"json_schema": properties(41)}, "json_schema"),
        ({"json_schema": properties(40)}, None),
        ({"json_schema": properties(50, required=NAMED)}, None),
        ({"json_schema": properties(50, required=NAMED[:5])}, "json_schema"),
        ({"json_schema": {"allOf": [properties(20), properties(15), properties(15)]}},
         "json_schema"),
        ({"json_schema": {"$defs": {"a": properties(20)}, "allOf": [{"$ref": "#/$defs/a"}] * 3}},
         "json_schema"),
        ({"json_schema": {"anyOf": [properties(30), properties(35)]}}, "json_schema"),
        ({"json_schema": {"anyOf": [properties(30), properties(30)]}}, None),
        ({"response_format": {"json_schema": {"schema": properties(60)}}}, "response_format"),
        ({"tools": [{"name": "f", "input_schema": properties(50)}]}, "tools"),
        ({"tools": [tool(properties(30))] * 3}, "tools"),
        ({"tools": [tool(properties(8))] * 50}, None),
    ],
)  # fmt: skip
def test_optional_properties_are_counted(body: dict[str, Any], field: str | None) -> None:
    assert checked(body, LimitSettings(grammar_properties=40)) == field


def test_fewer_optional_items_mean_fewer_optional_properties() -> None:
    parsed = parse_body(json.dumps({"json_schema": properties(33)}).encode())
    request_limits.check_grammars(parsed, 0, LimitSettings(grammar_optionals=3))
    with pytest.raises(GatewayError, match=r"'limits\.grammar_optionals', 16 of them"):
        request_limits.check_grammars(parsed, 0, LimitSettings(grammar_optionals=2))


ROW = "root ::= " + '"a"? ' * 33 + '"b"'
PATTERN = {"type": "string", "pattern": "^" + "a?" * 33 + '[\\"]$'}


@each_case(
    ("body", "field"),
    [
        ({"grammar": ROW}, "grammar"),
        ({"grammar": ROW.replace('"a"? ', "", 1)}, None),
        ({"grammar": "root ::= [a-z]{0,2000} [.]?"}, None),
        ({"grammar": f'{ROW}\0\nroot ::= "a"'}, "grammar"),
        ({"tools": [tool({}), tool({"properties": {"p": PATTERN}})]}, "tools"),
        ({"text": {"format": {"schema": PATTERN}}}, "text"),
        ({"text": json.dumps(PATTERN)}, None),
        ({"tools": [tool({"properties": {"pattern": {"description": PATTERN["pattern"]}}})]}, None),
        ({"tools": [tool({"pattern": "^[a-z]{2,40}$"})] * 900}, None),
        ({"tools": [tool({"pattern": f"^{'ab' * 30}c?$"})] * 300}, "tools"),  # too long together
        ({"tools": [tool({"pattern": f"^{'ab' * 30}$"})] * 300}, None),
    ],
)
def test_optional_items_in_a_row_are_counted(body: dict[str, Any], field: str | None) -> None:
    for spelt in (json.dumps(body), json.dumps(body).replace('"pattern"', '"\\u0070attern"')):
        assert checked(spelt.encode(), LimitSettings()) in {field, field or "not checked"}


DEEP = "root ::= " + "(" * 100 + '"a"' + ")" * 100
SCHEMA = {"description": "x" * 140_000}
PROPERTIES = {f"p{n}": {"type": "string"} for n in range(20_000)}
COSTLY: list[dict[str, Any]] = [
    {"grammar": DEEP},
    {"grammar": ROW},
    {"json_schema": SCHEMA},
    {"tools": [tool(SCHEMA)]},
    {"tools": [{"name": "f", "input_schema": SCHEMA}]},
    {"tools": [tool({"a": 1})] * 20_000},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": PROPERTIES}}},
    {"text": {"format": {"schema": SCHEMA}}},
]


@pytest.mark.parametrize(
    ("path", "streams"),
    [
        *((path, (True, False)) for path in ("/v1/chat/completions", "/v1/messages", "/infill")),
        *((path, (False,)) for path in ("/apply-template", "/v1/messages/count_tokens")),
        *((path, (False,)) for path in ("/tokenize", "/v1/embeddings")),
    ],
)
@in_virtual_time
async def test_a_refused_request_reaches_no_node(
    tmp_path: Path, path: str, streams: tuple[bool, ...]
) -> None:
    async with proxy_over(tmp_path, EmulatedNode(infill=True)) as proxy:
        for more, stream in itertools.product(COSTLY, streams):
            reply = await proxy.ask(path, stream=stream, content="x", input="x", **more)
            assert reply.status_code == 400
            assert reply.headers["x-gateway-reason"] == "invalid_request"
            error = reply.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert next(iter(more)) in error["message"]
        assert proxy.servers["a"].requests == 0
        if path in {"/v1/chat/completions", "/v1/messages", "/infill"}:
            fine = await proxy.ask(path, grammar='root ::= ("a")', max_tokens=2, n_predict=2)
            assert fine.status_code == 200


@in_virtual_time
async def test_the_operators_limits_hold(tmp_path: Path) -> None:
    limits = {"grammar_bytes": "1MiB", "grammar_depth": 120}
    async with proxy_over(tmp_path, EmulatedNode(), limits=limits) as proxy:
        reply = await proxy.ask(grammar=DEEP, json_schema=SCHEMA, tools=[tool(SCHEMA)])
        assert reply.status_code == 200


MIB = 1 << 20
HUGE: dict[str, Any] = {
    "stop": ["q" * 3 * MIB],
    "stop_sequences": ["q" * 5000],
    "logit_bias": [["x" * 100, 1.0]] * 1000,
    "response_fields": ["a/b"] * 20_000,
    "samplers": "t" * 60_000,
    "dry_sequence_breakers": [f"b{number}" for number in range(500)],
}


@each_case("path", GENERATION_PATHS)
@each_case("field", HUGE)
def test_options_that_a_node_echoes_are_bounded(path: str, field: str) -> None:
    body = {"model": "demo", **BODIES[path], field: HUGE[field]}
    assert refused(body, path) == (400, "invalid_request", field)


def test_samplers_are_few() -> None:
    body = {"model": "demo", "prompt": "a"}
    for value in ("d" * 33, ["dry"] * 33):
        assert refused(body | {"samplers": value}, "/completion")[2] == "samplers"
    usual = {"stop": ["\n\n"], "logit_bias": {"1": -100}, "dry_sequence_breakers": ["\n", ":"]}
    for most in ("d" * 32, ["dry"] * 32, None, 1):
        prepared(body | usual | {"samplers": most, "grammar_triggers": []}, "/completion")


@each_case("value", [[{"type": 2, "value": "((.*)*)*b"}], {"type": 2}, "x", 1])
def test_a_grammar_trigger_is_refused(value: Any) -> None:
    body = {"model": "demo", "prompt": "a", "grammar_lazy": True, "grammar_triggers": value}
    assert refused(body, "/completion") == (400, "invalid_request", "grammar_triggers")


def test_a_larger_request_may_cause_larger_events() -> None:
    limits = LimitSettings()
    assert max_event_bytes(100, limits, logprobs=False) == MIB + ECHO_FACTOR * 100
    assert max_event_bytes(64 * MIB, limits, logprobs=False) == limits.response_bytes
    assert max_event_bytes(100, limits, logprobs=True) == limits.response_bytes


@each_case(
    ("field", "value", "logprobs"),
    [
        ("logprobs", True, True), ("logprobs", 5, True), ("n_probs", 1, True),
        ("top_logprobs", 2, True), ("logprobs", False, False), ("n_probs", 0, False),
    ],
)  # fmt: skip
def test_a_request_for_logprobs_is_recognised(field: str, value: object, logprobs: bool) -> None:
    body = {"model": "demo", "prompt": "a", field: value}
    assert prepared(body, "/completion").logprobs is logprobs
    for odd in ("100000", [5], {"n": 5}):
        body["logprobs"] = odd
        assert refused(body, "/v1/completions") == (400, "invalid_request", "logprobs")


def test_an_event_may_be_larger_after_many() -> None:
    framer = EventFramer(64, ceiling=4 * GROWTH_PER_EVENT)
    framer.feed(b"data: {}\n\n" * 3)
    framer.feed(b"data: " + (3 * GROWTH_PER_EVENT) * b"x")
    framer.feed(b"\n\n")
    with pytest.raises(InvalidResponse, match=str(4 * GROWTH_PER_EVENT)):
        framer.feed(b"data: " + 5 * GROWTH_PER_EVENT * b"x")


DOUBLED = "\n".join(f"r{i + 1} ::= r{i} r{i}" for i in range(2000))
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # with "escapes"?
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""


@each_case(
    ("grammar", "count"),
    [
        ("", 0), ('root ::= "a" [b-z] . root2', 0), ("root ::= " + '"a"? ' * 7 + '"b"', 7),
        ("root ::= " + '("a" | )' * 7, 7), ('x ::= "a" | ""\nroot ::= ' + "x " * 7, 7),
        ("root ::= " + "[a-z]* " * 7, 14),
        ("root ::= " + "[a-z]+ " * 7, 2),  # the rest of each ends before the next one
        ('root ::= ("a"?){7}', 7), ('root ::= ("a"?){0,7}', 7), ('root ::= ("a"?){7,}', 17),
        ('root ::= (("a"?){7}){9}', 63), ("root ::= [a-z]{0,2000}", 10),
        ("root ::= ([a-z]{0,10}){7}", 14), ('root ::= "a"? "b"? "c" "d"? "e"?', 2),
        ('root ::= ("c" "a"? "b"?) ("d"? "e"?)', 4), ('root ::= "a"? ("b" | "c"? "d"?) "e"?', 4),
        ('root ::= ("a" "b"? "c"?)? ("a" "b"? "c"?)?', 3),
        ("root ::= ([a-z] | [A-Z] | [0-9])? [a-z]?", 4),
        ('root ::= ("one" | "two" | "three" | "four" | "five")?', 2),
        ('root ::= "?*{9}" [?*{}] # ????\n', 0), ('root ::= "a"? # ( "b"?\n "c"?', 2),
        ('root ::=\n  "a"?\n  | "b"? (\n "c"? )', 2),
        (f'{DOUBLED}\nr0 ::= "a"?\nroot ::= r3 "b"', 10**9), ("a ::= b?\nb ::= a?", 2), (JSON, 9),
        ('root ::= "a"? # "b"?\r "c"?', 2), ("root ::= " + "[a-z]{0#,9}\n,#\r1} " * 7, 7),
        ('root ::= "x? y? z? \\', 0), ("root ::= [x? y? z? \\", 0),
        ("root ::= " + " ".join(f'("field{n}=" [a-z]+ ",")?' for n in range(40)) + '"end"', 10),
        ("root ::= " + r'("\x61\x62" [a-z])? ' * 40, 40), ('"a"? "b"?', 0), (CHESS, 3),
        ("root ::= [a-z ] root? root?", 2), ('root ::= "(" root{0,9} ")" | [a-z]', 2),
        ('root ::= "(" ws item+ ")" ws\nitem ::= root | [a-z]+ ws\nws ::= [ ]*', 8),
        ('root ::= "<" [a-z]+ ">" (root | [^<]+)* "</" [a-z]+ ">"', 4),
        # References of a rule to itself in a row are above all limits.
        *((f'root ::= a "."\na ::= [a-z ] {rules}', 10**9) for rules in (
            "a? a? a?", "(a a?)*", "a+ | [a-z ]", "b b b b b b b b\nb ::= a |",
            "b b\nb ::= a a |", 'a? a? "!" a? a?', "a? a? ws\nws ::= [ ]*")),
    ],
)  # fmt: skip
def test_the_longest_row_is_counted(grammar: str, count: int) -> None:
    assert longest_row(grammar) == count
    if all("::=" in line for line in grammar.splitlines()):
        assert longest_row("\n".join(grammar.splitlines()[::-1])) == count


def test_what_is_above_the_limit_is_not_counted_to_its_end() -> None:
    assert 100 < longest_row("root ::= " + '"a"? ' * 5000, 100) <= 110


@each_case(
    ("pattern", "count"),
    [
        ("^abc$", 0), ("^" + "a?" * 7 + "b$", 7), ("(?:a?){7}b", 7), (r"a*?b*?", 4),
        (r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2})?$", 1), (r"^[a-zA-Z0-9_-]{1,128}$", 5),
        (r"\?\*[?*]{3}[]?]", 0), ("(a?b?", 2), (r"a?[x?y?z?" + "\\", 1),
        (r"^[a-zA-Z0-9._%+-]+@([a-zA-Z0-9-]+\.)+[a-zA-Z]{2,}$", 2),
        (r"^P(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?$", 5),
    ],
)  # fmt: skip
def test_the_longest_row_of_a_pattern_is_counted(pattern: str, count: int) -> None:
    assert longest_row_of_pattern(pattern) == count


@each_case(
    "grammar",
    [
        "root ::= " + '"a"? "b" ' * 14_000, "root ::= " + '("a"?) "b" ' * 11_000,
        'root ::= "a"' + "{0,1}" * 25_000, "root ::= " + "x " * 65_000, 'x ::= "a"' + "? " * 65_000,
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(6_500)),
        "root ::= [" * 13_000, "root ::= " + "!<" * 60_000, "root ::= " + "{0" * 60_000,
        'root ::= "' + "\\" * 130_000, "root ::= " + '"\\' * 65_533, "root ::= " + "[\\" * 65_533,
        "root ::= " + "{#\r" * 43_000, "root ::= x " + '("a" | ) "b" ' * 9_000,
        "\n".join(f"r{i} ::= r{(i + 1) % 5_000} r{(i + 1) % 5_000}" for i in range(5_000)),
    ],
)  # fmt: skip
def test_the_work_is_bounded(grammar: str) -> None:
    began = time.process_time()
    longest_row(grammar, 32)
    assert time.process_time() - began < 1  # 0.04 s on a quiet machine; 4 s if it were not linear
