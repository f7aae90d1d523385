"""Resuming by token ids: the client sees nothing of the probabilities that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.proxy_over_nodes import A_FIRST, proxy_over
from tests.proxy.resume.test_resumer import (
    PATHS,
    asked_of,
    check_whole,
    nodes,
    options_of,
    text_of,
    usage_of,
)
from tests.proxy.test_response_stream import AFTER
from tests.virtual import in_virtual_time


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_client_gets_no_logprobs_that_it_did_not_ask_for(
    tmp_path: Path, path: str
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, resume="exact") as proxy:
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        assert b'"logprobs":{' not in whole.body
        asks = {"/v1/chat/completions", "/v1/completions"}
        assert (b'"logprobs"' in one.seen[-1].body) is (path in asks)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert usage_of(reply) == usage_of(whole)
        assert b'"logprobs":{' not in reply.body
        plain = await proxy.ask(path, **asked_of(path))
        assert b'"logprobs":{' not in plain.content


@in_virtual_time
async def test_logprobs_that_the_client_asked_for_stay(tmp_path: Path) -> None:
    (one,) = nodes(1)
    async with proxy_over(tmp_path, one, resume="exact") as proxy:
        reply = await proxy.stream(logprobs=True, max_tokens=4)
        assert reply.body.count(b'"logprobs":{') == 4
        assert len(text_of(reply).split()) == 4
