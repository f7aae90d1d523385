"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from tests.emulator.apis.answer import Answer, Api, ResponseState, data_event, null_for_many_prompts
from tests.emulator.apis.chat import DONE


class Completions(Api):
    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._id = state.new_id("chatcmpl-")  # the server's prefix for this API, too
        self._common = {
            "created": state.created,
            "model": state.model,
            "system_fingerprint": "b0-unknown",
            "object": "text_completion",
        }

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": finish}

    def _done(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            "choices": choices,
            **self._common,
            "usage": self.state.usage(),
            "id": self._id,
            "timings": answer.timings(),
        }

    def head(self) -> list[bytes]:
        return null_for_many_prompts(self.state)

    def _delta(self, answer: Answer, text: str, **more: Any) -> bytes:
        if self.state.request.timings_per_token:
            more["timings"] = answer.timings()
        choices = [self._choice(answer.index, text, None)]
        return data_event({"choices": choices, **self._common, "id": self._id, **more})

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        progress = answer.progress(processed, seconds)
        return [self._delta(answer, "", prompt_progress=progress)]

    def delta(self, answer: Answer, word: str) -> bytes:
        return self._delta(answer, word)

    def finish(self, answer: Answer) -> list[bytes]:
        choice = self._choice(answer.index, "", answer.finish_reason())
        return [data_event(self._done([choice], answer))]

    def end(self) -> list[bytes]:
        return [DONE]

    def plain(self) -> dict[str, Any]:
        choices = [self._choice(a.index, a.text, a.finish_reason()) for a in self.state.answers]
        return self._done(choices, self.state.answers[0])
