"""`/v1/messages`, Anthropic's."""

from __future__ import annotations

from typing import Any

from tests.emulator.apis.answer import Answer, Api, ResponseState, named_event, to_json


class Messages(Api):
    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._id = state.new_id("chatcmpl-")

    def _message(self, answer: Answer, **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": more["content"],
            "model": self.state.model,
            "stop_reason": more["stop_reason"],
            "stop_sequence": answer.stopping_word or None,
            "usage": {
                "cache_read_input_tokens": answer.cached,
                "input_tokens": answer.prompt_tokens - answer.cached,
                "output_tokens": more["output_tokens"],
            },
        }

    def _stop_reason(self, answer: Answer) -> str:
        reasons = {"stop": "end_turn", "length": "max_tokens", "word": "end_turn"}
        return reasons[answer.finish]

    def start(self, answer: Answer) -> list[bytes]:
        message = self._message(answer, content=[], stop_reason=None, output_tokens=0)
        block = {"type": "text", "text": ""}
        return [
            named_event({"type": "message_start", "message": message}),
            named_event({"type": "content_block_start", "index": 0, "content_block": block}),
        ]

    def delta(self, answer: Answer, word: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":%b}}\n\n' % to_json(word)
        )

    def finish(self, answer: Answer) -> list[bytes]:
        sequence = answer.stopping_word or None
        delta = {"stop_reason": self._stop_reason(answer), "stop_sequence": sequence}
        usage = {"output_tokens": answer.tokens}
        return [
            named_event({"type": "content_block_stop", "index": 0}),
            named_event({"type": "message_delta", "delta": delta, "usage": usage}),
            named_event({"type": "message_stop"}),
        ]

    def plain(self) -> dict[str, Any]:
        answer = self.state.answers[0]
        return self._message(
            answer,
            content=[{"type": "text", "text": answer.text}],
            stop_reason=self._stop_reason(answer),
            output_tokens=answer.tokens,
        )
