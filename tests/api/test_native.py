"""llama.cpp's own completions: the plain response, and events after a resumption."""

from __future__ import annotations

import pytest

from gateway.api.base import AssemblyError
from gateway.api.native import INFILL, NATIVE, NativeEventsApi, NativeRewriter
from gateway.api.transcript import Transcript
from tests.api.events import SPLICE_POINT, assembled, values


@pytest.mark.parametrize("api", [NATIVE, INFILL])
def test_a_plain_response_has_token_ids_only_if_asked(api: NativeEventsApi) -> None:
    events = [
        {"index": 0, "content": " a", "tokens": [1], "stop": False},
        {"index": 0, "content": " b", "tokens": [2], "stop": False},
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "generation_settings": {"stream": True, "seed": 1},
        },
    ]
    assert assembled(api, events) == {
        "index": 0,
        "content": " a b",
        "tokens": [],
        "stop": True,
        "generation_settings": {"stream": False, "seed": 1},
    }
    assert assembled(api, events, {"return_tokens": True})["tokens"] == [1, 2]
    with pytest.raises(AssemblyError):
        assembled(api, events[:2])


def test_a_resumed_stream_counts_on() -> None:
    rewriter = NativeRewriter(Transcript(), SPLICE_POINT)
    last = {"content": "", "stop": True, "tokens_predicted": 4, "tokens_evaluated": 9}
    (value,) = values(rewriter.rewrite(last | {"prompt": "tell me one two"}))
    assert (value["tokens_predicted"], value["tokens_evaluated"]) == (6, 5)
    assert value["prompt"] == "tell me"
