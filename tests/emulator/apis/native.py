"""`/completion`, llama.cpp's own. It has no `[DONE]`: the event with `"stop": true` is the last."""

from __future__ import annotations

from typing import Any

from tests.emulator.apis.answer import Answer, Api, data_event, null_for_many_prompts
from tests.emulator.apis.sampling import SAMPLING
from tests.emulator.language_model import count_tokens, tokenize

_STOP_TYPES = {"stop": "eos", "length": "limit", "word": "word"}


class Native(Api):
    def head(self) -> list[bytes]:
        return null_for_many_prompts(self.state)

    def progress(self, answer: Answer, processed: int, seconds: float) -> list[bytes]:
        progress = answer.progress(processed, seconds)
        return [self._delta(answer, "", [0], prompt_progress=progress)]

    def delta(self, answer: Answer, word: str) -> bytes:
        return self._delta(answer, word, tokenize(word))

    def _delta(self, answer: Answer, text: str, tokens: list[int], **more: Any) -> bytes:
        value = {
            "index": answer.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": answer.prompt_tokens,
        }
        if self.state.request.timings_per_token:
            value["timings"] = answer.timings()
        return data_event(value | more)

    def finish(self, answer: Answer) -> list[bytes]:
        return [data_event(self._done(answer, ""))]

    def plain(self) -> Any:
        answers = [self._done(answer, answer.text) for answer in self.state.answers]
        return answers[0] if len(answers) == 1 else answers

    def _done(self, answer: Answer, content: str) -> dict[str, Any]:
        request = self.state.request
        limit = -1 if request.max_tokens is None else request.max_tokens
        whole = {
            "index": answer.index,
            "content": content,
            "tokens": [],
            "id_slot": answer.slot,
            "stop": True,
            "model": self.state.model,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": SAMPLING
            | {"max_tokens": limit, "n_predict": limit, "stream": request.stream},
            "prompt": "<s> " + answer.prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": False,
            "stop_type": _STOP_TYPES[answer.finish],
            "stopping_word": answer.stopping_word,
            "tokens_cached": count_tokens(answer.prompt) + answer.tokens - 1,
            "timings": answer.timings(),
        }
        if request.n_probs:
            ids = tokenize(answer.text)[: answer.tokens]
            whole["completion_probabilities"] = [{"id": one, "logprob": -0.5} for one in ids]
        return _selected(whole, request.response_fields) if request.response_fields else whole


def _selected(whole: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The values at these paths, of those that there are."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            found[path] = value
    return found


_ABSENT = object()
