"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from tests.emulator.dialects.answer import Answer, Told, data, dump, logprobs

DONE = b"data: [DONE]\n\n"


class Chat:
    def __init__(self, told: Told) -> None:
        self.told = told
        self._common = {
            "created": told.created,
            "id": told.ident("chatcmpl-"),
            "model": told.model,
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion.chunk",
        }
        # Deltas are many: all but the word is written once.
        self._tail = b"}}]," + dump(self._common)[1:] + b"\n\n"

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"finish_reason": None, "index": index, "delta": delta}
        return {"choices": [choice], **self._common, **more}

    def head(self) -> list[bytes]:
        return []

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        progress = answer.progress(processed, seconds)
        role = {"role": "assistant", "content": None}
        return [data(self._chunk(answer.index, role, prompt_progress=progress))]

    def start(self, answer: Answer) -> list[bytes]:
        return [data(self._chunk(answer.index, {"role": "assistant", "content": None}))]

    def delta(self, answer: Answer, word: str) -> bytes:
        work = self.told.work
        if work.logprobs or work.timings_per_token:
            more = {"timings": answer.timings()} if work.timings_per_token else {}
            chunk = self._chunk(answer.index, {"content": word}, **more)
            if work.logprobs:
                chunk["choices"][0]["logprobs"] = logprobs(word)
            return data(chunk)
        return b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":{"content":%b%b' % (
            answer.index,
            dump(word),
            self._tail,
        )

    def finish(self, answer: Answer) -> list[bytes]:
        more = {} if self.told.work.include_usage else {"timings": answer.timings()}
        chunk = self._chunk(answer.index, {}, **more)
        chunk["choices"][0]["finish_reason"] = answer.finish_reason()
        return [data(chunk)]

    def end(self) -> list[bytes]:
        if not self.told.work.include_usage:
            return [DONE]
        timings = self.told.answers[0].timings()
        usage = {"choices": [], **self._common, "usage": self.told.usage(), "timings": timings}
        return [data(usage), DONE]

    def plain(self) -> dict[str, Any]:
        return {
            "choices": [
                {
                    "finish_reason": answer.finish_reason(),
                    "index": answer.index,
                    "message": {"role": "assistant", "content": answer.text},
                }
                for answer in self.told.answers
            ],
            "created": self.told.created,
            "model": self.told.model,
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion",
            "usage": self.told.usage(),
            "id": self._common["id"],
            "timings": self.told.answers[0].timings(),
        }
