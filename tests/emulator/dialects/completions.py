"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from tests.emulator.dialects.answer import Answer, Told, data, null_of_several
from tests.emulator.dialects.chat import DONE


class Completions:
    def __init__(self, told: Told) -> None:
        self.told = told
        self._id = told.ident("chatcmpl-")  # as the server calls it here, too
        self._common = {
            "created": told.created,
            "model": told.model,
            "system_fingerprint": "b0-unknown",
            "object": "text_completion",
        }

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": finish}

    def _done(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            "choices": choices,
            **self._common,
            "usage": self.told.usage(),
            "id": self._id,
            "timings": answer.timings(),
        }

    def head(self) -> list[bytes]:
        return null_of_several(self.told)

    def _delta(self, answer: Answer, text: str, **more: Any) -> bytes:
        if self.told.work.timings_per_token:
            more["timings"] = answer.timings()
        choices = [self._choice(answer.index, text, None)]
        return data({"choices": choices, **self._common, "id": self._id, **more})

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        progress = answer.progress(processed, seconds)
        return [self._delta(answer, "", prompt_progress=progress)]

    def start(self, answer: Answer) -> list[bytes]:
        return []

    def delta(self, answer: Answer, word: str) -> bytes:
        return self._delta(answer, word)

    def finish(self, answer: Answer) -> list[bytes]:
        choice = self._choice(answer.index, "", answer.finish_reason())
        return [data(self._done([choice], answer))]

    def end(self) -> list[bytes]:
        return [DONE]

    def plain(self) -> dict[str, Any]:
        choices = [self._choice(a.index, a.text, a.finish_reason()) for a in self.told.answers]
        return self._done(choices, self.told.answers[0])
