"""Several prompts in one request: each takes slots as they come free; there is one response."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.why import cancelled_by_operator
from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, ProxyOverNodes, Stream, proxy_over
from tests.gateways import until
from tests.virtual import in_virtual_time

PATH = "/v1/completions"
WORDS = [f"tell me of the number {number}" for number in range(9)]


def texts_of(answer: Any) -> dict[int, str]:
    return {choice["index"]: choice["text"] for choice in answer["choices"]}


def streamed_texts(reply: Stream) -> dict[int, str]:
    got: dict[int, str] = {}
    for value in reply.values:
        for choice in value["choices"]:
            got[choice["index"]] = got.get(choice["index"], "") + choice["text"]
    return got


async def asked_singly(proxy: ProxyOverNodes, **body: Any) -> dict[int, str]:
    """The same prompts, each in a request of its own."""
    replies = [await proxy.ask(PATH, prompt=word, **body) for word in WORDS]
    return {index: texts_of(reply.json())[0] for index, reply in enumerate(replies)}


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_prompts_run_on_all_free_slots_but_let_others_between_them(
    tmp_path: Path, stream: bool
) -> None:
    one, two = (EmulatedNode(slots=slots, decode_tps=20.0) for slots in (2, 3))
    async with proxy_over(tmp_path, one, two) as proxy:
        expected = await asked_singly(proxy)
        counted: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        asked = asyncio.create_task(proxy.stream(PATH, prompt=WORDS, stream=stream, **counted))
        await until(lambda: proxy.node("a").leased + proxy.node("b").leased == 5)
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 1)
        other = await proxy.ask(PATH, prompt="one alone", headers={"X-Priority": "premium"})
        assert other.status_code == 200
        assert not asked.done(), "it waited for all prompts"
        reply = await asked
        if stream:
            assert streamed_texts(reply) == expected
            assert reply.body.count(b"data: [DONE]\n\n") == 1
            assert reply.body.endswith(b"data: [DONE]\n\n")
            (usage,) = (value["usage"] for value in reply.values if value.get("usage"))
            assert reply.values[-1]["choices"] == []
            without = await proxy.stream(PATH, prompt=WORDS)
            assert [value for value in without.values if value.get("usage")] == []
        else:
            answer = json.loads(reply.body)
            assert texts_of(answer) == expected
            assert list(texts_of(answer)) == list(range(len(WORDS)))
            usage = answer["usage"]
        singles, done = proxy.finished[: len(WORDS)], proxy.finished[len(WORDS) + 1]
        assert (done.status, done.attempts) == (200, 1)
        assert done.completion_tokens == sum(each.completion_tokens for each in singles)
        assert done.prompt_tokens == sum(each.prompt_tokens for each in singles)
        assert usage["total_tokens"] == done.completion_tokens + done.prompt_tokens


@in_virtual_time
async def test_a_full_wait_queue_rejects_all_prompts_or_none(tmp_path: Path) -> None:
    one = EmulatedNode(slots=1, decode_tps=50.0)
    async with proxy_over(tmp_path, one, queue={"max": 1}) as proxy:
        begun = asyncio.create_task(proxy.ask(PATH, prompt=WORDS))
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 1)
        refused = await proxy.ask(PATH, prompt=WORDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert (await begun).status_code == 200


@in_virtual_time
async def test_a_request_that_has_begun_is_not_shed(tmp_path: Path) -> None:
    many, few = new_key("many"), new_key("few")
    keys = [{"id": key.id, "sha256": key.sha256} for key in (many, few)]
    one = EmulatedNode(slots=4, decode_tps=20.0)
    async with proxy_over(tmp_path, one, queue={"max": 4}, keys=keys) as proxy:
        scheduler = proxy.app.scheduler
        bearer = {"authorization": f"Bearer {many.text}"}
        ask = [
            asyncio.create_task(proxy.ask(PATH, prompt=WORDS[:2] * 4, headers=bearer))
            for _ in range(4)
        ]
        running = proxy.app.registry
        await until(lambda: sum(1 for one in running if one.attempt is not None) == 4)
        await until(lambda: all(one.request.caller.admitted for one in scheduler.waiters))
        await until(lambda: len(scheduler.queue_positions()) == 4)
        other = await proxy.ask(PATH, prompt="one", headers={"authorization": f"Bearer {few.text}"})
        assert (other.status_code, other.json()["error"]["code"]) == (429, "queue_full")
        assert [(await each).status_code for each in ask] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_prompt_that_fails_ends_all(tmp_path: Path, stream: bool) -> None:
    one = EmulatedNode(slots=2, decode_tps=20.0, context=200)
    async with proxy_over(tmp_path, one) as proxy:
        prompts = [*WORDS[:3], "far too long " * 300, *WORDS[3:]]
        reply = await proxy.stream(PATH, prompt=prompts, stream=stream)
        assert reply.status == (200 if stream else 400)
        (error,) = reply.errors if stream else [json.loads(reply.body)["error"]]
        assert b"[DONE]" not in reply.body
        assert error["code"] == "context_length_exceeded"
        assert "prompt is too long" in error["message"]
        assert "prompt 4 of 10" in error["message"]
        assert error["param"] == "prompt"
        await proxy.settled()
        assert [record.status for record in proxy.finished] == [400]
        assert one.requests < len(prompts)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_client_that_disconnects_ends_all(tmp_path: Path, stream: bool) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(slots=2, decode_tps=20.0)) as proxy:
        asked = asyncio.create_task(proxy.ask(PATH, prompt=WORDS, stream=stream))
        await until(lambda: one.requests == 4)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await proxy.settled()
        assert [(record.status, record.reason) for record in proxy.finished] == [
            (499, "client_closed")
        ]
        assert proxy.node("a").failures == 0
        assert one.requests == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", [False, True])
@in_virtual_time
async def test_an_operator_ends_all_by_the_id_of_the_request_or_of_one_prompt(
    tmp_path: Path, stream: bool, part: bool
) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(slots=1, decode_tps=20.0)) as proxy:
        asked = asyncio.create_task(proxy.stream(PATH, prompt=WORDS, stream=stream))
        await until(lambda: one.requests == 2)
        registry = proxy.app.registry
        assert len(registry) == 1
        whole, *parts = registry
        assert [each.request.id.startswith(whole.request.id + ".") for each in parts] == [True] * 2
        found = registry.find(parts[0].request.id if part else whole.request.x_request_id)
        assert found is not None
        found.cancel(cancelled_by_operator())
        reply = await asked
        assert b'"code":"cancelled"' in reply.body
        assert reply.status == (200 if stream else 503)
        await proxy.settled()
        assert [record.status for record in proxy.finished] == [503]


@in_virtual_time
async def test_a_stream_that_breaks_is_resumed_and_prompts_are_retried(tmp_path: Path) -> None:
    one, two = (EmulatedNode(slots=2, decode_tps=50.0) for _ in range(2))
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        expected = await asked_singly(proxy, max_tokens=20)
        one.faults.next("reset", after_events=5)
        reply = await proxy.stream(PATH, prompt=WORDS, max_tokens=20)
        assert (reply.errors, streamed_texts(reply)) == ([], expected)
        one.faults.set("status", status=500)
        plain = await proxy.ask(PATH, prompt=WORDS, max_tokens=20)
        assert texts_of(plain.json()) == expected
        assert plain.headers["x-gateway-attempts"] == "2"


@in_virtual_time
async def test_heartbeats_pass_between_the_events_and_prompts_share_one_deadline(
    tmp_path: Path,
) -> None:
    one = EmulatedNode(slots=1, prefill_tps=0.5, decode_tps=100.0)
    async with proxy_over(tmp_path, one, heartbeat=2.0) as proxy:
        reply = await proxy.stream(PATH, prompt=WORDS[:3])
        assert (reply.status, reply.errors) == (200, [])
        assert reply.body.count(b":\n") > 3
        assert reply.body.endswith(b"data: [DONE]\n\n")
        one.engine.prefill_tps = 1e6
        one.engine.decode_tps = 10.0
        late = await proxy.ask(PATH, prompt=WORDS, headers={"X-Request-Timeout": "8"})
        assert late.status_code in {503, 504}
        await proxy.settled()
        assert len(proxy.finished) == 2
        assert proxy.finished[1].duration_seconds < 10.0
