"""Ollama's API: its requests as nodes get them, and their responses and errors as clients do."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.api.base import ModelSummary, ResponseRewriter, Translation, VisibleCatalog
from gateway.api.json_values import (
    LONG_STRING_BYTES,
    MOST_MESSAGE_PARTS,
    MOST_PARSED_BYTES,
    MOST_PARTS,
    SHORT_BODY_BYTES,
    run_at_once,
)
from gateway.api.ollama import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    PAGES,
    TranslatedApi,
    TranslatedRequest,
    translate_chat,
    translate_embed,
    translate_generate,
)
from gateway.errors import GatewayError
from gateway.transport.errors import InvalidResponse
from tests.api.events import event
from tests.each_case import each_case

CREATED = "2001-09-09T01:46:40Z"
TIMINGS = {"prompt_ms": 250.0, "predicted_ms": 500.5, "predicted_n": 2, "cache_n": 1}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def translation(kind: TranslatedApi = OLLAMA_CHAT, **body: Any) -> Translation:
    ticks = count()
    api = replace(kind, clock=lambda: float(next(ticks)), wall_clock=lambda: 1e9)
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "prompt": "?", **body}
    found: Translation = run_at_once(api.translate(json.dumps(asked).encode(), lambda _: True))
    return found


def chatting(**body: Any) -> ResponseRewriter:
    return translation(**body).rewriter


def plain(rewriter: ResponseRewriter, content: bytes) -> Any:
    """What the client gets in place of a plain response."""
    return json.loads(run_at_once(rewriter.rewrite_body(content)))


def chunk(reason: str | None = None, logprobs: Any = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return event({"id": "c", "model": "other", "choices": [choice]})


def end(**figures: Any) -> bytes:
    return (
        event({"choices": [], "usage": USAGE, "timings": TIMINGS} | figures) + b"data: [DONE]\n\n"
    )


def lines(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def test_a_chats_stream() -> None:
    rewriter = chatting()
    assert rewriter.rewrite_events(chunk(role="assistant", content=None)) == b""
    head = {"model": "m", "created_at": CREATED}
    [first] = lines(rewriter.rewrite_events(chunk(content="Hel")))
    assert first == {**head, "message": {"role": "assistant", "content": "Hel"}, "done": False}
    found = lines(rewriter.rewrite_events(chunk(content="lo") + chunk("stop") + end()))
    assert found[0]["message"]["content"] == "lo"
    assert found[1] == {
        **head, "message": {"role": "assistant", "content": ""}, "done": True,
        "done_reason": "stop", "total_duration": 2_000_000_000, "load_duration": 1_249_500_000,
        "prompt_eval_count": 5, "prompt_eval_duration": 250_000_000, "eval_count": 2,
        "eval_duration": 500_500_000,
    }  # fmt: skip


def test_a_chats_plain_response() -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "a", "arguments": '{"b": 1}'}},
        {"id": "y", "type": "function", "function": {"name": "c", "arguments": "{}"}},
    ]
    message = {"content": "Hello", "reasoning_content": "Hm.", "tool_calls": calls}
    content = {"choices": [{"message": message, "finish_reason": "length"}], "usage": USAGE}
    found = plain(chatting(), json.dumps(content | {"timings": TIMINGS}).encode())
    assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "length", 2)
    functions = [one["function"] for one in found["message"].pop("tool_calls")]
    assert [(one["name"], one["arguments"]) for one in functions] == [("a", {"b": 1}), ("c", {})]
    assert found["message"] == {"role": "assistant", "content": "Hello", "thinking": "Hm."}
    content = {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]}
    assert plain(chatting(), json.dumps(content).encode())["message"]["content"] == ""


def call(
    index: int, name: str | None = None, arguments: str = "", call_id: str | None = None
) -> Any:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return [{"index": index, "function": function} | ({} if call_id is None else {"id": call_id})]


def test_a_tool_call_is_sent_when_it_is_complete() -> None:
    rewriter = chatting()
    assert rewriter.rewrite_events(chunk(tool_calls=call(0, "weather", "{", "x"))) == b""
    assert rewriter.rewrite_events(chunk(tool_calls=call(0, arguments='"city": "Rome"}'))) == b""
    [first] = lines(rewriter.rewrite_events(chunk(tool_calls=call(1, "time", "", "y"))))
    assert first["message"]["tool_calls"] == [
        {"id": "x", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}}
    ]
    second, final = lines(rewriter.rewrite_events(chunk("tool_calls") + end()))
    assert second["message"]["tool_calls"] == [
        {"id": "y", "function": {"index": 1, "name": "time", "arguments": {}}}
    ]
    assert final["done_reason"] == "stop"


def test_a_tool_call_that_was_cut_off_is_dropped() -> None:
    rewriter = chatting()
    rewriter.rewrite_events(chunk(tool_calls=call(0, "weather", '{"ci')))
    [final] = lines(rewriter.rewrite_events(chunk("length") + end()))
    assert final["done_reason"] == "length"
    rewriter = chatting()
    rewriter.rewrite_events(chunk(tool_calls=call(0, "weather", '{"ci')))
    with pytest.raises(InvalidResponse):
        rewriter.rewrite_events(chunk("tool_calls"))


def test_probabilities_and_thinking() -> None:
    other = {"token": "b", "logprob": -2.0, "bytes": [98], "id": 4}
    token = {"token": "a", "logprob": -1.0, "bytes": [97], "id": 3, "top_logprobs": [other, other]}
    events = chunk(content="a", logprobs={"content": [token]})
    short = {"token": "a", "logprob": -1.0, "bytes": [97]}
    [thought] = lines(chatting().rewrite_events(chunk(reasoning_content="Hm.")))
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "Hm."}
    [line] = lines(chatting(logprobs=True).rewrite_events(events))
    assert line["logprobs"] == [short]
    [line] = lines(chatting(logprobs=True, top_logprobs=1).rewrite_events(events))
    others = [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    assert line["logprobs"] == [short | {"top_logprobs": others}]


def test_timings_of_a_part_are_not_taken_for_the_whole() -> None:
    rewriter = chatting()  # the clock says 0
    rewriter.rewrite_events(chunk(content="a"))  # 1
    usage = USAGE | {"completion_tokens": 50}
    [final] = lines(rewriter.rewrite_events(chunk("stop") + end(usage=usage)))  # 2
    assert (final["eval_count"], final["eval_duration"]) == (50, 1_000_000_000)


def test_comments_and_heartbeats_are_no_lines_and_errors_are() -> None:
    rewriter = chatting()
    assert rewriter.rewrite_events(b":\n") == b""
    assert OLLAMA_CHAT.heartbeat.isspace()
    assert b"\n" not in OLLAMA_CHAT.heartbeat
    error = event({"error": {"code": 500, "message": "It broke."}})
    assert lines(rewriter.rewrite_events(error)) == [{"error": "It broke."}]


def test_embeddings_come_in_the_order_of_their_texts() -> None:
    data = [{"index": 1, "embedding": [3.0, 4.0, 9.0]}, {"index": 0, "embedding": [1.0, 0.0, 0.0]}]
    content = json.dumps({"data": data, "usage": {"prompt_tokens": 5}}).encode()
    found = plain(translation(OLLAMA_EMBED, input=["a", "b"]).rewriter, content)
    assert found["embeddings"] == [[1.0, 0.0, 0.0], [3.0, 4.0, 9.0]]
    assert (found["model"], found["prompt_eval_count"]) == ("m", 5)
    rewriter = translation(OLLAMA_EMBED, input=["a", "b"], dimensions=2).rewriter
    assert plain(rewriter, content)["embeddings"] == [[1.0, 0.0], [0.6, 0.8]]
    rewriter = translation(OLLAMA_EMBEDDINGS).rewriter
    assert plain(rewriter, content) == {"embedding": [1.0, 0.0, 0.0]}


def test_an_error_is_a_text_with_the_clients_names_of_fields() -> None:
    error = errors.invalid_request("'max_tokens' and 'messages' are wrong.", "messages")
    body = b"{\"error\":\"'options.num_predict' and 'messages' are wrong.\"}"
    assert OLLAMA_CHAT.error_body(error, "req_1") == body
    assert OLLAMA_CHAT.error_event(error, "req_1") == body + b"\n"
    assert b"'prompt' are wrong" in OLLAMA_GENERATE.error_body(error, "req_1")
    empty = errors.invalid_request("'input' is empty.", "input")
    assert OLLAMA_EMBED.error_body(empty, "req_1") == b'{"error":"\'input\' is empty."}'
    assert OLLAMA_EMBEDDINGS.error_body(empty, "req_1") == b'{"error":"\'prompt\' is empty."}'
    assert not OLLAMA_CHAT.is_own_error(b'{"error":{"message":"x"}}')


def page(path: str, **body: Any) -> Any:
    """A page about two models."""

    def model(name: str | None) -> ModelSummary:
        for one in (KNOWN, UNKNOWN):
            if one.name == name:
                return one
        raise errors.model_not_found(str(name), [])

    [found] = [one for one in PAGES if one.path == path]
    return found.respond(VisibleCatalog([KNOWN, UNKNOWN], model), body)


KNOWN = ModelSummary(
    "m", 10**9, {"chat", "infill"}, is_up=True, on_gpu=True, context=4096,
    parameters=7_240_000_000, size=4_000, quantization="Q4_K - Medium", file="m.gguf",
)  # fmt: skip
UNKNOWN = ModelSummary("u", 10**9, {"embeddings"}, is_up=False, on_gpu=False)


def test_pages_about_models() -> None:
    known, unknown = page("/api/tags")["models"]
    assert (known["name"], known["size"], known["modified_at"]) == ("m", 4_000, CREATED)
    details = known["details"]
    assert (details["parameter_size"], details["quantization_level"]) == ("7.2B", "Q4_K - Medium")
    assert known["capabilities"] == ["completion", "tools", "insert"]
    assert known["digest"] != unknown["digest"]
    [loaded] = page("/api/ps")["models"]
    assert (loaded["size_vram"], loaded["context_length"]) == (4_000, 4096)
    assert page("/api/show", name="u")["capabilities"] == ["embedding"]
    assert page("/api/show", model="m:latest") == page("/api/show", model="m")
    for name, why in (("nobody:latest", "'nobody'"), (5, "'name' must be a string")):
        with pytest.raises(GatewayError, match=why):
            page("/api/show", name=name)
    assert page("/") == "Ollama is running"


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"pixels" * 20).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + b"pixels" * 20).decode()
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def no_model(_: str) -> bool:
    return False


def chat(**body: Any) -> tuple[dict[str, Any], TranslatedRequest]:
    body = {"model": "m", "messages": HELLO, **body}
    found = run_at_once(translate_chat(json.dumps(body).encode(), no_model))
    return json.loads(found.body), found


def generate(**body: Any) -> tuple[dict[str, Any], TranslatedRequest]:
    body = {"model": "m", "prompt": "hello", **body}
    found = run_at_once(translate_generate(json.dumps(body).encode(), no_model))
    return json.loads(found.body), found


def embed(name: str = "input", **body: Any) -> tuple[dict[str, Any], TranslatedRequest]:
    found = run_at_once(
        translate_embed(json.dumps({"model": "m", **body}).encode(), no_model, name)
    )
    return json.loads(found.body), found


def test_a_chat_streams_unless_it_says_otherwise() -> None:
    body, found = chat()
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == chat(stream=None)[0] == {"model": "m", "messages": HELLO, **streams}
    assert (found.path, found.model) == ("/v1/chat/completions", "m")
    assert chat(stream=False)[0] == {"model": "m", "messages": HELLO, "stream": False}


def test_options_become_sampling_parameters() -> None:
    same = {
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["a", "b"],
        "repeat_penalty": 1.1, "repeat_last_n": 8, "presence_penalty": 1, "frequency_penalty": 2,
        "typical_p": 0.7, "mirostat": 1, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    }  # fmt: skip
    options = same | {"num_predict": 7, "top_k": 20.0, "num_keep": 4, "tfs_z": None}
    options |= {"num_ctx": 8192, "num_gpu": 1, "use_mmap": True, "nobody_knows": "this"}
    expected = same | {"max_tokens": 7, "top_k": 20, "n_keep": 4}
    for body in (chat(options=options)[0], generate(options=options)[0]):
        assert {name: body[name] for name in expected} == expected
        assert not {"num_ctx", "num_gpu", "use_mmap", "nobody_knows", "options"} & set(body)
    assert generate(options={"num_predict": 7}, suffix="x")[0]["n_predict"] == 7
    for unlimited in (-1, -2, 0):
        assert "max_tokens" not in chat(options={"num_predict": unlimited})[0]


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat(format="json")[0]["response_format"] == {"type": "json_object"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}
    assert chat(format=schema)[0]["response_format"] == wrapped
    assert generate(format=schema)[0]["response_format"] == wrapped
    assert generate(format=schema, raw=True)[0]["json_schema"] == schema
    assert generate(format="json", raw=True)[0]["json_schema"] == {"type": "object"}
    for nothing in ("", None):
        assert "response_format" not in chat(format=nothing)[0]


def test_thinking_is_told_to_the_template() -> None:
    assert "chat_template_kwargs" not in chat()[0]
    assert chat(think=True)[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert generate(think=False)[0]["chat_template_kwargs"] == {"enable_thinking": False}
    kwargs = {"enable_thinking": True, "reasoning_effort": "high"}
    assert chat(think="max")[0]["chat_template_kwargs"] == kwargs
    assert "chat_template_kwargs" not in generate(think=True, raw=True)[0]


def test_images_stand_before_the_text() -> None:
    messages = [{"role": "user", "content": "what?", "images": [PNG, JPEG]}]
    expected = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{JPEG}"}},
        {"type": "text", "text": "what?"},
    ]
    assert chat(messages=messages)[0]["messages"] == [{"role": "user", "content": expected}]
    assert generate(prompt="what?", images=[PNG, JPEG])[0]["messages"][0]["content"] == expected


def test_tool_calls_get_ids_and_arguments_as_text() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": 'Köln "\\'}}}
    messages = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
        {"role": "assistant", "tool_calls": [{**call, "id": "own"}]},
        {"role": "tool", "content": "snow", "tool_call_id": "own"},
    ]
    body, _ = chat(messages=messages, tools=[WEATHER])
    first, rain, sun, own, snow = body["messages"]
    assert body["tools"] == [WEATHER]
    assert [one["id"] for one in first["tool_calls"]] == ["call_1", "call_2"]
    assert first["reasoning_content"] == "hm"
    arguments = first["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == call["function"]["arguments"]
    told = {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"}
    assert rain == told
    assert [one["tool_call_id"] for one in (sun, snow)] == ["call_2", "own"]
    assert own["content"] == ""


def test_a_prompt_becomes_a_chat_a_completion_or_an_infill() -> None:
    body, found = generate(system="be brief")
    assert body["messages"] == [{"role": "system", "content": "be brief"}, *HELLO]
    assert found.path == "/v1/chat/completions"
    assert generate(system="")[0]["messages"] == HELLO
    body, found = generate(raw=True, stream=False)
    assert body == {"model": "m", "prompt": "hello", "stream": False}
    assert found.path == "/v1/completions"
    body, found = generate(suffix="end")
    assert body == {"model": "m", "input_prefix": "hello", "input_suffix": "end", "stream": True}
    assert found.path == "/infill"


def test_probabilities_are_asked_for_in_the_nodes_words() -> None:
    body, found = chat(logprobs=True, top_logprobs=3)
    assert (body["logprobs"], body["top_logprobs"], found.top_logprobs) == (True, 3, 3)
    # llama.cpp reports none of the chosen token without any others.
    body, found = chat(logprobs=True)
    assert (body["top_logprobs"], found.top_logprobs) == (1, 0)
    assert generate(logprobs=True, top_logprobs=2, raw=True)[0]["logprobs"] == 2


def test_the_tag_of_a_name_without_one_is_left_out() -> None:
    body = json.dumps({"model": "m:latest", "messages": HELLO}).encode()
    found = run_at_once(translate_chat(body, no_model))
    assert json.loads(found.body)["model"] == "m"
    assert found.model == "m:latest"
    found = run_at_once(translate_chat(body, lambda name: name == "m:latest"))
    assert json.loads(found.body)["model"] == "m:latest"
    assert "model" not in json.loads(run_at_once(translate_chat(b"{}", no_model)).body)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"messages": 5}, "'messages': Expected `array | null`, got `int`."),
    (chat, {"messages": [*HELLO, {"role": 3}]}, "'messages[1].role': Expected `str`, got `int`."),
    (chat, {"messages": [{"role": "user", "content": ["x"]}]}, "'messages[0].content' must be a"),
    (chat, {"messages": [{"images": ["http://a/b.png"]}]}, "'messages[0].images[0]'"),
    (
        chat,
        {"messages": [{"tool_calls": [{"function": 5}]}]},
        "'messages[0].tool_calls[0].function",
    ),
    (chat, {"options": {"temperature": "hot"}}, "'options.temperature': Expected `float | null`"),
    (chat, {"format": 5}, "'format' must be"),
    (chat, {"think": "much"}, "'think' must be true, false,"),
    (chat, {"logprobs": True, "top_logprobs": 21}, "'top_logprobs' must be from 0 to 20."),
    (generate, {"template": "{{ .Prompt }}"}, "'template' is not supported. The model's own is"),
    (generate, {"context": [1, 2]}, "'context' is not supported. Send the conversation to /api"),
    (generate, {"raw": True, "system": "x"}, "'raw' and 'system' exclude each other."),
    (embed, {"input": [1, 2]}, "'input' must be a string or a list of strings."),
    (embed, {"input": "x", "dimensions": -1}, "'dimensions' is negative."),
]


@each_case(("ask", "body", "message"), WRONG)
def test_a_wrong_field_has_the_clients_name(ask: Any, body: dict[str, Any], message: str) -> None:
    with pytest.raises(GatewayError) as raised:
        ask(**body)
    assert raised.value.status == 400
    assert raised.value.message.startswith(message)


NO_UTF8 = b'{"function":{"name":"f","arguments":{"a":"\xff"}}}'
DEEP = b"[" * 100_000 + b"]" * 100_000


@each_case(
    ("translate", "body", "said"),
    [
        (translate_generate, b'{"options":{"seed":1e999}}', "out of range"),
        (translate_generate, b'{"model":"m","prompt":"' + b"\\\\" * 100_000 + b'\\"', "JSON"),
        (translate_chat, b'{"messages":[{"tool_calls":[%b]}]}' % NO_UTF8, "JSON"),
        (translate_chat, b'{"model":"m","options":{"stop":%b}}' % DEEP, "nested too deeply"),
    ],
)
def test_endless_values_and_no_utf8_are_refused(translate: Any, body: bytes, said: str) -> None:
    with pytest.raises(GatewayError, match=said) as raised:
        run_at_once(translate(body, no_model))
    assert raised.value.status == 400


LONG = "x" * (LONG_STRING_BYTES + 1)
TEXTS = st.sampled_from(
    ["", "short", LONG, f'{LONG}"quoted"', "\\" * 5000, f"{LONG}\\", '"' * 2000, "ä\n\t" * 900]
)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.booleans(), st.sampled_from([None, 1]))
def test_large_and_small_bodies_are_translated_alike(
    texts: list[str], ascii_only: bool, indent: int | None
) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {"text": texts[0]}}}
    messages = [
        *({"role": "user", "content": text} for text in texts),
        {"role": "user", "content": texts[0], "images": [PNG * 50, JPEG]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    options = {"stop": [texts[-1]]}
    body: dict[str, Any] = {"model": "m", "messages": messages, "options": options}
    small = run_at_once(translate_chat(json.dumps(body).encode(), no_model))
    body["padding"] = ["y" * 100] * (SHORT_BODY_BYTES // 100)
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    assert len(raw) > SHORT_BODY_BYTES
    large = run_at_once(translate_chat(raw, no_model))
    expected, found = json.loads(small.body), json.loads(large.body)
    for one in (expected, found):  # of which the arguments are JSON of any form
        function = one["messages"][-1]["tool_calls"][0]["function"]
        function["arguments"] = json.loads(function["arguments"])
    assert found == expected


def test_a_large_body_is_translated_in_short_steps() -> None:
    images = [base64.b64encode(b"\x89PNG" + bytes(3_000_000)).decode()] * 5
    body = {"model": "m", "messages": [{"role": "user", "content": "?", "images": images}]}
    assert sum(1 for _ in translate_chat(json.dumps(body).encode(), no_model)) > 40


@pytest.mark.parametrize("part", ['"short",', "[],"])
def test_too_many_short_parts_are_refused(part: str) -> None:
    parts = part * (MOST_PARSED_BYTES // len(part) + 1)
    body = b'{"model":"m","input":[' + parts.encode() + b'"x"]}'
    with pytest.raises(GatewayError) as raised:
        run_at_once(translate_embed(body, no_model, "input"))
    assert raised.value.status == 400
    assert "besides its long strings" in raised.value.message


TOO_MANY_IMAGES = ["abcd"] * (MOST_MESSAGE_PARTS + 1)
CALLS = [{"function": {"name": ""}}] * (MOST_MESSAGE_PARTS + 1)
LARGE_CALL = {"function": {"name": "f", "arguments": {"text": "z" * (MOST_PARSED_BYTES + 1)}}}


@each_case(
    ("ask", "body", "param"),
    [
        (chat, {"messages": [{}] * (MOST_PARTS + 1)}, "messages"),
        (chat, {"messages": [{"images": TOO_MANY_IMAGES}]}, "messages[0].images"),
        (chat, {"messages": [{"tool_calls": CALLS}]}, "messages[0].tool_calls"),
        (chat, {"messages": [{"images": TOO_MANY_IMAGES[1:]}] * 20}, "messages[19].images"),
        (chat, {"messages": [{"tool_calls": [LARGE_CALL]}]}, "messages[0].tool_calls"),
        (generate, {"images": TOO_MANY_IMAGES}, "images"),
    ],
)
def test_too_many_or_large_parts_are_refused(ask: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as raised:
        ask(**body)
    assert (raised.value.status, raised.value.param) == (400, param)
