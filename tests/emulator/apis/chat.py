"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from tests.emulator.apis.answer import Answer, Api, ResponseState, data_event, logprobs, to_json

DONE = b"data: [DONE]\n\n"


class Chat(Api):
    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._common = {
            "created": state.created,
            "id": state.new_id("chatcmpl-"),
            "model": state.model,
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion.chunk",
        }
        # There are many deltas: all but the word is encoded once.
        self._tail = b"}}]," + to_json(self._common)[1:] + b"\n\n"

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"finish_reason": None, "index": index, "delta": delta}
        return {"choices": [choice], **self._common, **more}

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        progress = answer.progress(processed, seconds)
        role = {"role": "assistant", "content": None}
        return [data_event(self._chunk(answer.index, role, prompt_progress=progress))]

    def start(self, answer: Answer) -> list[bytes]:
        return [data_event(self._chunk(answer.index, {"role": "assistant", "content": None}))]

    def delta(self, answer: Answer, word: str) -> bytes:
        request = self.state.request
        if request.logprobs or request.timings_per_token:
            more = {"timings": answer.timings()} if request.timings_per_token else {}
            chunk = self._chunk(answer.index, {"content": word}, **more)
            if request.logprobs:
                chunk["choices"][0]["logprobs"] = logprobs(word)
            return data_event(chunk)
        return b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":{"content":%b%b' % (
            answer.index,
            to_json(word),
            self._tail,
        )

    def finish(self, answer: Answer) -> list[bytes]:
        more = {} if self.state.request.include_usage else {"timings": answer.timings()}
        chunk = self._chunk(answer.index, {}, **more)
        chunk["choices"][0]["finish_reason"] = answer.finish_reason()
        return [data_event(chunk)]

    def end(self) -> list[bytes]:
        if not self.state.request.include_usage:
            return [DONE]
        timings = self.state.answers[0].timings()
        usage = {"choices": [], **self._common, "usage": self.state.usage(), "timings": timings}
        return [data_event(usage), DONE]

    def plain(self) -> dict[str, Any]:
        return {
            "choices": [
                {
                    "finish_reason": answer.finish_reason(),
                    "index": answer.index,
                    "message": {"role": "assistant", "content": answer.text},
                }
                for answer in self.state.answers
            ],
            "created": self.state.created,
            "model": self.state.model,
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion",
            "usage": self.state.usage(),
            "id": self._common["id"],
            "timings": self.state.answers[0].timings(),
        }
