"""`/v1/responses`."""

from __future__ import annotations

from typing import Any

from tests.emulator.apis.answer import Answer, Api, ResponseState, named_event


class Responses(Api):
    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._id = state.new_id("resp_")
        self._item = state.new_id("msg_")
        self._in_progress = {"id": self._id, "object": "response", "status": "in_progress"}
        self._created = False

    def _part(self, answer: Answer) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": answer.text}

    def _message(self, answer: Answer) -> dict[str, Any]:
        return {
            "type": "message",
            "status": "completed",
            "id": self._item,
            "content": [self._part(answer)],
            "role": "assistant",
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        return {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.tokens,
            "total_tokens": answer.prompt_tokens + answer.tokens,
            "input_tokens_details": {"cached_tokens": answer.cached},
        }

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        return [
            *self._create(),
            named_event(
                {
                    "type": "response.in_progress",
                    "response": self._in_progress,
                    "prompt_progress": answer.progress(processed, seconds),
                }
            ),
        ]

    def _create(self) -> list[bytes]:
        if self._created:
            return []
        self._created = True
        return [named_event({"type": "response.created", "response": self._in_progress})]

    def start(self, answer: Answer) -> list[bytes]:
        item = {
            "content": [],
            "id": self._item,
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
        }
        part = {"type": "output_text", "text": ""}
        in_progress = {"type": "response.in_progress", "response": self._in_progress}
        begin = [] if self._created else [*self._create(), named_event(in_progress)]
        return [
            *begin,
            named_event({"type": "response.output_item.added", "item": item}),
            named_event(
                {"type": "response.content_part.added", "item_id": self._item, "part": part}
            ),
        ]

    def delta(self, answer: Answer, word: str) -> bytes:
        kind = "response.output_text.delta"
        return named_event({"type": kind, "item_id": self._item, "delta": word})

    def finish(self, answer: Answer) -> list[bytes]:
        item = self._item
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self.state.created,
            "status": "completed",
            "model": self.state.model,
            "output": [self._message(answer)],
            "usage": self._usage(answer),
        }
        done = "response.output_text.done"
        part = self._part(answer)
        timings = answer.timings()
        return [
            named_event({"type": done, "item_id": item, "text": answer.text}),
            named_event({"type": "response.content_part.done", "item_id": item, "part": part}),
            named_event({"type": "response.output_item.done", "item": self._message(answer)}),
            named_event({"type": "response.completed", "response": response, "timings": timings}),
        ]

    def plain(self) -> dict[str, Any]:
        answer = self.state.answers[0]
        return {
            "completed_at": self.state.created,
            "created_at": self.state.created,
            "id": self._id,
            "model": self.state.model,
            "object": "response",
            "output": [self._message(answer)],
            "status": "completed",
            "usage": self._usage(answer),
        }
