"""What a client sent becomes a request: models by their names, edits, several prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.json_values import run_at_once
from gateway.callers.limits import Accounts, LimitBook
from gateway.config.keys import LimitSpec
from gateway.config.listeners import LimitSettings
from gateway.config.scheduling import ModelRule
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.nodes.model_index import ModelIndex
from gateway.request.body import LARGE_BODY_BYTES, Body, bytes_to_parse, parse_body, read_large_body
from gateway.request.preparation import (
    MOST_CHOICES,
    MOST_PROMPTS_BYTES,
    MOST_REPEATED_BYTES,
    MOST_TARGETS,
    IncomingRequest,
    ModelAliases,
    PromptList,
    Request,
    RequestRules,
    ResolvedModel,
    Sender,
    can_assemble,
    choose_model,
    is_infill,
    parse_prompt_list,
    prepare,
    read_request,
    split_prompts,
)
from gateway.request.routes import NATIVE_ROUTE, ROUTES
from gateway.terms import Caller, Priority
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import BODIES, MESSAGES, proxy_over
from tests.nodes.build import a_node
from tests.virtual import in_virtual_time

ANYONE = Caller("c", "c", Priority.URGENT)
PNG = "data:image/png;base64,QUFB"


def prepared(
    body: bytes | dict[str, Any],
    path: str = "/v1/chat/completions",
    *,
    client_timeout: float | None = None,
    models: dict[str, ModelRule] | None = None,
    default: str | None = None,
    known: tuple[str, ...] = ("demo",),
    caller: Caller = ANYONE,
    **limits: Any,
) -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    incoming = IncomingRequest(
        id="req_1",
        x_request_id="tag",
        route=ROUTES[path],
        body=data,
        sender=Sender(
            LimitBook(Settings()).accounts(caller),
            b"accept: */*\r\n",
            client_timeout=client_timeout,
            plain_client_timeout=client_timeout,
        ),
        received_at=100.0,
    )
    rules = rules_of(known, default, models, **limits)
    return prepare(incoming, parse_body(data), Priority.NORMAL, rules)


def rules_of(
    known: tuple[str, ...] = ("demo",),
    default: str | None = None,
    models: dict[str, ModelRule] | None = None,
    **limits: Any,
) -> RequestRules:
    """The rules where nodes serve the known models."""
    index = ModelIndex()
    index.set_nodes([a_node(model=list(known))] if known else [])
    return RequestRules(LimitSettings(**limits), ModelAliases(models or {}, index), default)


def refused(body: Any, *args: Any, **keys: Any) -> tuple[int, str, str | None]:
    with pytest.raises(GatewayError) as raised:
        prepared(body, *args, **keys)
    return raised.value.status, raised.value.code, raised.value.param


@each_case(
    ("path", "body", "slots"),
    [
        ("/v1/chat/completions", {}, 1), ("/v1/chat/completions", {"n": 3}, 3),
        ("/v1/chat/completions", {"n": None}, 1), ("/v1/chat/completions", {"n": -7}, 1),
        ("/v1/chat/completions", {"n": 2.0}, 2), ("/v1/chat/completions", {"n_cmpl": 2}, 2),
        ("/v1/completions", {"prompt": ["a", "b"]}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 3),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": "a", "n": 9}, 1), ("/tokenize", {"content": "a"}, 0),
    ],
)  # fmt: skip
def test_a_prompt_takes_a_slot_per_completion(path: str, body: dict[str, Any], slots: int) -> None:
    assert prepared(body, path).lease_request.size.slots == slots


@each_case("n", ["33", "1e9", "1e400", "9" * 30])
def test_more_completions_than_allowed_are_refused(n: str) -> None:
    body = f'{{"n":{n}}}'.encode()
    assert refused(body) == (400, "invalid_request", "n")
    assert refused(body.replace(b"n", b"n_cmpl"), "/completion")[2] == "n_cmpl"


def test_the_model_is_the_named_one_or_the_default_or_the_only_one() -> None:
    assert prepared({"model": "a"}, default="b").lease_request.wanted.model == "a"
    assert prepared({}, default="b").lease_request.wanted.model == "b"
    assert prepared({"model": None}).lease_request.wanted.model == "demo"
    allowed = prepared({}, known=("demo", "x"), caller=caller_of("x"))
    assert allowed.lease_request.wanted.model == "x"
    assert refused({}, known=("a", "b")) == (400, "invalid_request", "model")
    assert refused({}, known=()) == (400, "invalid_request", "model")


def caller_of(*models: str) -> Caller:
    return Caller("c", "c", Priority.NORMAL, frozenset(models))


def test_each_model_has_the_body_that_its_rules_make() -> None:
    models = {
        "helper": ModelRule(use=("x", "y"), set={"temperature": 0.5}),
        "y": ModelRule(max_tokens=10, strip=("seed",)),
    }
    request = prepared({"model": "helper", "seed": 1}, models=models)
    bodies = {name: json.loads(bytes_to_parse(body)) for name, body in request.bodies.items()}
    assert bodies == {
        "x": {"model": "helper", "seed": 1, "temperature": 0.5},
        "y": {"model": "helper", "temperature": 0.5, "max_tokens": 10},
    }


def test_a_deadline_counts_from_the_arrival() -> None:
    assert prepared({}, client_timeout=2.5).deadline == 102.5
    assert prepared({}).deadline is None
    assert prepared({}, client_timeout=2.5).lease_request.caller.time_limit == 2.5
    assert prepared({}).lease_request.caller.time_limit is None


def test_deep_nesting_is_refused_whatever_this_python_could_read() -> None:
    for levels in (200, 1_000_000):
        deep = b'{"a":' + levels * b"[" + levels * b"]" + b"}"
        assert refused(deep) == (400, "invalid_request", None)
    deep = b'{"a":' + 200 * b"[" + 200 * b"]" + b"}"
    assert prepared(deep, json_depth=300).bodies["demo"] is deep


@each_case(
    ("body", "tokens"),
    [
        ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_tokens": 5, "n_predict": -1}, None), ({"max_tokens": 0}, 1), ({}, None),
        ({"max_output_tokens": 7, "max_tokens": None}, 7),
    ],
)  # fmt: skip
def test_a_body_may_say_the_most_tokens(body: dict[str, Any], tokens: int | None) -> None:
    assert prepared(body).lease_request.size.max_tokens == tokens


@each_case(("of_all", "of_caller", "most"), [(64, 30, 30), (20, 30, 20), (None, 30, 30)])
def test_an_answer_is_as_long_as_the_settings_and_the_callers_limits_allow(
    of_all: int | None, of_caller: int, most: int
) -> None:
    caller = replace(ANYONE, limits=LimitSpec(completion_tokens=of_caller))
    one = prepared({"max_tokens": 100}, caller=caller, max_tokens=of_all)
    assert one.lease_request.size.max_tokens == most


@each_case(
    ("path", "asked", "sent"),
    [
        ("/v1/chat/completions", {"max_tokens": 5, "n_predict": 9}, {"max_tokens": 9}),
        ("/v1/chat/completions", {"max_tokens": 5, "n_predict": -7}, {"max_tokens": -1}),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 5},
         {"max_completion_tokens": 9}),
        ("/v1/completions", {"max_completion_tokens": 5}, {"max_tokens": 5}),
        ("/v1/messages", {"max_tokens": 5, "n_predict": 9}, {"max_tokens": 9}),
        ("/v1/responses", {"max_output_tokens": None, "max_tokens": 5}, {"max_output_tokens": 5}),
        ("/completion", {"n_predict": 5, "max_tokens": 9}, {"n_predict": 9}),
        ("/completion", {"n_predict": (1 << 32) + 5}, {"n_predict": (1 << 31) - 1}),
    ],
)  # fmt: skip
def test_a_node_is_sent_one_bound(path: str, asked: dict[str, Any], sent: dict[str, Any]) -> None:
    body = json.loads(bytes_to_parse(prepared(BODIES[path] | asked, path).bodies["demo"]))
    assert body == BODIES[path] | sent


def body_with_image(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def test_an_operator_may_allow_hosts() -> None:
    hosts = ("pictures.example",)
    for url in ("http://pictures.example/x.png", "https://pictures.example:8443/x?y=1"):
        assert prepared(body_with_image(url), media_hosts=hosts).lease_request.wanted.needs_vision
    for url in (
        "http://pictures.example@evil/x", "http://evil\\@pictures.example/",
        "http://evil#@pictures.example/", "http://pictures.example.evil/",
        "file://pictures.example/etc/passwd", "http://pictures.example /x", "http://[::1",
    ):  # fmt: skip
        assert refused(body_with_image(url), media_hosts=hosts)[0] == 400


@in_virtual_time
async def test_a_node_gets_the_clients_own_bytes(tmp_path: Path) -> None:
    body = (
        b'{ "messages":[ {"role":"user", "content":"\\u00e9 \xc3\xa9 \\/ "} ],\n'
        b'\t"temperature":0.10, "seed":12345678901234567890, "model":"demo", "stream":true }'
    )
    async with proxy_over(tmp_path, one := EmulatedNode()) as proxy:
        reply = await proxy.running.client.post("/v1/chat/completions", content=body)
        assert reply.status_code == 200
        assert one.seen[-1].body == body
        edited = body.replace(b'"model"', b'"id_slot":1,"model"')
        await proxy.running.client.post("/v1/chat/completions", content=edited)
        inside = body[body.index(b"[") : body.index(b"]") + 1]
        assert inside in one.seen[-1].body
        assert b'"temperature":0.10,"seed":12345678901234567890' in one.seen[-1].body
        assert b"id_slot" not in one.seen[-1].body


@in_virtual_time
async def test_a_node_gets_its_own_name_for_the_model(tmp_path: Path) -> None:
    one = EmulatedNode()
    nodes = ({"model": {"public": "inner"}},)
    models = {"gpt-4o-mini": {"use": "public", "set": {"temperature": 0}}}
    async with proxy_over(tmp_path, one, nodes=nodes, models=models) as proxy:
        for name in ("public", "gpt-4o-mini"):
            assert (await proxy.ask(model=name)).status_code == 200
            assert json.loads(one.seen[-1].body)["model"] == "inner"
        assert json.loads(one.seen[-1].body)["temperature"] == 0
        assert (await proxy.ask(model="inner")).status_code == 404
        assert (await proxy.ask()).status_code == 200
        assert "model" not in json.loads(one.seen[-1].body)


@in_virtual_time
async def test_a_node_never_gets_a_remote_image(tmp_path: Path) -> None:
    blind, seeing = EmulatedNode(), EmulatedNode()
    nodes: tuple[dict[str, Any], ...] = ({}, {"endpoints": ["chat", "vision"]})
    async with proxy_over(tmp_path, blind, seeing, nodes=nodes) as proxy:
        reply = await proxy.ask(**body_with_image("http://169.254.169.254/latest"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
        assert blind.requests + seeing.requests == 0
        assert (await proxy.ask(**body_with_image(PNG))).headers["x-gateway-node"] == "b"
        source = {"type": "url", "url": "http://169.254.169.254/latest"}
        content = [{"type": "image", "source": source}]
        reply = await proxy.ask("/v1/messages", messages=[{"role": "user", "content": content}])
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert blind.requests + seeing.requests == 1


def test_no_more_than_some_choices_are_kept() -> None:
    names = [f"m{number}" for number in range(MOST_CHOICES + 1)]
    rules, sender = rules_of(tuple(names)), Sender(Accounts(ANYONE))
    for name in names:
        choose_model(name, sender, rules)
        assert 0 < len(rules.model_aliases._choices) <= MOST_CHOICES


TO_B, TO_BOTH = ModelRule(use=("b",), set={"x": 1}), ModelRule(use=("b", "c"))
X, SELF, VIA = ModelRule(set={"x": 2}), ModelRule(use=("a", "b")), ModelRule(use=("via", "b"))


@each_case(
    ("rules", "models"),
    [
        ({}, [("a", ())]),
        ({"a": TO_B}, [("b", (TO_B,))]),
        ({"a": TO_BOTH}, [("b", (TO_BOTH,)), ("c", (TO_BOTH,))]),
        ({"a": TO_B, "b": X}, [("b", (TO_B, X))]),
        ({"a": SELF}, [("a", (SELF,)), ("b", (SELF,))]),
        ({"a": VIA, "via": TO_B}, [("b", (VIA, TO_B))]),  # the first path to a model counts
    ],
)
def test_a_name_resolves_to_the_models_it_uses_with_the_rules_on_the_way(
    rules: dict[str, ModelRule], models: list[tuple[str, tuple[ModelRule, ...]]]
) -> None:
    found = ModelAliases(rules, ModelIndex()).resolve("a")
    assert found == tuple(ResolvedModel(name, applied) for name, applied in models)


def test_the_models_of_an_alias_are_bounded() -> None:
    wide = ModelRule(use=tuple(f"m{i}" for i in range(100)))
    assert len(ModelAliases({"wide": wide}, ModelIndex()).resolve("wide")) == MOST_TARGETS


def raw(value: Any, **layout: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, **layout).encode())


@each_case(
    ("prompt", "count"),
    [
        ("text", 0), ([], 0), ([1, 2, 3], 0), (["a", 5, "b"], 0), (["a"], 0), (None, 0),
        (["a", "b", "c"], 3), ([[1, 2], [3]], 2), ([["a", 1], "b"], 2),
        ([{"prompt_string": "a"}, {"prompt_string": "b"}], 2), ({"prompt_string": "a"}, 0),
    ],
)  # fmt: skip
def test_prompts_are_counted_as_the_server_counts_them(prompt: Any, count: int) -> None:
    assert split_prompts(msgspec.Raw()) == []
    assert len(split_prompts(raw(prompt))) == count
    assert len(split_prompts(raw(prompt, indent=2))) == count
    assert len(split_prompts(raw(prompt, indent=100))) == count


def made(body: dict[str, Any], **limits: Any) -> PromptList | None:
    data, rules = json.dumps(body).encode(), rules_of(**limits)
    whole: Body = data
    if len(data) >= LARGE_BODY_BYTES:
        whole = run_at_once(read_large_body(data, rules.limits))
    incoming = IncomingRequest(
        "a", "b", ROUTES["/v1/completions"], whole, Sender(Accounts(ANYONE)), 0.0
    )
    return parse_prompt_list(incoming, raw(body["prompt"]), Priority.NORMAL, rules)


@pytest.mark.parametrize("length", [1, LARGE_BODY_BYTES])
def test_each_prompt_is_sent_with_all_other_fields(length: int) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": ["b" * length, [1, 2]], "seed": 7}
    found = made(body)
    assert found is not None
    for index, prompt in enumerate(body["prompt"]):
        [part] = run_at_once(found.sub_request(index)).bodies.values()
        sent = part if isinstance(part, bytes) else part.to_bytes()
        assert json.loads(sent) == {**body, "prompt": prompt}


@pytest.mark.parametrize("length", [1, LARGE_BODY_BYTES])
def test_prompts_are_few_and_small_together(length: int) -> None:
    assert made({"prompt": ["a" * length] * 5}, prompts=5) is not None
    repeated = {"prompt": ["a"] * 1000, "grammar": "x" * (MOST_REPEATED_BYTES // 1000 - 100)}
    assert made(repeated) is not None
    assert made({"prompt": ["a" * (MOST_PROMPTS_BYTES - 100), "b"]}) is not None
    assert made({"prompt": "a" * 2 * MOST_PROMPTS_BYTES}) is None
    assert made({"prompt": [7] * (MOST_PROMPTS_BYTES // 2)}) is None
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["a" * length] * 6}, "the most is 5"),
        ({"prompt": ["a" * MOST_PROMPTS_BYTES, "b"]}, "Send fewer"),
        (repeated | {"grammar": "x" * (MOST_REPEATED_BYTES // 1000)}, "sent with each"),
    ]
    for body, why in wrong:
        with pytest.raises(GatewayError, match=why) as caught:
            made(body, prompts=5 if "5" in why else 1000)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


def read(path: str, body: bytes, *, patient: bool = False) -> Request:
    """The request of a body that came as it is."""
    sender = Sender(Accounts(ANYONE), patient=patient)
    incoming = IncomingRequest("a", "b", ROUTES[path], body, sender, 0.0)
    record = RequestRecord("b", path)
    return read_request(incoming, record, rules_of(), lambda _: Priority.BATCH)


def test_nodes_get_no_byte_order_mark() -> None:
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    assert read("/v1/chat/completions", b"\xef\xbb\xbf" + body).bodies == {"demo": body}


def test_of_a_stored_request_with_several_prompts_none_gives_its_slot_away_by_itself() -> None:
    request = read("/v1/completions", b'{"prompt": ["a", "b"], "max_tokens": 1}', patient=True)
    assert request.prompt_list is not None
    one = run_at_once(request.prompt_list.sub_request(0))
    for caller, waits in ((request.lease_request.caller, True), (one.lease_request.caller, False)):
        assert (caller.patient, caller.yields) == (waits, waits)


GENERATING = BODIES | {"/infill": {"input_prefix": "hello"}}


def test_every_path_that_generates_says_where_its_prompt_and_limit_are() -> None:
    for route in ROUTES.values():
        if route.generates:
            assert route.prompt_field in GENERATING[route.path]
            assert route.api.max_tokens_fields
    assert NATIVE_ROUTE.path == "/completion"


def assembles(path: str, slots: int = 1, **more: Any) -> bool:
    body = msgspec.json.encode(GENERATING.get(path, {}) | more)
    return can_assemble(ROUTES[path], body, parse_body(body).messages, slots)


@each_case("path", GENERATING)
def test_plain_responses_are_assembled_from_streams(path: str) -> None:
    assert assembles(path)
    for field in ("response_fields", "return_progress", "timings_per_token", "verbose", "echo"):
        assert not assembles(path, **{field: True})


def test_several_answers_are_assembled_only_where_events_tell_them_apart() -> None:
    assert [path for path in GENERATING if assembles(path, slots=2)] == ["/v1/chat/completions"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_plain_response_that_repeats_the_last_message_is_not_assembled(path: str) -> None:
    begun = {"role": "assistant", "content": "a"}
    assert not assembles(path, messages=[*MESSAGES, begun])
    assert assembles(path, messages=[*MESSAGES, begun, *MESSAGES])
    assert not assembles(path, messages=["assistant"])


@each_case(
    ("path", "body", "infill"),
    [
        ("/infill", b'{"input_prefix":"a"}', True),
        ("/v1/completions", b'{"prompt":"a","suffix":"b"}', True),
        ("/completion", b'{"prompt":"a","suffix":"\\u0062"}', True),
        ("/v1/completions", b'{"prompt":"a"}', False),
        ("/v1/completions", b'{"prompt":"a","suffix":""}', False),
        ("/v1/completions", b'{"prompt":"a","suffix":null}', False),
        ("/v1/chat/completions", b'{"messages":[],"suffix":"b"}', False),
    ],
)
def test_a_suffix_makes_a_completion_an_infill(path: str, body: bytes, infill: bool) -> None:
    assert is_infill(ROUTES[path], parse_body(body)) is infill
