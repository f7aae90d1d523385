"""Ollama's API: what its clients get for the responses and errors of nodes."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.api.base import ModelSummary, ResponseRewriter, Translation
from gateway.proxy.api.ollama import (
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    PAGES,
    OllamaChatApi,
    OllamaEmbedApi,
    OllamaGenerateApi,
)
from gateway.proxy.inbound.body import run_at_once
from gateway.transport.errors import InvalidResponse

CREATED = "2001-09-09T01:46:40Z"
TIMINGS = {"prompt_ms": 250.0, "predicted_ms": 500.5, "predicted_n": 2, "cache_n": 1}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def translation(kind: Any = OllamaChatApi, *arguments: Any, **body: Any) -> Translation:
    ticks = count()
    api = kind(*arguments, clock=lambda: float(next(ticks)), wall_clock=lambda: 1e9)
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "prompt": "?", **body}
    found: Translation = run_at_once(api.translate(json.dumps(asked).encode(), lambda _: True))
    return found


def chatting(**body: Any) -> ResponseRewriter:
    return translation(**body).rewriter


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


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
    [first] = lines(rewriter.rewrite_events(chunk(content="Hel")))
    assert first == {
        "model": "m",
        "created_at": CREATED,
        "message": {"role": "assistant", "content": "Hel"},
        "done": False,
    }
    found = lines(rewriter.rewrite_events(chunk(content="lo") + chunk("stop") + end()))
    assert found[0]["message"]["content"] == "lo"
    assert found[1] == {
        "model": "m",
        "created_at": CREATED,
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "total_duration": 2_000_000_000,
        "load_duration": 1_249_500_000,
        "prompt_eval_count": 5,
        "prompt_eval_duration": 250_000_000,
        "eval_count": 2,
        "eval_duration": 500_500_000,
    }


def test_a_chats_plain_response() -> None:
    message = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}
    content = {"choices": [{"message": message, "finish_reason": "length"}], "usage": USAGE}
    found = json.loads(chatting().rewrite_body(json.dumps(content | {"timings": TIMINGS}).encode()))
    assert found["message"] == {"role": "assistant", "content": "Hello", "thinking": "Hm."}
    assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "length", 2)


def test_a_prompts_stream_by_each_of_the_apis_that_serve_it() -> None:
    raw = translation(OllamaGenerateApi, raw=True)
    assert raw.path == "/v1/completions"
    completion = event({"choices": [{"text": "a", "finish_reason": None}]})
    last = event({"choices": [{"text": "", "finish_reason": "length"}]})
    infill = translation(OllamaGenerateApi, suffix="x")
    assert infill.path == "/infill"
    native = event({"content": "a", "stop": False})
    stop = {"content": "", "stop": True, "stop_type": "limit", "timings": TIMINGS}
    tokens = {"tokens_evaluated": 5, "tokens_predicted": 2}
    chat = translation(OllamaGenerateApi)
    for rewriter, events in (
        (raw.rewriter, completion + last + end()),
        (infill.rewriter, native + event(stop | tokens)),
        (chat.rewriter, chunk(content="a") + chunk("length") + end()),
    ):
        first, final = lines(rewriter.rewrite_events(events))
        assert (first["response"], first["done"]) == ("a", False)
        assert (final["response"], final["done"], final["done_reason"]) == ("", True, "length")
        assert (final["eval_count"], final["prompt_eval_count"]) == (2, 5)
        assert final["eval_duration"] == 500_500_000


def test_thinking_has_a_field_of_its_own() -> None:
    [line] = lines(chatting().rewrite_events(chunk(reasoning_content="Hm.")))
    assert line["message"] == {"role": "assistant", "content": "", "thinking": "Hm."}
    rewriter = translation(OllamaGenerateApi).rewriter
    [line] = lines(rewriter.rewrite_events(chunk(reasoning_content="Hm.")))
    assert (line["response"], line["thinking"]) == ("", "Hm.")


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


def test_a_plain_responses_tool_calls() -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "a", "arguments": '{"b": 1}'}},
        {"id": "y", "type": "function", "function": {"name": "c", "arguments": "{}"}},
    ]
    message = {"content": None, "tool_calls": calls}
    content = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    found = json.loads(chatting().rewrite_body(content.encode()))
    functions = [one["function"] for one in found["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == [("a", {"b": 1}), ("c", {})]


def test_a_tool_call_that_was_cut_off_is_dropped() -> None:
    rewriter = chatting()
    rewriter.rewrite_events(chunk(tool_calls=call(0, "weather", '{"ci')))
    [final] = lines(rewriter.rewrite_events(chunk("length") + end()))
    assert final["done_reason"] == "length"
    rewriter = chatting()
    rewriter.rewrite_events(chunk(tool_calls=call(0, "weather", '{"ci')))
    with pytest.raises(InvalidResponse):
        rewriter.rewrite_events(chunk("tool_calls"))


def test_probabilities() -> None:
    other = {"token": "b", "logprob": -2.0, "bytes": [98], "id": 4}
    token = {"token": "a", "logprob": -1.0, "bytes": [97], "id": 3, "top_logprobs": [other, other]}
    events = chunk(content="a", logprobs={"content": [token]})
    short = {"token": "a", "logprob": -1.0, "bytes": [97]}
    [line] = lines(chatting(logprobs=True).rewrite_events(events))
    assert line["logprobs"] == [short]
    [line] = lines(chatting(logprobs=True, top_logprobs=1).rewrite_events(events))
    others = [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    assert line["logprobs"] == [short | {"top_logprobs": others}]


@pytest.mark.parametrize("likeliest", [5, [5], {"token": "a"}])
def test_odd_probabilities_are_refused(likeliest: Any) -> None:
    token = {"token": "a", "logprob": -1.0, "top_logprobs": likeliest}
    events = chunk(content="a", logprobs={"content": [token]})
    with pytest.raises(InvalidResponse):
        chatting(logprobs=True, top_logprobs=2).rewrite_events(events)


def test_timings_of_a_part_are_not_taken_for_the_whole() -> None:
    rewriter = chatting()  # the clock says 0
    rewriter.rewrite_events(chunk(content="a"))  # 1
    usage = USAGE | {"completion_tokens": 50}
    [final] = lines(rewriter.rewrite_events(chunk("stop") + end(usage=usage)))  # 2
    assert (final["eval_count"], final["eval_duration"]) == (50, 1_000_000_000)


def test_comments_are_nothing_and_errors_are_lines() -> None:
    rewriter = chatting()
    assert rewriter.rewrite_events(b":\n") == b""
    error = event({"error": {"code": 500, "message": "It broke."}})
    assert lines(rewriter.rewrite_events(error)) == [{"error": "It broke."}]


@pytest.mark.parametrize("data", [b"data: {oops\n\n", b'data: {"choices": 5}\n\n', b"data: 7\n\n"])
def test_an_event_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        chatting().rewrite_events(data)
    with pytest.raises(InvalidResponse):
        chatting().rewrite_body(data[6:])
    with pytest.raises(InvalidResponse):
        translation(OllamaEmbedApi, "input", input="a").rewriter.rewrite_body(data[6:])


def test_embeddings_come_in_the_order_of_their_texts() -> None:
    data = [{"index": 1, "embedding": [3.0, 4.0, 9.0]}, {"index": 0, "embedding": [1.0, 0.0, 0.0]}]
    content = json.dumps({"data": data, "usage": {"prompt_tokens": 5}}).encode()
    found = json.loads(
        translation(OllamaEmbedApi, "input", input=["a", "b"]).rewriter.rewrite_body(content)
    )
    assert found == {
        "model": "m",
        "embeddings": [[1.0, 0.0, 0.0], [3.0, 4.0, 9.0]],
        "total_duration": 1_000_000_000,
        "load_duration": 0,
        "prompt_eval_count": 5,
    }
    rewriter = translation(OllamaEmbedApi, "input", input=["a", "b"], dimensions=2).rewriter
    assert json.loads(rewriter.rewrite_body(content))["embeddings"] == [[1.0, 0.0], [0.6, 0.8]]
    rewriter = translation(OllamaEmbedApi, "prompt").rewriter
    assert json.loads(rewriter.rewrite_body(content)) == {"embedding": [1.0, 0.0, 0.0]}


def test_large_responses_are_rewritten_in_steps_as_small_ones_are_at_once() -> None:
    vectors = [[float(at), 0.5] * 500 for at in range(300)]
    data = [{"index": 299 - at, "embedding": one} for at, one in enumerate(vectors)]
    content = json.dumps({"data": data}, separators=(",", ":")).encode()
    steps = translation(OllamaEmbedApi, "input", input=["a"]).rewriter.rewrite_in_steps(content)
    assert len(list(steps)) > 5
    rewriter = translation(OllamaEmbedApi, "input", input=["a"]).rewriter
    assert json.loads(rewriter.rewrite_body(content))["embeddings"] == vectors[::-1]
    likely = [{"id": 1, "token": "t", "logprob": -0.5, "top_logprobs": [{"token": "t"}]}] * 2000
    choice = {"message": {"content": "t"}, "logprobs": {"content": likely}, "finish_reason": "stop"}
    content = json.dumps({"choices": [choice]}).encode()
    assert len(list(chatting().rewrite_in_steps(content))) == 4
    assert len(json.loads(chatting().rewrite_body(content))["logprobs"]) == 2000


def test_an_error_is_a_text_with_the_clients_names_of_fields() -> None:
    error = errors.invalid_request("'max_tokens' and 'messages' are wrong.", "messages")
    body = b"{\"error\":\"'options.num_predict' and 'messages' are wrong.\"}"
    assert OLLAMA_CHAT.error_body(error, "req_1") == body
    assert OLLAMA_CHAT.error_event(error, "req_1") == body + b"\n"
    assert b"'prompt' are wrong" in OLLAMA_GENERATE.error_body(error, "req_1")
    assert not OLLAMA_CHAT.is_own_error(b'{"error":{"message":"x"}}')


def test_a_heartbeat_is_no_line() -> None:
    assert OLLAMA_CHAT.heartbeat().isspace()
    assert b"\n" not in OLLAMA_CHAT.heartbeat()


class Catalog:
    """A catalog of given models."""

    def __init__(self, *models: ModelSummary) -> None:
        self._models = list(models)

    def models(self) -> list[ModelSummary]:
        return self._models

    def model(self, name: str | None) -> ModelSummary:
        for one in self._models:
            if one.name == name:
                return one
        raise errors.model_not_found(str(name), [])


def page(path: str, catalog: Catalog, **body: Any) -> Any:
    [found] = [one for one in PAGES if one.path == path]
    return found.respond(catalog, body)


KNOWN = ModelSummary(
    "m", 10**9, {"chat", "infill"}, is_up=True, on_gpu=True, context=4096,
    parameters=7_240_000_000, size=4_000, quantization="Q4_K - Medium", file="m.gguf",
)  # fmt: skip
UNKNOWN = ModelSummary("u", 10**9, {"embeddings"}, is_up=False, on_gpu=False)


def test_pages_about_models() -> None:
    catalog = Catalog(KNOWN, UNKNOWN)
    known, unknown = page("/api/tags", catalog)["models"]
    assert (known["name"], known["size"], known["modified_at"]) == ("m", 4_000, CREATED)
    assert (known["details"]["parameter_size"], unknown["details"]["parameter_size"]) == (
        "7.2B",
        "",
    )
    assert known["details"]["quantization_level"] == "Q4_K - Medium"
    assert known["capabilities"] == ["completion", "tools", "insert"]
    assert len(known["digest"]) == len(unknown["digest"]) == 64
    assert known["digest"] != unknown["digest"]
    [loaded] = page("/api/ps", catalog)["models"]
    assert (loaded["size_vram"], loaded["context_length"]) == (4_000, 4096)
    shown = page("/api/show", catalog, name="u")
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"] == {"general.architecture": "llama"}
    info = page("/api/show", catalog, model="m")["model_info"]
    assert info["llama.context_length"] == 4096
    assert page("/api/show", catalog, model="m:latest") == page("/api/show", catalog, model="m")
    for name in ("nobody", "nobody:latest"):
        with pytest.raises(GatewayError, match="'nobody'"):
            page("/api/show", catalog, model=name)
    with pytest.raises(GatewayError, match="'name' must be a string"):
        page("/api/show", catalog, name=5)
    assert page("/", catalog) == "Ollama is running"
