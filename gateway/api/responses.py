"""OpenAI's responses, and the repair of llama.cpp's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec

from gateway.api import resuming, sse
from gateway.api.base import (
    INPUT_TOKENS,
    Api,
    Assembly,
    AssemblyError,
    Bodies,
    NumberedHeartbeats,
    RelayedApi,
    ResponseRewriter,
    body_fields,
    decoded_field,
    edit_body,
    openai_error,
    read_events,
)
from gateway.api.chat import as_chat, as_response_format
from gateway.api.json_values import (
    ITEMS_DECODER,
    JSON_ERRORS,
    AnyObject,
    InvalidJson,
    JsonObject,
    parse_json,
    parse_object,
)
from gateway.api.resuming import NativeEventRewriter, as_count, is_number, named_event
from gateway.api.tokens import BOUND_NAMES
from gateway.api.transcript import Transcript
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NodeInfo
from gateway.transport.errors import InvalidResponse

_NO_CONTENT_TYPES = frozenset(
    {
        None,
        "response.created",
        "response.in_progress",
        "response.queued",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_summary_part.added",
    }
)

_TERMINAL_TYPES = ("response.completed", "response.incomplete", "response.failed")
_TERMINAL_NAMES = tuple(name.encode() for name in _TERMINAL_TYPES)
# How a stream is resumed: by llama.cpp's `/completion`, written as this API's events. llama.cpp
# continues no message here, so a response goes on from its prompt as the template renders it.
_TEXT_ENDS = ("response.output_text.done", "response.content_part.done")


def read_response(transcript: Transcript, value: JsonObject) -> None:
    """Add an event to the transcript."""
    number = value.get("sequence_number")
    if number is not None:
        transcript.last_number = as_count(number)
    kind = str(value.get("type"))
    if kind == "response.output_text.delta":
        transcript.add_content(value.get("delta"))
        if value.get("logprobs"):
            transcript.mark_unresumable("the client asked for probabilities")
    elif kind == "response.reasoning_text.delta":
        transcript.add_reasoning(value.get("delta"))
    elif kind == "response.created":
        transcript.begin(value)
    elif kind == "response.output_item.added":
        _begin_item(transcript, value.get("item"))
    elif kind in _TERMINAL_TYPES:
        transcript.finish(kind)
    elif kind in _TEXT_ENDS or kind == "response.output_item.done":
        item = value.get("item")
        item_id = value.get("item_id") if item is None else item.get("id")
        transcript.sent_ends.append(f"{kind} {item_id}")
        if item is None or item.get("type") == "message":
            transcript.finish("stop")
    elif kind.startswith(("response.refusal", "response.function_call", "response.custom_tool")):
        transcript.mark_unresumable(_MORE_THAN_TEXT)


_MORE_THAN_TEXT = "it holds more than text"


def _begin_item(transcript: Transcript, item: Any) -> None:
    if not isinstance(item, dict):
        raise TypeError("an item is no object")
    kind, types = str(item.get("type")), list(transcript.item_types.values())
    if kind not in {"message", "reasoning"} or "message" in types or kind in types:
        transcript.mark_unresumable(_MORE_THAN_TEXT)
    transcript.item_types[str(item.get("id"))] = kind


class NativeToResponsesRewriter(NativeEventRewriter):
    """A response's stream, continued by `/completion`.

    Its events have what llama.cpp's have; where the stream so far is numbered, also numbers.
    """

    reasoning_kind, content_kind = "reasoning", "message"

    def _begin(self, transcript: Transcript) -> None:
        self._number = transcript.last_number
        self._response: JsonObject = dict(transcript.first_event.get("response") or {})
        self._ids = {kind: id_ for id_, kind in transcript.item_types.items()}
        self._texts = {
            "reasoning": [transcript.reasoning_text] if transcript.reasoning_text else [],
            "message": [transcript.text] if transcript.text else [],
        }
        self._sent_ends = frozenset(transcript.sent_ends)

    def final_events(self, reason: str) -> bytes:
        return self._last_events(self._splice_point.sent_tokens)

    def _end_events(self, value: JsonObject) -> bytes:
        return self._last_events(self._written_tokens(value))

    def _text_events(self, kind: str, text: str) -> bytes:
        """Text of the item of this type, which begins if there is none yet."""
        begin = b"" if kind in self._ids else self._begin_item(kind)
        self._texts[kind].append(text)
        word = "output_text" if kind == "message" else "reasoning_text"
        fields: JsonObject = {"item_id": self._ids[kind], "delta": text}
        return begin + self._event(f"response.{word}.delta", fields, kind)

    def _begin_item(self, kind: str) -> bytes:
        prefix = "msg_" if kind == "message" else "rs_"
        self._ids[kind] = prefix + str(self._response.get("id") or "").removeprefix("resp_")
        item = self._item(kind, "in_progress") | {"content": []}
        events = self._event("response.output_item.added", {"item": item}, kind)
        if kind == "message":
            part = {"type": "output_text", "text": ""}
            fields = {"item_id": self._ids[kind], "part": part}
            events += self._event("response.content_part.added", fields, kind)
        return events

    def _last_events(self, tokens: int) -> bytes:
        """The ends of all items, as far as they are missing, and of the response.

        Like llama.cpp's they don't tell whether it was cut off; `ResponsesRepair` does.
        """
        output: list[JsonObject] = []
        events = b""
        for kind, id_ in self._ids.items():
            item = self._item(kind, "completed")
            output.append(item)
            fields: dict[str, JsonObject] = {"response.output_item.done": {"item": item}}
            if kind == "message":
                part = item["content"][0]
                fields = {
                    "response.output_text.done": {"item_id": id_, "text": part["text"]},
                    "response.content_part.done": {"item_id": id_, "part": part},
                    **fields,
                }
            for name, value in fields.items():
                if f"{name} {id_}" not in self._sent_ends:
                    events += self._event(name, value, kind)
        prompt = self._splice_point.prompt_tokens
        response = self._response | {
            "status": "completed",
            "output": output,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": tokens,
                "total_tokens": prompt + tokens,
            },
        }
        if self._number is None:
            # llama.cpp tells the time of the end.
            response["created_at"] = int(time.time())
        return events + self._event("response.completed", {"response": response}, "")

    def _item(self, kind: str, status: str) -> JsonObject:
        text, id_ = "".join(self._texts[kind]), self._ids[kind]
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": id_, "type": kind, "status": status, "summary": [], "content": content}
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
        return {
            "type": kind, "status": status, "id": id_, "content": [part], "role": "assistant",
        }  # fmt: skip

    def _event(self, name: str, fields: JsonObject, kind: str) -> bytes:
        event: JsonObject = {"type": name}
        if self._number is not None:
            self._number += 1
            event["sequence_number"] = self._number
            if kind:
                event["output_index"] = list(self._ids).index(kind)
            if "item_id" in fields:
                event["content_index"] = 0
            if name.startswith("response.output_text."):
                event["logprobs"] = []
        return named_event(event | fields)


class _Response(msgspec.Struct):
    """A response, which may say of itself that it has failed."""

    output: list[AnyObject]


class ResponsesApi(Api):
    """`/v1/responses`: named events, from `response.created` to `response.completed`."""

    name = "responses"
    prompt_field = "input"
    max_tokens_fields = ("max_output_tokens",)
    terminal_mark = b"event: response.completed"
    ordinary_events = staticmethod(
        sse.ordinary_events(
            # A name may have spaces around it.
            line=rb"event: (?! |(?:error|response\.(?:completed|incomplete|failed))[ \r]*\n).*\n",
            after_brace=rb'(?!"error":)',
        )
    )
    progress_fields: ClassVar[JsonObject] = {"return_progress": True}
    progress_replaces_event = True
    streaming_fields: ClassVar[JsonObject] = {"stream": True}
    refused_fields: ClassVar[Mapping[str, str]] = {
        "conversation": "no conversation is kept; send it whole in 'input'.",
        "prompt": "no prompts are kept; send the text in 'instructions' and 'input'.",
    }
    added_fields_marks = (b'"format"', b'"tools"', b'"assistant"', b'"reasoning"', b"custom_tool_")
    rewrites_responses = True
    may_keep_responses = True
    answer = msgspec.json.Decoder(_Response)
    answer_mark = b'"output"'
    transcript_reader = staticmethod(read_response)
    event_rewriter = native_event_rewriter = NativeToResponsesRewriter
    is_chat = True
    resumes_by_completion = True

    def added_fields(
        self, fields: Mapping[str, msgspec.Raw], node_kind: str, settings: Settings
    ) -> JsonObject | None:
        """`input` and `tools` in a form that llama.cpp takes, and the format where it obeys it."""
        if node_kind != "llama.cpp":
            return None
        edit: JsonObject = {}
        if settings.repairs.input_items:
            if (items := _repaired_items(fields.get("input", msgspec.Raw()))) is not None:
                edit["input"] = items
            if bytes(memoryview(fields.get("tools", b""))[:4]) == b"null":
                edit["tools"] = msgspec.UNSET
        bounds = ("response_format", "json_schema", "grammar")
        if settings.repairs.text_format and not any(name in fields for name in bounds):
            # It obeys the chat's `response_format` here, and ignores `text.format`.
            text = decoded_field(fields, "text")
            bound = text.get("format") if isinstance(text, dict) else None
            edit |= as_response_format(bound, fields) or {}
        return edit or None

    def response_rewriter(
        self, bodies: Bodies, model: str, node: NodeInfo, settings: Settings, *, stream: bool
    ) -> ResponseRewriter | None:
        repairs = settings.repairs
        numbers_events = repairs.stream_events and stream
        if node.kind != "llama.cpp" or not (numbers_events or repairs.stop_reason):
            return None
        return ResponsesRepair(
            numbers_events=numbers_events,
            limits=partial(_token_limits, bodies, node.context) if repairs.stop_reason else None,
            model=model,
            created_at=int(time.time()),
        )

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        """The API's own error event, with the `error` object that official clients raise on."""
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": 0,
            "error": openai_error(error),
        }
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def numbered_heartbeats(self) -> NumberedHeartbeats:
        return NumberedHeartbeats()

    def has_content(self, value: JsonObject) -> bool:
        return value.get("type") not in _NO_CONTENT_TYPES

    def is_terminal_event(self, event: bytes) -> bool:
        return sse.event_name(event) in _TERMINAL_NAMES

    def is_stream_complete(self, tail: bytes) -> bool:
        name = b""
        for event in sse.split(tail):
            name = sse.event_name(event) or name
        return name in _TERMINAL_NAMES

    def _own_unresumable_reason(self, body: JsonObject, transcript: Transcript) -> str | None:
        text, reasoning = body.get("text"), body.get("reasoning")
        bound = text.get("format") if isinstance(text, dict) else None
        if isinstance(bound, dict) and bound.get("type") not in {None, "text"}:
            return resuming.BOUND_TO_GRAMMAR
        if body.get("tools"):
            return "its tools can't be written into a prompt"
        if isinstance(reasoning, dict) and reasoning.get("effort"):
            return "its effort of reasoning can't be written into a prompt"
        chat = self.chat_body(body)
        if chat is None:
            return "its input holds more than text"
        return resuming.message_unresumable_reason(chat)

    def chat_body(self, body: JsonObject) -> JsonObject | None:
        """The input as a chat, as llama.cpp writes it; None: it holds more than text."""
        messages: list[JsonObject | None] = []
        if isinstance(instructions := body.get("instructions"), str):
            messages.append({"role": "system", "content": instructions})
        given = body.get("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        elif isinstance(given, list):
            messages += map(_chat_message, given)
        else:
            return None
        return as_chat(body, messages)

    def assemble(self, request_fields: JsonObject) -> Assembly:
        whole: object = None
        while (events := (yield)) is not None:
            for fields in read_events(events):
                if whole is None and decoded_field(fields, "type") in _TERMINAL_TYPES:
                    whole = decoded_field(fields, "response")
        if not isinstance(whole, dict):
            raise AssemblyError("the node's stream has no end")
        # llama.cpp leaves these fields out at a stream's end.
        whole = {"completed_at": whole.get("created_at"), **whole}
        if isinstance(output := whole.get("output"), list):
            whole["output"] = [
                {**item, "status": "completed"}
                if item.get("type") == "reasoning" and "status" not in item
                else item
                for item in output
            ]
        return whole

    def answer_events(self, content: bytes, request_fields: JsonObject) -> bytes:
        response = parse_object(content)
        begun = response | {"status": "in_progress", "output": [], "usage": None}
        events: list[JsonObject] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(response["output"]):
            place = {"output_index": index}
            events += ({**event, **place} for event in _item_events(item))
        kind = f"response.{response.get('status')}"
        kind = kind if kind in _TERMINAL_TYPES else "response.completed"
        events.append({"type": kind, "response": response})
        return b"".join(
            named_event({**event, "sequence_number": number}) for number, event in enumerate(events)
        )


# The events of each type of content, and the field that they tell.
_PARTS = {
    "output_text": ("response.output_text", "text"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "refusal": ("response.refusal", "refusal"),
}


def _item_events(item: JsonObject) -> Iterator[JsonObject]:
    """The events of one item of a response, in one piece."""
    is_call = item.get("type") == "function_call"
    place = {"item_id": item.get("id")}
    nothing: JsonObject = {"arguments": ""} if is_call else {}
    parts = item.get("content")
    if isinstance(parts, list):
        nothing["content"] = []
    begun = item | nothing | {"status": "in_progress"}
    yield {"type": "response.output_item.added", "item": begun}
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        kind, name = _PARTS.get(part.get("type"), ("", ""))
        at = place | {"content_index": number}
        begin = part | {name: ""} if kind else part
        yield {"type": "response.content_part.added", **at, "part": begin}
        if kind:
            more: JsonObject = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": f"{kind}.delta", **at, "delta": part.get(name), **more}
            yield {"type": f"{kind}.done", **at, name: part.get(name), **more}
        yield {"type": "response.content_part.done", **at, "part": part}
    if is_call:
        kind, text = "response.function_call_arguments", item.get("arguments")
        yield {"type": f"{kind}.delta", **place, "delta": text}
        yield {"type": f"{kind}.done", **place, "arguments": text, "name": item.get("name")}
    yield {"type": "response.output_item.done", "item": item}


# The repair of a request: what llama.cpp b11669 refuses, though it has all that it needs.

# Of an `input`: it is read in two passes of some milliseconds.
MOST_REPAIRED_BYTES, MOST_REPAIRED_COMMAS, MOST_REPAIRED_ITEMS = 4 << 20, 100_000, 2000
_REPAIRABLE = re.compile(rb'"assistant"|"reasoning"|custom_tool_')


def _repaired_items(raw: msgspec.Raw) -> list[Any] | None:
    """The items of `input` as llama.cpp takes them; None: there is nothing to repair."""
    if len(raw) > MOST_REPAIRED_BYTES or not _REPAIRABLE.search(raw):
        return None
    if bytes(raw).count(b",") > MOST_REPAIRED_COMMAS:
        return None
    try:
        items = ITEMS_DECODER.decode(raw)
    except JSON_ERRORS:
        return None  # a text, or what the node will refuse
    if len(items) > MOST_REPAIRED_ITEMS:
        return None
    repaired = [_repaired_item(item) for item in items]
    if all(new is item for new, item in zip(repaired, items, strict=True)):
        return None
    return [item for item in repaired if item is not None]


def _repaired_item(item: msgspec.Raw) -> Any:
    """This item; None: it says nothing."""
    fields: dict[str, Any] = dict(body_fields(bytes(item)))
    kind = decoded_field(fields, "type")
    if kind is None and decoded_field(fields, "role") == "assistant":
        return fields | {"type": "message"}
    if kind == "reasoning":
        return _repaired_reasoning(item, fields)
    if kind == "custom_tool_call":
        arguments = msgspec.json.encode({"input": fields.pop("input", "")}).decode()
        return fields | {"type": "function_call", "arguments": arguments}
    if kind == "custom_tool_call_output":
        return fields | {"type": "function_call_output"}
    return item


def _repaired_reasoning(item: msgspec.Raw, fields: dict[str, Any]) -> Any:
    """Reasoning has a text and a list as its summary; None: it is encrypted, or empty."""
    content, summary = (decoded_field(fields, name) for name in ("content", "summary"))
    parts = summary if isinstance(summary, list) else []
    if not isinstance(content, list) or not content:
        texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        if not texts or not all(isinstance(text, str) for text in texts):
            return None
        content = [{"type": "reasoning_text", "text": "\n\n".join(texts)}]
    elif isinstance(summary, list):
        return item
    return fields | {"summary": parts, "content": content}


# The repair of what llama.cpp b11549 leaves out: most numbers of its streams' events, and that a
# response was cut off. `tests/clients/test_server_gaps.py` tells when a server has caught up.

# Items of one response, each a message, reasoning or a tool call, whose places are remembered.
MOST_ITEMS = 1024
_LIFECYCLE_TYPES = frozenset({"response.created", "response.in_progress", "response.queued"})

# The type of the deltas that make up an item of each type.
_DELTA_TYPES = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}

# Beginnings of the types of events about a part of an item's content.
_CONTENT_EVENTS = ("response.output_text.", "response.reasoning_text.", "response.content_part.")
_COMPLETED = b'"status":"completed"'  # bytes in each event that says that something is complete


def _token_limits(bodies: Bodies, context: int | None) -> ResponseLimits:
    """The limits of the response to these bodies, the operator's included."""
    given = [
        count
        for body in bodies
        for name in BOUND_NAMES
        if is_number(count := decoded_field(body_fields(body), name)) and count >= 0
    ]
    return ResponseLimits(min(given, default=None), context)


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Tokens at which a node cuts a response off; None: there is no limit, or none is known."""

    output: float | None = None
    context: int | None = None  # most tokens of the prompt and the response

    def are_reached(self, usage: object) -> bool:
        """Whether the response with this `usage` was cut off.

        A response that ended by itself with just the last token counts as cut off: llama.cpp
        tells nothing that would differ.
        """
        if not isinstance(usage, dict):
            return False
        output, total = as_count(usage.get("output_tokens")), as_count(usage.get("total_tokens"))
        return (self.output is not None and output >= self.output) or (
            self.context is not None and total >= self.context
        )


@dataclass(slots=True, eq=False)
class ResponsesRepair(ResponseRewriter):
    """Completes one response of llama.cpp's.

    `numbers_events`: whether events get the numbers that official clients need. `limits`: tells
    those of the response; None: its status is left alone. `model` and `created_at` (seconds since
    1970) are what a stream begins with, though llama.cpp tells them at its end.
    """

    numbers_events: bool
    limits: Callable[[], ResponseLimits] | None
    model: str
    created_at: int
    _next_number: int = 0
    _indices: dict[str, int] = field(default_factory=dict)  # places in the output by items' ids
    _mark: bytes = b""  # what the newest item's deltas begin with; empty: there is no item yet
    _item_mark: bytes = b""  # the bytes that name the item in each
    _numbered_mark: bytes = b""  # what takes the place of `_mark`, before the event's number
    _added: bytes = b""  # and behind it

    def rewrite_events(self, events: bytes) -> bytes:
        """The same events, complete. The newest item's deltas, nearly all, are not parsed."""
        mark = self._mark
        if mark:
            parts = events.split(mark)
            count = len(parts) - 1
            if count and count == events.count(b"\n\n") == events.count(self._item_mark):
                return self._number_deltas(parts)
        elif not self.numbers_events and (self.limits is None or _COMPLETED not in events):
            return events
        return b"".join(map(self._rewrite_event, sse.split(events)))

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        """The same plain response, with its true status."""
        yield
        return edit_body(content, self._with_true_status)

    def _number_deltas(self, parts: list[bytes]) -> bytes:
        """The deltas that were split at their mark, complete."""
        mark, added, number = self._numbered_mark, self._added, self._next_number
        self._next_number = number + len(parts) - 1
        if len(parts) == 2:
            return b"%b%b%d%b%b" % (parts[0], mark, number, added, parts[1])
        return parts[0] + b"".join(
            [b"%b%d%b%b" % (mark, number + at, added, part) for at, part in enumerate(parts[1:])]
        )

    def _rewrite_event(self, event: bytes) -> bytes:
        """An event of any type, complete. Raises: InvalidResponse."""
        try:
            value = parse_object(sse.payload(event))
        except InvalidJson:
            return event  # a comment
        kind = value.get("type")
        if not isinstance(kind, str) or not kind.startswith("response."):
            return event
        if kind == "response.created" and "sequence_number" in value:
            self.numbers_events = False  # this server numbers its events itself
        repaired = value
        if isinstance(item := value.get("item"), dict):
            repaired = value | {"item": self._with_true_status(item)}
        elif kind == "response.completed" and isinstance(whole := value.get("response"), dict):
            whole = self._with_true_status(whole)
            cut_off = whole.get("status") == "incomplete"
            kind = "response.incomplete" if cut_off else kind
            repaired = value | {"type": kind, "response": whole}
        if not self.numbers_events:
            return event if repaired == value else _reencoded(event, [repaired])
        try:
            return _reencoded(event, map(self._numbered, self._with_missing_events(repaired)))
        except (TypeError, AttributeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None

    def _with_true_status(self, value: JsonObject) -> JsonObject:
        """The response or item with its true status; itself if that is the one it has."""
        if self.limits is None or value.get("status") != "completed":
            return value
        if value.get("type") == "function_call":
            # The one kind of item that shows for itself whether it is whole.
            return value if _is_json(value.get("arguments")) else value | {"status": "incomplete"}
        items = value.get("output")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            return value
        output = [self._with_true_status(item) for item in items]
        if not self.limits().are_reached(value.get("usage")):
            return value if output == items else value | {"output": output}
        if output:
            output[-1] = output[-1] | {"status": "incomplete"}
        details = {"reason": "max_output_tokens"}
        return value | {"status": "incomplete", "incomplete_details": details, "output": output}

    def _with_missing_events(self, value: JsonObject) -> Iterator[JsonObject]:
        """The event, behind those that llama.cpp leaves out before it."""
        item = value.get("item")
        if (
            value["type"] == "response.output_item.done"
            and isinstance(item, dict)
            and item.get("type") == "function_call"
        ):
            fields = {"arguments": item.get("arguments"), "name": item.get("name")}
            kind = "response.function_call_arguments.done"
            yield {"type": kind, "item_id": item.get("id"), **fields}
        yield value

    def _numbered(self, value: JsonObject) -> JsonObject:
        """The event with its numbers, and what else official clients need."""
        kind = value["type"]
        numbered: JsonObject = {"type": kind, "sequence_number": self._next_number}
        self._next_number += 1
        item, response = value.get("item"), value.get("response")
        if isinstance(item, dict):
            if kind == "response.output_item.added":
                self._begin_item(item)
            elif item.get("type") == "reasoning":
                value = value | {"item": {**item, "status": item.get("status", "completed")}}
            numbered["output_index"] = self._index(item.get("id"))
        elif "item_id" in value:
            numbered["output_index"] = self._index(value["item_id"])
            if kind.startswith(_CONTENT_EVENTS):
                # llama.cpp's items have one part.
                numbered["content_index"] = 0
            if kind.startswith("response.output_text."):
                numbered["logprobs"] = []
            if isinstance(part := value.get("part"), dict) and part.get("type") == "output_text":
                value = value | {"part": {"annotations": [], "logprobs": [], **part}}
        elif isinstance(response, dict):
            value = value | {"response": self._whole_response(kind, response)}
        return numbered | value

    def _whole_response(self, kind: str, response: JsonObject) -> JsonObject:
        """The response in a lifecycle event, with the fields that it lacks."""
        if kind in _LIFECYCLE_TYPES:
            fields = {"created_at": self.created_at, "model": self.model, "output": []}
            return fields | {"error": None, "incomplete_details": None, "usage": None} | response
        # The server tells the time of the end as that of the beginning.
        times = {"created_at": self.created_at, "completed_at": response.get("created_at")}
        fields = {"error": None, "incomplete_details": None, "model": self.model}
        return fields | response | times

    def _begin_item(self, item: JsonObject) -> None:
        """The item's deltas follow. Raises: InvalidResponse."""
        index, item_id = len(self._indices), item.get("id")
        if index >= MOST_ITEMS:
            raise InvalidResponse(f"The node's response has more than {MOST_ITEMS} items")
        if not isinstance(item_id, str):
            return
        self._indices[item_id] = index
        kind = _DELTA_TYPES.get(str(item.get("type")))
        if kind is None:
            self._mark = b""
            return
        self._mark = b'data: {"type":"%b",' % kind.encode()
        self._item_mark = b'"item_id":%b' % msgspec.json.encode(item_id)
        self._numbered_mark = self._mark + b'"sequence_number":'
        self._added = b',"output_index":%d,' % index
        if kind.startswith(_CONTENT_EVENTS):
            self._added += b'"content_index":0,'
        if kind.startswith("response.output_text."):
            self._added += b'"logprobs":[],'

    def _index(self, item_id: object) -> int:
        """The item's place in the output; the newest one's, if it never began."""
        newest = max(0, len(self._indices) - 1)
        return self._indices.get(item_id, newest) if isinstance(item_id, str) else newest


def _is_json(text: object) -> bool:
    try:
        parse_json(text.encode() if isinstance(text, str) else b"")
    except (InvalidJson, UnicodeEncodeError):
        return False
    return True


def _reencoded(event: bytes, values: Iterable[JsonObject]) -> bytes:
    """Events with these data in place of `event`, behind its comments."""
    comments = [line for line in event.splitlines(keepends=True) if line.startswith(b":")]
    return b"".join([*comments, *map(named_event, values)])


RESPONSES = ResponsesApi()


class ResponsesCountApi(RelayedApi):
    """`/v1/responses/input_tokens`, with the same bodies."""

    refused_fields = ResponsesApi.refused_fields
    added_fields_marks = ResponsesApi.added_fields_marks

    def added_fields(
        self, fields: Mapping[str, msgspec.Raw], node_kind: str, settings: Settings
    ) -> JsonObject | None:
        return RESPONSES.added_fields(fields, node_kind, settings)


RESPONSES_COUNT = ResponsesCountApi("input", "input_tokens", INPUT_TOKENS)


_TEXT_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text",
               "assistant": "output_text"}  # fmt: skip
"""The type of the parts that hold text, by role."""


def _chat_message(item: object) -> JsonObject | None:
    if not isinstance(item, dict):
        return None
    role, content = item.get("role"), item.get("content")
    wanted = _TEXT_PARTS.get(str(role))
    if item.get("type", "message") != "message" or wanted is None:
        return None
    if isinstance(content, str):
        return {"role": role, "content": [{"type": "text", "text": content}]}
    if not isinstance(content, list) or not content:
        return None
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != wanted:
            return None
        parts.append({"type": "text", "text": text})
    return {"role": role, "content": parts}
