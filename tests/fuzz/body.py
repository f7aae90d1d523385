"""The body's reading: `body.py`, `json_outline.py` and `preparation.py` of `request`.

Oracles: the outline does not depend on where it cuts the body, and finds the fields that a decoder
finds; a body read as a large one becomes the same request as one read whole; what a node gets is
JSON with the client's own values but for the documented edits; only declared errors are raised.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import msgspec

from gateway.api.json_values import run_at_once
from gateway.api.ollama import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_GENERATE
from gateway.callers.limits import Accounts
from gateway.config.listeners import LimitSettings
from gateway.config.scheduling import ModelRule
from gateway.errors import GatewayError
from gateway.nodes.model_index import ModelIndex
from gateway.request.body import parse_body, read_large_body
from gateway.request.json_outline import DEFAULT_SIZES, JsonOutline, ScanSizes, read_outline
from gateway.request.preparation import (
    IncomingRequest,
    ModelAliases,
    Request,
    RequestRules,
    Sender,
    prepare,
)
from gateway.request.routes import ROUTES, Route
from gateway.terms import Caller, Priority
from tests.fuzz.inputs import Divided, Target, seed
from tests.nodes.build import a_node

LIMITS = LimitSettings(json_depth=16)

SIZES = tuple(ScanSizes(chunk, 128, 100, 1 << 20) for chunk in (112, 150, 240))
"""Sizes by which a body of some hundred bytes is cut often. The third number is that of the longest
name that matters, all of it escaped: longer strings may be cut in two."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_ROUTES = tuple(route for route in dict.fromkeys(ROUTES.values()) if not route.multipart)

_LIMIT = re.compile(r"nested deeper|in a row|name is over|more than \d+")

_RULES = {
    "ruled": ModelRule(
        use=("demo",), set={"temperature": 0.5}, default={"max_tokens": 9}, strip=("stop",)
    )
}

_OLLAMA = tuple(
    replace(api, clock=lambda: 1.0, wall_clock=lambda: 1e9)
    for api in (OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_EMBED)
)

_EDITED = frozenset({
    "model", "temperature", "max_tokens", "stop", "priority", "id_slot", "lora", "n_probs",
    "logprobs", "top_logprobs", "n_predict", "max_completion_tokens", "max_output_tokens",
})  # fmt: skip
"""Fields that edits may change (docs/reference)."""

_CALLER = Accounts(Caller("c", "c", Priority.URGENT))


def outline_of(body: bytes, sizes: ScanSizes = DEFAULT_SIZES) -> JsonOutline | GatewayError:
    """The outline, or why there is none."""
    try:
        return run_at_once(read_outline(body, LIMITS, sizes))
    except GatewayError as error:
        return error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_outline(body: bytes) -> None:
    """Check the outline against a decoder of the whole body."""
    fields: dict[str, msgspec.Raw] | None
    try:
        json.loads(body.decode(), parse_constant=_no_constant)
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError, msgspec.DecodeError):
        fields = None
    whole = outline_of(body)
    for found in (whole, *(outline_of(body, sizes) for sizes in SIZES)):
        if isinstance(found, GatewayError):
            assert found.status == 400
            if fields is not None:
                # Some limits are those of a step, which are low here.
                assert _LIMIT.search(found.message), found.message
            continue
        assert fields is not None, "the outline takes for JSON what is none"
        values = {one.name: body[one.start : one.end] for one in found.fields}
        assert values == {name: bytes(value) for name, value in fields.items()}
        for one in found.fields:
            value = json.loads(body[one.start : one.end])
            if isinstance(value, list):
                items = [item for item in value if isinstance(item, str | list | dict)]
                assert (one.item_count, one.has_scalars) == (len(items), len(items) < len(value))
        assert not isinstance(whole, GatewayError)
        assert found._replace(fields=[]) == whole._replace(fields=[]), "cuts change the outline"
        for one, other in zip(found.fields, whole.fields, strict=True):
            assert one.item_count == other.item_count
            assert one.has_scalars == other.has_scalars
            assert one.last_role == other.last_role


class Preparer:
    """Prepares requests by one set of rules."""

    def __init__(self) -> None:
        catalog = ModelIndex()
        catalog.set_nodes([a_node(model=["demo"])])
        self._rules = RequestRules(LIMITS, ModelAliases(_RULES, catalog), "demo")

    def prepared(self, body: bytes, route: Route, *, large: bool) -> Request | GatewayError:
        """The request, read as a large body or whole; or its error."""
        try:
            whole = run_at_once(read_large_body(body, LIMITS)) if large else body
            sender = Sender(_CALLER, b"accept: */*\r\n")
            incoming = IncomingRequest("req_1", "tag", route, whole, sender, 100.0)
            parsed = parse_body(whole) if isinstance(whole, bytes) else whole.parse()
            return prepare(incoming, parsed, Priority.NORMAL, self._rules)
        except GatewayError as error:
            return error


def _sent(request: Request) -> dict[str, bytes]:
    return {
        name: body if isinstance(body, bytes) else body.to_bytes()
        for name, body in request.bodies.items()
    }


def _loads(body: bytes) -> dict[str, Any]:
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def _same(one: object, other: object) -> bool:
    """Whether two values are equal; NaN does not occur, and 1 is not true."""
    return json.dumps(one) == json.dumps(other)


def _check_request(body: bytes, route: Route, preparer: Preparer) -> None:
    small, large = (preparer.prepared(body, route, large=large) for large in (False, True))
    for one in (small, large):
        if isinstance(one, GatewayError):
            assert one.status in {400, 403, 404}, one.status
    if isinstance(small, GatewayError):
        return
    asked = _loads(body)
    for sent in _sent(small).values():
        got = _loads(sent)
        for name in asked.keys() | got.keys():
            if name == "response_fields" and isinstance(asked.get(name), list):
                # What metering needs is added behind what the client selects.
                assert _same(asked[name], got[name][: len(asked[name])])
            elif name not in _EDITED:
                assert _same(asked.get(name), got.get(name)), f"{name} was changed"
    lease = small.lease_request
    assert lease.size.slots >= (1 if route.takes_slot else 0)
    assert lease.size.prompt_tokens >= 0
    assert min(lease.size.text_bytes, lease.size.exact_tokens, lease.size.media_tokens) >= 0
    if isinstance(large, GatewayError):
        return
    other = large.lease_request
    for name in ("model", "model_names", "stream"):
        assert getattr(lease.wanted, name) == getattr(other.wanted, name), name
    for name in ("slots", "max_tokens", "generates"):
        assert getattr(lease.size, name) == getattr(other.size, name), name
    # A small body is only searched for images where one could be.
    assert other.wanted.needs_vision or not lease.wanted.needs_vision
    for name, sent in _sent(large).items():
        assert _same(_loads(sent), _loads(_sent(small)[name])), "a large body is edited otherwise"


_PREPARER = Preparer()


def check(one: Divided) -> None:
    """Check one body."""
    _check_outline(one.text)
    _check_request(one.text, _ROUTES[one.choice % len(_ROUTES)], _PREPARER)
    for api in _OLLAMA:
        try:
            translated = run_at_once(api.translate(one.text, lambda name: name == "demo"))
        except GatewayError as error:
            assert error.status in {400, 404}
        else:
            if translated.reply is None:
                _check_request(translated.body, ROUTES[translated.path], _PREPARER)


_TEXTS = (
    b'{"model":"demo","messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":5}',
    b'{"model":"ruled","messages":[{"role":"user","content":[{"type":"text","text":"a\\u00e9\\n"},{"type":"image_url","image_url":{"url":"data:image/png;base64,QUFB"}}]}],"stop":["x"],"priority":"high"}',
    b'{"prompt":["a","b",[1,2]],"n":2,"logprobs":5,"suffix":"z","echo":true}',
    b'{"prompt":[1,2,3],"n_predict":-1,"id_slot":0,"lora":[{"id":0}],"n_probs":70}',
    b'{"input":"a","instructions":"b","tools":[{"type":"mcp","server_url":"http://a"}],"text":{"format":{"type":"json_object"}}}',
    b'{"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://a"}}]},{"role":"assistant","content":"b"}],"max_tokens":1e3,"stop_sequences":["a"]}',
    b'{"query":"a","documents":["b",{"text":"c"}],"mOdel":"x"}',
    b'{"input_prefix":"a","input_suffix":"b","input_extra":[{"text":"c"}],"response_fields":["a"],"samplers":["top_k"]}',
    b' { "response_format" : { "type":"json_schema", "json_schema":{"schema":{"type":"object","properties":{"a":{"$ref":"#"}}}}}, "grammar":"root ::= [a]" } ',
    b'{"multimodal_data":["QUFB"],"content":"a","prompt":{"prompt_string":"b"},"n_cmpl":2,"logit_bias":[[1,2.5]]}',
    b'{"model":"demo","messages":[],"tools":[],"options":{"num_predict":5,"stop":["a"]},"keep_alive":"5m","format":"json","images":["QUFB"],"think":true}',
    b'{"a":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}',
    b'{"a":"\\ud83d\\ude00\\ud800","b":1.5e300,"a":null,"c":"' + b"x" * 300 + b'"}',
)  # fmt: skip

BODY = Target(
    "body",
    check,
    tuple(seed(text, number) for number, text in enumerate(_TEXTS)),
    longest=1536,
)  # fmt: skip
