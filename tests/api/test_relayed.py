"""Requests that are only relayed."""

from __future__ import annotations

import json

from gateway.api.base import EMBEDDINGS_USAGE_WITHIN, RELAYED
from gateway.lease import Usage
from gateway.request.routes import ROUTES
from tests.each_case import each_case


@each_case("vectors", [1, 10 * EMBEDDINGS_USAGE_WITHIN])
@each_case("spaces", [None, (",", ":")])
def test_embeddings_use_a_prompt_alone(vectors: int, spaces: tuple[str, str] | None) -> None:
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    early = json.dumps({"usage": usage, "data": [0.5] * vectors}, separators=spaces)
    late = json.dumps({"data": [0.5] * vectors, "usage": usage}, separators=spaces)
    assert RELAYED.read_usage(early.encode()) == Usage(7)
    assert RELAYED.read_usage(late.encode()) == Usage(7)


@each_case(
    ("path", "field"),
    [
        ("/v1/embeddings", "input"),
        ("/v1/rerank", "documents"),
        ("/tokenize", "content"),
        ("/apply-template", "messages"),
        ("/v1/audio/transcriptions", None),
    ],
)
def test_each_path_says_where_its_prompt_is(path: str, field: str | None) -> None:
    route = ROUTES[path]
    assert (route.prompt_field, route.generates) == (field, False)
    assert not route.api.refusal_is_general
    assert route.api.streaming_fields is None
    assert route.api.merger is None
    assert route.api.progress_fields is None
