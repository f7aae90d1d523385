"""Grammars and schemas are measured before a node sees them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.proxy.inbound import request_limits
from gateway.proxy.inbound.body import nesting_depth, parse_body
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import proxy_over
from tests.virtual import in_virtual_time

NO_SCHEMAS: tuple[Any, ...] = (None, "", 3, [], {})
LIMITS = LimitSettings(grammar_bytes=2000, grammar_depth=12)
CHAT = "/v1/chat/completions"


def checked(body: bytes | dict[str, Any]) -> str | None:
    """The field that is refused, or None."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    parsed = parse_body(data)
    if not request_limits.has_grammar(parsed):
        return "not checked"
    try:
        request_limits.check_grammars(parsed, nesting_depth(data, LIMITS.json_depth), LIMITS)
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


@pytest.mark.parametrize(("name", "around", "levels"), WHERE)
def test_schemas_have_a_depth_limit(name: str, around: Any, levels: int) -> None:
    assert checked({name: around(nested(12 - levels))}) is None
    assert checked({name: around(nested(13 - levels))}) == name
    # Also where the whole body is worth counting, and elsewhere it may be deeper.
    many: dict[str, Any] = {"metadata": [[[]]] * 60}
    assert checked(many | {name: around(nested(12 - levels))}) is None
    assert checked(many | {name: around(nested(13 - levels))}) == name
    assert checked({"x": nested(70), name: around({})}) is None


@pytest.mark.parametrize(("name", "around", "levels"), WHERE)
def test_schemas_have_a_size_limit(name: str, around: Any, levels: int) -> None:
    assert checked({name: around({"description": "x" * 1500})}) is None
    assert checked({name: around({"description": "x" * 2000})}) == name


def test_many_tools_may_be_larger_together() -> None:
    assert checked({"tools": [tool({"description": "x" * 500})] * 40}) is None


def test_grammars_have_a_size_and_a_depth_limit() -> None:
    assert checked({"grammar": "root ::= " + '"a" ' * 300}) is None
    assert checked({"grammar": "root ::= " + '"a" ' * 600}) == "grammar"
    assert checked({"grammar": "root ::= " + "(" * 12 + '"a"' + ")" * 12}) is None
    assert checked({"grammar": "root ::= " + "(" * 13 + '"a"' + ")" * 13}) == "grammar"
    assert checked(b'{"gr\\u0061mmar": "%b"}' % (b"(" * 20)) == "grammar"
    assert checked(b'{"grammar": "", "grammar": "%b"}' % (b"\\u0028" * 20)) == "grammar"


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (b'root ::= ("a" | ("b" ("c")) ) (("d"))', 3),
        (b"(()())(())((()))", 3),
        (b'"((((" [((((] # ((((\n (("\\"((" [\\]((])) # ((', 2),
        (b'(( "((((', 2),
        (b"(( [((((", 2),
        (b"))((", 2),
        (b")))" * 9 + b"((((", 4),
        (b"(" * 200, 10),
        (b"(()" * 200, 10),
        (b'"\\', 0),
        (b"# ((\r((((", 4),
    ],
)
def test_only_grouping_parentheses_count(text: bytes, levels: int) -> None:
    # There must be enough of them to be counted at all.
    padded = b"# " + b"(" * 10 + b"\n" + text
    assert min(request_limits.parenthesis_depth(padded, 9), 10) == levels
    assert request_limits.parenthesis_depth(text, 900) == 0


@pytest.mark.parametrize("unit", [b"(", b'"\\"', b"()", b'("")', b"[\\]", b"#("])
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


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"json_schema": properties(41)}, "json_schema"),
        ({"json_schema": properties(40)}, None),
        ({"json_schema": properties(50, required=NAMED)}, None),
        ({"json_schema": properties(50, required=NAMED[:5])}, "json_schema"),
        ({"json_schema": {"items": {"anyOf": [properties(41)]}}}, "json_schema"),
        ({"json_schema": {"allOf": [properties(20), properties(15), properties(15)]}},
         "json_schema"),
        ({"json_schema": {"$defs": {"a": properties(20)}, "allOf": [{"$ref": "#/$defs/a"}] * 3}},
         "json_schema"),
        ({"json_schema": {"anyOf": [properties(30), properties(35)]}}, "json_schema"),
        ({"json_schema": {"anyOf": [properties(30), properties(30)]}}, None),
        ({"response_format": {"json_schema": {"schema": properties(60)}}}, "response_format"),
        ({"tools": [tool(properties(41))]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": properties(50)}]}, "tools"),
        ({"tools": [tool(properties(30))] * 3}, "tools"),
        ({"tools": [tool(properties(8))] * 50}, None),
    ],
)  # fmt: skip
def test_optional_properties_are_counted(body: dict[str, Any], field: str | None) -> None:
    parsed = parse_body(json.dumps(body).encode())
    limits = LimitSettings(grammar_properties=40)
    if field is None:
        request_limits.check_grammars(parsed, 0, limits)
        return
    with pytest.raises(GatewayError) as raised:
        request_limits.check_grammars(parsed, 0, limits)
    assert raised.value.param == field
    assert "'limits.grammar_properties'" in raised.value.message


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
        ({"grammar": ROW.replace("? ", "? ", 1).replace('"a"? ', "", 1)}, None),
        ({"grammar": "root ::= [a-z]{0,2000} [.]?"}, None),
        ({"grammar": f'{ROW}\0\nroot ::= "a"'}, "grammar"),
        ({"tools": [tool({}), tool({"properties": {"p": PATTERN}})]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": PATTERN}]}, "tools"),
        ({"response_format": {"json_schema": {"schema": PATTERN}}}, "response_format"),
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
        try:
            request_limits.check_grammars(parse_body(spelt.encode()), 0, LimitSettings())
        except GatewayError as error:
            found = error.param
        else:
            found = None
        assert found == field


DEEP = "root ::= " + "(" * 100 + '"a"' + ")" * 100
SCHEMA = {"description": "x" * 140_000}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/infill"])
@in_virtual_time
async def test_a_refused_request_reaches_no_node(tmp_path: Path, path: str) -> None:
    async with proxy_over(tmp_path, EmulatedNode(infill=True)) as proxy:
        for more in (
            {"grammar": DEEP},
            {"grammar": ROW},
            {"json_schema": SCHEMA},
            {"tools": [tool(SCHEMA)]},
        ):
            for stream in (True, False):
                reply = await proxy.ask(path, stream=stream, **more)
                assert reply.status_code == 400
                assert reply.headers["x-gateway-reason"] == "invalid_request"
                error = reply.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert next(iter(more)) in error["message"]
        assert proxy.servers["a"].requests == 0
        fine = await proxy.ask(path, grammar='root ::= ("a")', max_tokens=2, n_predict=2)
        assert fine.status_code == 200


@in_virtual_time
async def test_the_operators_limits_hold(tmp_path: Path) -> None:
    limits = {"grammar_bytes": "1MiB", "grammar_depth": 120}
    async with proxy_over(tmp_path, EmulatedNode(), limits=limits) as proxy:
        reply = await proxy.ask(grammar=DEEP, json_schema=SCHEMA, tools=[tool(SCHEMA)])
        assert reply.status_code == 200


PATHS_WITHOUT_SLOTS = [
    "/apply-template",
    "/tokenize",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
    "/v1/embeddings",
]


@pytest.mark.parametrize("path", PATHS_WITHOUT_SLOTS)
@in_virtual_time
async def test_the_limits_hold_where_nothing_is_generated(tmp_path: Path, path: str) -> None:
    huge = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
    async with proxy_over(tmp_path, EmulatedNode()) as proxy:
        for more in (
            {"grammar": DEEP},
            {"json_schema": SCHEMA},
            {"tools": [tool(SCHEMA)]},
            {"tools": [{"name": "f", "input_schema": SCHEMA}]},
            {"tools": [tool({"a": 1})] * 20_000},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": huge}}},
            {"text": {"format": {"schema": SCHEMA}}},
        ):
            reply = await proxy.ask(path, content="x", input="x", **more)
            assert reply.status_code == 400
            assert next(iter(more)) in reply.json()["error"]["message"]
        assert proxy.servers["a"].requests == 0


@in_virtual_time
async def test_a_text_is_no_schema(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode()) as proxy:
        reply = await proxy.ask("/tokenize", content="x", text="x" * 200_000, tools=[tool({})])
        assert reply.status_code == 200
