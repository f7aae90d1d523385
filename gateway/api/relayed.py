"""Requests that the gateway only relays: their responses are plain and pass as they are."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from gateway.api.base import Answer, Api
from gateway.api.json_values import JsonObject
from gateway.lease import Usage
from gateway.transport.errors import InvalidResponse

_EMBEDDINGS_USAGE = re.compile(rb'"usage":\s*\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9}\}')
EMBEDDINGS_USAGE_WITHIN = 512  # bytes; llama.cpp writes the usage of embeddings before the vectors
_SOME = msgspec.Meta(min_length=1)


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(Answer, kw_only=True):
    data: Annotated[list[_Embedding], _SOME]


class _Ranked(msgspec.Struct):
    index: int


class _Ranking(Answer, kw_only=True):
    results: list[_Ranked] | None = None
    data: Annotated[list[_Ranked], _SOME] | None = None  # voyage's name of the list

    def __post_init__(self) -> None:
        if self.results is self.data is None:
            raise ValueError


_NATIVE_EMBEDDINGS = Annotated[list[_Embedding], _SOME] | _Embedding
# The list is TEI's form, in which llama.cpp's server answers TEI's requests.
_RANKINGS = Annotated[list[_Ranked], _SOME] | _Ranking


def _answer_with(name: str, kind: Any) -> type[msgspec.Struct]:
    """The type of responses that always have this field."""
    return msgspec.defstruct("Answer", [(name, kind)], bases=(Answer,), kw_only=True)


INPUT_TOKENS = _answer_with("input_tokens", int)  # a count of a prompt's tokens


class RelayedApi(Api):
    """Embeddings, reranking, tokenizing and the like, with OpenAI's errors."""

    name = "relayed"

    def __init__(
        self, prompt_field: str | None = None, mark: str = "", answer: Any = Answer
    ) -> None:
        """`mark`: the field that long responses are known by. `answer`: the type of all."""
        self.prompt_field = prompt_field
        self.answer = msgspec.json.Decoder(answer)
        self.answer_mark = f'"{mark}"'.encode()

    def has_content(self, value: JsonObject) -> bool:
        return True

    def read_usage(self, tail: bytes, opening: bytes = b"") -> Usage | None:
        bare = _EMBEDDINGS_USAGE.search(tail, 0, EMBEDDINGS_USAGE_WITHIN)
        return super().read_usage(tail) if bare is None else Usage(int(bare[1]))


class EmbeddingsApi(RelayedApi):
    """Embeddings: many bytes, and no text in which an end could stand."""

    decoded_bytes = 4 * 1024


class TranscriptionsApi(RelayedApi):
    """Transcriptions: JSON, or text in a format that the client has asked for."""

    answers_json = False

    def __init__(self) -> None:
        super().__init__(None, "text", _answer_with("text", str))

    def check_answer(self, content: bytes, *, whole: bool = True) -> None:
        """As for all APIs, but a text may be anything but a page."""
        begin = content.lstrip()[:1]
        if begin == b"{":
            super().check_answer(content, whole=whole)
        elif not content or begin == b"<":
            raise InvalidResponse("The node's answer is no transcription")


RELAYED = RelayedApi()  # any other request
EMBEDDINGS = EmbeddingsApi("input", "embedding", _Embeddings)
NATIVE_EMBEDDINGS = EmbeddingsApi("content", "embedding", _NATIVE_EMBEDDINGS)
RANKING = RelayedApi("documents", "index", _RANKINGS)
TRANSCRIPTIONS = TranscriptionsApi()
CHAT_COUNT = RelayedApi("messages", "input_tokens", INPUT_TOKENS)
TOKENIZE = RelayedApi("content", "tokens", _answer_with("tokens", msgspec.Raw))
DETOKENIZE = RelayedApi("tokens", "content", _answer_with("content", str))
TEMPLATE = RelayedApi("messages", "prompt", _answer_with("prompt", str))
