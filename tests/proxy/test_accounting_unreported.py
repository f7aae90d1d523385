"""What a request counts whose node reports no tokens, or those of one answer alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.events import RequestFinished
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.proxy.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.proxy.test_accounting_left import SETTINGS, TAG, the_record
from tests.transport.raw import Peer, raw_server
from tests.virtual import in_virtual_time

TOKENS = 30  # of each answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("selected", ["content", "stop", "timings/predicted_ms"])
@in_virtual_time
async def test_fields_that_a_client_selects_hide_no_tokens(
    tmp_path: Path, selected: str, stream: bool
) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=TOKENS)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        fields: dict[str, Any] = {"response_fields": [selected]}
        reply = await proxy.ask("/completion", TAG, stream=stream, **fields)
        assert reply.status_code == 200
        assert "error" not in reply.text
        if not stream:
            assert set(reply.json()) == {selected, "stop", "timings"}
        record, tally = await the_record(proxy)
        assert (record.completion_tokens, record.status) == (TOKENS, 200)
        assert record.prompt_tokens == tally.read_tokens
        assert record.attempts == tally.attempts == 1


@in_virtual_time
async def test_a_name_in_escapes_hides_no_tokens_either(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=10, answer_tokens=TOKENS)
    body = rb'{"prompt": "Hello", "response\u005ffields": ["content"]}'
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        reply = await proxy.running.client.post("/completion", content=body, headers=TAG)
        assert reply.status_code == 200, reply.text
        record, tally = await the_record(proxy)
        assert record.completion_tokens == tally.tokens == TOKENS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_all_answers_to_a_prompt_count(tmp_path: Path, path: str, stream: bool) -> None:
    one = EmulatedNode(slots=4, decode_tps=10, answer_tokens=TOKENS)
    async with proxy_over(tmp_path, one, **SETTINGS) as proxy:
        reply = await proxy.ask(path, TAG, stream=stream, n=3, max_tokens=100)
        assert reply.status_code == 200
        record, tally = await the_record(proxy)
        assert tally.tokens == 3 * TOKENS
        # llama.cpp reports the tokens of one answer: the others' are counted by events.
        assert record.completion_tokens == pytest.approx(tally.tokens, abs=10)
        assert record.prompt_tokens == tally.read_tokens
        assert record.slot_seconds == pytest.approx(3 * 3.0, abs=0.3)


async def serve_silently(peer: Peer) -> None:
    """Answer requests without a word about tokens."""
    while True:
        try:
            request = await peer.request()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        value: Any = {"data": [{"id": "demo"}]}
        if request.startswith(b"POST"):
            message = {"role": "assistant", "content": "a" * 400}
            value = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        answer = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await peer.say(head % len(answer) + answer)


async def test_an_answer_without_any_figure_counts_by_its_bytes(tmp_path: Path) -> None:
    async with raw_server(serve_silently) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "kind": "openai"}
        async with running_gateway(tmp_path, [node]) as running:
            records: list[RequestFinished] = []
            running.gateway.bus.subscribe(RequestFinished, records.append)
            for more in ({}, {"max_tokens": 40}):
                body = {"messages": [{"role": "user", "content": "Hello"}], **more}
                reply = await running.client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
            await until(lambda: len(records) == 2)
            whole, limited = records
            assert 100 <= whole.completion_tokens <= 130
            assert limited.completion_tokens == 40
            assert whole.prompt_tokens > 0
