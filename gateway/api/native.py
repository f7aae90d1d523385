"""llama.cpp's own `/completion` and `/infill`."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, ClassVar

import msgspec

from gateway.api import sse
from gateway.api.base import (
    Answer,
    Api,
    Assembly,
    AssemblyError,
    RawFields,
    ResponseMerger,
    decoded_field,
    inner_items,
    read_events,
    read_fields,
    read_items,
)
from gateway.api.json_values import JsonObject, parse_json
from gateway.api.resuming import EventRewriter, as_count, data_event
from gateway.api.tokens import BOUND_NAMES
from gateway.api.transcript import Transcript


def read_native(transcript: Transcript, value: JsonObject) -> None:
    """Add an event, which holds its tokens' ids, to the transcript."""
    if not transcript.first_event:
        transcript.begin(value)
    if value.get("index"):
        transcript.mark_unresumable("the request asks for several answers")
    if value.get("completion_probabilities"):
        transcript.mark_unresumable("the client asked for probabilities")
    ids = value.get("tokens") or ()
    transcript.add_token_ids(token for token in ids if isinstance(token, int))
    transcript.add_content(value.get("content"))
    if value.get("stop"):
        transcript.finish(str(value.get("stop_type") or "eos"))


class NativeRewriter(EventRewriter):
    """A completion's stream, continued by a completion."""

    def rewrite(self, value: JsonObject) -> bytes:
        text = self._new_text(value.get("content"))
        if value.get("stop"):
            self._check_end()
        elif not text:
            return b""
        splice_point = self._splice_point
        predicted = splice_point.prefix_tokens + as_count(value.get("tokens_predicted"))
        event = value | {
            "content": text,
            "tokens_predicted": predicted,
            "tokens_evaluated": splice_point.prompt_tokens,
        }
        prompt = value.get("prompt")
        if isinstance(prompt, str):
            event["prompt"] = prompt.removesuffix(splice_point.prefix)
        return data_event(event)

    def final_events(self, reason: str) -> bytes:
        return data_event(
            {
                "index": 0,
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": "limit" if reason == "length" else "eos",
                "tokens_predicted": self._splice_point.sent_tokens,
                "tokens_evaluated": self._splice_point.prompt_tokens,
            }
        )


class NativeMerger(ResponseMerger):
    """Merges responses into a list of objects; a stream's events pass as they come."""

    def merged_response(self) -> bytes:
        return b"".join(self._all_items())

    def stream_end(self) -> bytes:
        return b""

    def _items(self, index: int, response: bytes) -> bytes:
        listed = response if response.lstrip()[:1] == b"[" else b"[" + response + b"]"
        return b",".join(map(msgspec.json.encode, self._renumber(index, read_items(listed))))

    def _event(self, index: int, data: bytes) -> bytes:
        (fields,) = self._renumber(index, [read_fields(data)])
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


class _NativeAnswer(Answer, kw_only=True):
    stop: bool  # also where the client has selected fields (`edits.required_edit`)


_PART_FIELDS = (
    "index", "content", "tokens", "id_slot", "tokens_predicted", "tokens_evaluated",
    "completion_probabilities",
)  # fmt: skip
"""Fields of an event that is not the last."""


_NOTHING_MORE: JsonObject = {"content": "", "tokens": []}


class NativeEventsApi(Api):
    """An API of events with `content`, the last with `"stop": true`."""

    max_tokens_fields = ("n_predict",)
    single_terminal_event = False
    terminal_mark = b'"stop":true'
    terminal_mark_nested = True
    progress_fields: ClassVar[JsonObject] = {"return_progress": True}
    streaming_fields: ClassVar[JsonObject] = {"stream": True}
    answer = msgspec.json.Decoder(
        Annotated[list[_NativeAnswer], msgspec.Meta(min_length=1)] | _NativeAnswer
    )
    answer_mark = b'"content"'

    def answer_events(self, content: bytes, request_fields: JsonObject) -> bytes:
        events: list[bytes] = []
        listed = content if content.lstrip()[:1] == b"[" else b"[" + content + b"]"
        for item in read_items(listed):
            end: JsonObject = {**item}
            part = {name: end[name] for name in _PART_FIELDS if name in end}
            end.pop("completion_probabilities", None)
            end |= {name: empty for name, empty in _NOTHING_MORE.items() if name in end}
            events += (data_event(part | {"stop": False}), data_event(end))
        return b"".join(events)

    def has_content(self, value: JsonObject) -> bool:
        return bool(value.get("content") or value.get("tokens") or value.get("stop"))

    def is_terminal_event(self, event: bytes) -> bool:
        return self.terminal_mark in event

    def is_stream_complete(self, tail: bytes) -> bool:
        last = b""
        for event in sse.split(tail):
            last = sse.payload(event) or last
        if last == b"[DONE]":
            return True
        return b'"stop":true' in last or b'"stop": true' in last

    def assemble(self, request_fields: JsonObject) -> Assembly:
        content: list[Any] = []
        tokens: list[Any] = []
        probabilities: list[bytes] = []
        last: RawFields = {}
        # A stream has them even if nobody asked for them.
        wants_tokens = request_fields.get("return_tokens") is True
        while (events := (yield)) is not None:
            for last in read_events(events):
                content.append(decoded_field(last, "content") or "")
                if wants_tokens:
                    tokens.append(decoded_field(last, "tokens") or ())
                if items := inner_items(last.get("completion_probabilities", b"[]")):
                    probabilities.append(items)
        whole = {
            name: parse_json(bytes(raw))
            for name, raw in last.items()
            if name != "completion_probabilities"
        }
        if not whole.get("stop"):
            raise AssemblyError("the node's stream has no end")
        whole |= {"content": "".join(content), "tokens": list(chain.from_iterable(tokens))}
        settings = whole.get("generation_settings")
        if isinstance(settings, dict):
            whole["generation_settings"] = settings | {"stream": False}
        if probabilities:
            whole["completion_probabilities"] = msgspec.Raw(b"[%b]" % b",".join(probabilities))
        return whole


class InfillApi(NativeEventsApi):
    """`/infill`: one prompt around a gap. It can't be resumed."""

    name = "infill"
    prompt_field = "input_prefix"


class NativeApi(NativeEventsApi):
    """`/completion`: one prompt or several."""

    name = "native"
    prompt_field = "prompt"
    refusal_is_general = True
    merger = NativeMerger
    transcript_reader = staticmethod(read_native)
    event_rewriter = native_event_rewriter = NativeRewriter


_NOT_NATIVE = frozenset(
    {"messages", "system", "stop_sequences", "stream_options", "tools", "tool_choice",
     "input", "instructions", "text", "reasoning", "include", "background", "store", "truncation",
     "response_format", "logprobs", "top_logprobs", "metadata", "thinking", *BOUND_NAMES}
)  # fmt: skip
"""Fields of other APIs, which the prompt holds already or `/completion` spells otherwise."""


def native_body(body: JsonObject, prompt: str | list[int], max_tokens: int | None) -> JsonObject:
    """The body, of any API, as one for `/completion` with an already rendered prompt."""
    native = {name: value for name, value in body.items() if name not in _NOT_NATIVE}
    stop = body.get("stop", body.get("stop_sequences"))
    if stop is not None:
        # It takes a list alone, and ignores a string silently.
        native["stop"] = [stop] if isinstance(stop, str) else stop
    if max_tokens is not None:
        native["n_predict"] = max_tokens
    return native | {"prompt": prompt, "stream": True}


NATIVE = NativeApi()
INFILL = InfillApi()
