"""How a stream of `/v1/responses` is resumed: by llama.cpp's `/completion`, written as its events.

llama.cpp continues no message of this API, so a response goes on from its prompt as the node's
template renders it, with the text so far behind it.
"""

from __future__ import annotations

import time
from typing import Any

from gateway.proxy.api import resuming
from gateway.proxy.api.resuming import (
    EventRewriter,
    ReasoningEndMark,
    ReasoningSplitter,
    as_count,
    named_event,
)
from gateway.proxy.json_values import JsonObject
from gateway.proxy.transcript import SplicePoint, Transcript

_TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})

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


class NativeToResponsesRewriter(EventRewriter):
    """A response's stream, continued by `/completion`.

    Its events have what llama.cpp's have; where the stream so far is numbered, also numbers.
    `end_mark`: the mark that ends the reasoning under way.
    """

    def __init__(
        self,
        transcript: Transcript,
        splice_point: SplicePoint,
        end_mark: ReasoningEndMark | None = None,
    ) -> None:
        super().__init__(transcript, splice_point)
        self._splitter = ReasoningSplitter(end_mark)
        self._number = transcript.last_number
        self._response: JsonObject = dict(transcript.first_event.get("response") or {})
        self._ids = {kind: id_ for id_, kind in transcript.item_types.items()}
        self._texts = {
            "reasoning": [transcript.reasoning_text] if transcript.reasoning_text else [],
            "message": [transcript.text] if transcript.text else [],
        }
        self._sent_ends = frozenset(transcript.sent_ends)

    def rewrite(self, value: JsonObject) -> bytes:
        reasoning, content = self._splitter.feed(self._new_text(value.get("content")))
        if not value.get("stop"):
            return self._text_events("reasoning", reasoning) + self._text_events("message", content)
        self._check_end()
        reasoning += self._splitter.flush()
        events = self._text_events("reasoning", reasoning) + self._text_events("message", content)
        tokens = self._splice_point.prefix_tokens + as_count(value.get("tokens_predicted"))
        return events + self._end_events(tokens)

    def final_events(self, reason: str, *, usage: bool) -> bytes:
        return self._end_events(self._splice_point.sent_tokens)

    def _text_events(self, kind: str, text: str) -> bytes:
        """Text of the item of this type, which begins if there is none yet."""
        if not text:
            return b""
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

    def _end_events(self, tokens: int) -> bytes:
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


def response_unresumable_reason(body: JsonObject, transcript: Transcript) -> str | None:
    """Why a response can't be resumed; None: it can."""
    reason = resuming.unresumable_reason(body, transcript)
    if reason is not None:
        return reason
    text, reasoning = body.get("text"), body.get("reasoning")
    bound = text.get("format") if isinstance(text, dict) else None
    if isinstance(bound, dict) and bound.get("type") not in {None, "text"}:
        return resuming.BOUND_TO_GRAMMAR
    if body.get("tools"):
        return "its tools can't be written into a prompt"
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        return "its effort of reasoning can't be written into a prompt"
    chat = response_as_chat(body)
    if chat is None:
        return "its input holds more than text"
    return resuming.message_unresumable_reason(chat)


_TEXT_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text",
               "assistant": "output_text"}  # fmt: skip
"""The type of the parts that hold text, by role."""


def response_as_chat(body: JsonObject) -> JsonObject | None:
    """The input as a chat, as llama.cpp writes it; None: it holds more than text."""
    if body.get("tools"):
        return None
    messages: list[JsonObject] = []
    if isinstance(instructions := body.get("instructions"), str):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif not isinstance(given, list):
        return None
    else:
        for item in given:
            message = _chat_message(item) if isinstance(item, dict) else None
            if message is None:
                return None
            messages.append(message)
    kwargs = body.get("chat_template_kwargs")
    return {"messages": messages} | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _chat_message(item: JsonObject) -> JsonObject | None:
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
