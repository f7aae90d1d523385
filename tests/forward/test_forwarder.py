"""Until its first content has been sent, a request survives any failure of a node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.admin.why import cancelled_by_operator
from gateway.api.transcript import PostToNode
from gateway.callers.keys import new_key
from gateway.config.scheduling import RetrySettings
from gateway.events import StreamResumed
from gateway.forward import resume
from gateway.forward.context import BUDGET_WINDOW, Retries, RetryBudget
from gateway.forward.resume import ResumeInput, ResumePlan, plan_resume
from gateway.nodes.node import NodeState
from gateway.request.routes import ROUTES
from gateway.schedule.lease_service import LocalLeaseService
from tests.emulator import EmulatedNode, expected_chat_text
from tests.forward.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    GENERATION_PATHS,
    MESSAGES,
    ProxyOverNodes,
    Stream,
    proxy_over,
    two_nodes,
)
from tests.gateways import until
from tests.virtual import in_virtual_time, now

AT_ONCE: dict[str, Any] = {"after_events": 0}
UNAVAILABLE = b':\n\ndata: {"error":{"code":503,"message":"x"}}\n\n'
FAULTS_BEFORE_CONTENT: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("reset", "close", "garbage", "hang", "head_bomb")),
    *((kind, AT_ONCE) for kind in ("reset", "close", "hang", "cut", "end", "error_event")),
    ("garbage_body", AT_ONCE),
    ("cut", {"after_events": 0, "reset": True}),
    ("insert", {"after_events": 0, "what": "not_json"}),
    ("insert", {"after_events": 0, "what": "huge", "size": 2 << 20}),
    ("insert", {"after_events": 0, "data": UNAVAILABLE}),
    ("slow_head", {"seconds": 0.05}),
    *(
        ("status", {"status": status, "body": '{"error":{"message":"no"}}'})
        for status in (429, 500, 502, 503, 504)
    ),
]


@pytest.mark.parametrize(("kind", "options"), FAULTS_BEFORE_CONTENT)
@in_virtual_time
async def test_another_node_answers_the_client_sees_nothing_and_the_first_is_blamed(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    impatient = {"first_byte": 0.4}
    async with two_nodes(tmp_path, answer_tokens=8, timeouts=impatient) as (proxy, one, _):
        one.faults.set(kind, **options)
        reply = await proxy.stream()
        assert (reply.status, reply.errors) == (200, [])
        assert reply.text == expected_chat_text(MESSAGES, 8)
        assert reply.events[-1] == b"data: [DONE]\n\n"
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["x-gateway-node"] == "b"
        assert [node for node, _ in proxy.outcomes] == ["a", "b"]
        failures = 0 if options.get("status") == 429 else 1
        assert (proxy.node("a").failures, proxy.node("b").failures) == (failures, 0)
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (failures, set())


@in_virtual_time
async def test_a_refused_connection_takes_the_node_down_at_once(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, health={"interval": 60.0}) as (proxy, one, _):
        await one.kill()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert proxy.outcomes[0] == ("a", "connect_failed")
        assert proxy.node("a").state is NodeState.DOWN
        assert (await proxy.ask()).headers["x-gateway-attempts"] == "1"


@in_virtual_time
async def test_attempts_are_limited_and_an_outage_is_not_multiplied(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    retries = {"budget": 0.1, "budget_min": 5}
    async with proxy_over(tmp_path, *servers, retries=retries, health={"failures": 999}) as proxy:
        for server in servers:
            server.faults.set("garbage")
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (502, "node_failed")
        assert reply.headers["x-gateway-attempts"] == "3"
        assert reply.headers["x-should-retry"] == "false"
        assert len({node for node, _ in proxy.outcomes}) == 3
        for number in range(11):
            other = [{"role": "user", "content": f"{number}"}]
            assert (await proxy.ask(messages=other)).status_code == 502
        assert len(proxy.attempts) == 12 + 5


@in_virtual_time
async def test_an_attempt_that_reached_no_node_costs_no_budget(tmp_path: Path) -> None:
    one = EmulatedNode(slots=8, answer_tokens=4)
    retries = {"budget": 0.0, "budget_min": 0}
    async with proxy_over(tmp_path, one, retries=retries, health={"interval": 3600}) as proxy:
        context = proxy.app.proxy_context
        while context.retry_budget.spend(context.clock(), 0.0, 100):
            pass
        await one.kill()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(6)]
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 6)
        await one.revive(loading=True)
        await proxy.app.fleet.probe("a")
        assert proxy.node("a").state is NodeState.LOADING
        one.loading = False
        await proxy.app.fleet.probe("a")
        assert [(await reply).status_code for reply in asked] == [200] * 6


@in_virtual_time
async def test_a_request_that_waits_in_vain_for_a_node_ends_with_no_node(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(), retries={"wait_for_node": 0.3}) as proxy:
        await one.kill()
        began = now()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert int(reply.headers["retry-after"]) >= 1
        assert 0.3 <= now() - began < 1.0
        await one.revive()
        await until(lambda: proxy.node("a").state is NodeState.READY)


# Callers whose nodes are those with certain labels: no attempt ever goes to another node.


LEFT, RIGHT, LOST = new_key("left"), new_key("right"), new_key("lost")
AS_LEFT = {"authorization": f"Bearer {LEFT.text}"}
AS_RIGHT = {"authorization": f"Bearer {RIGHT.text}"}
AS_LOST = {"authorization": f"Bearer {LOST.text}"}
PATHS = [route.path for route in ROUTES.values() if route.endpoint in {"chat", "infill"}]


@asynccontextmanager
async def two_pools(
    folder: Path, count: int, **settings: Any
) -> AsyncIterator[tuple[ProxyOverNodes, list[EmulatedNode]]]:
    """Nodes a, b, c and so on, of the left and of the right pool in turn."""
    nodes = [EmulatedNode(slots=2, infill=True, decode_tps=200.0) for _ in range(count)]
    labels = tuple({"labels": {"side": ("left", "right")[i % 2]}} for i in range(count))
    keys = [
        {"id": key.id, "sha256": key.sha256, "cache": {"nodes": {"side": key.id}}}
        for key in (LEFT, RIGHT, LOST)
    ]
    chosen = {"keys": keys, "heartbeat": "off", **settings}
    async with proxy_over(folder, *nodes, nodes=labels, **chosen) as proxy:
        yield proxy, nodes


def bodies(path: str) -> dict[str, Any]:
    prompt = {"input_prefix": "say", "input_suffix": "", "content": "say", "tokens": [1]}
    if "responses" not in path:
        prompt["prompt"] = "say something"
    return {**BODIES["/v1/messages"], **prompt, "input": "say"}


@in_virtual_time
async def test_every_path_keeps_to_the_callers_pool(tmp_path: Path) -> None:
    async with two_pools(tmp_path, 4) as (proxy, _):
        for path in PATHS:
            for headers, own in ((AS_LEFT, {"a", "c"}), (AS_RIGHT, {"b", "d"})):
                for _ in range(4):
                    post = proxy.running.client.post
                    reply = await post(path, json=bodies(path), headers=headers)
                    if path != "/v1/responses/input_tokens":  # no llama.cpp server has it
                        assert reply.status_code == 200, (path, reply.text)
                assert {attempt.node for attempt in proxy.attempts} <= own, path
                proxy.attempts.clear()


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_retry_and_a_resumed_stream_stay_in_the_pool(tmp_path: Path, path: str) -> None:
    async with two_pools(tmp_path, 6) as (proxy, nodes):
        for fault in ({"kind": "status", "status": 503}, {"kind": "reset", "after_events": 8}):
            for node in nodes:
                node.faults.next(**fault)  # type: ignore[arg-type]
            asked = {"temperature": 0, "max_tokens": 40, "n_predict": 40}
            reply = await proxy.stream(path, headers=AS_RIGHT, **asked)
            assert reply.status in {200, 502}
            for node in nodes:
                node.faults.clear()
        if ROUTES[path].api.transcript_reader is not None:
            assert len(proxy.attempts) > 3
        assert {attempt.node for attempt in proxy.attempts} <= {"b", "d", "f"}


@in_virtual_time
async def test_without_a_node_of_the_pool_it_is_as_without_a_node(tmp_path: Path) -> None:
    async with two_pools(tmp_path, 2, listen={"expose_node": False}) as (proxy, _):
        for path in GENERATION_PATHS:
            reply = await proxy.ask(path, headers=AS_LOST, model="demo")
            assert reply.status_code == 404
        error = (await proxy.ask(headers=AS_LOST, model="demo")).json()["error"]
        assert error["code"] == "model_not_found"
        assert error["message"] == "The model 'demo' does not exist here."
        assert proxy.attempts == []
        get = proxy.running.client.get
        assert (await get("/v1/models", headers=AS_LOST)).json()["data"] == []
        assert (await get("/v1/models/demo", headers=AS_LOST)).status_code == 404
        assert len((await get("/v1/models", headers=AS_LEFT)).json()["data"]) == 1
        assert (await get("/props", headers=AS_LEFT)).json()["total_slots"] == 2
    assert "side=lost" in (tmp_path / "gateway.log").read_text()


# How often a failed request is tried again.


def spent(budget: RetryBudget, now: float, share: float, least: int) -> int:
    count = 0
    while count < 10_000 and budget.spend(now, share, least):
        count += 1
    return count


def test_what_is_left_is_a_share_of_what_came_lately_and_never_negative() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.count_request(0.0)
    assert spent(budget, 0.0, 0.2, 10) == 200
    assert budget.remaining(1.0, 0.1, 10) == 0, "the settings may have changed"
    assert budget.remaining(1.0, 0.5, 10) == 300
    later = 2 * BUDGET_WINDOW
    assert budget.remaining(later, 0.2, 10) == 10
    budget.count_request(later)
    assert spent(budget, later, 0.2, 10) == 10


NO_PAUSE = RetrySettings(backoff=0.0, backoff_max=0.0)


async def test_a_lack_of_budget_is_told_from_the_most_attempts() -> None:
    for most, spend in ((3, lambda: False), (1, lambda: True)):
        retries = Retries(NO_PAUSE, most, spend)
        assert not await retries.granted()
        assert retries.out_of_budget is (most > 1)


@in_virtual_time
async def test_pauses_double_up_to_the_longest() -> None:
    retries, pauses = Retries(RetrySettings(backoff=1.0, backoff_max=3.0), 200, lambda: True), []
    for _ in range(199):
        began = now()
        assert await retries.granted()
        pauses.append(now() - began)
    assert pauses[0] <= 1.0
    assert pauses[1] <= 2.0
    assert 2.0 < max(pauses) <= 3.0


# A request is not sent under a lease that may be void by then: it asks for another one.


def void_leases(proxy: ProxyOverNodes, *may_start: bool) -> list[int]:
    """Have these answers given to who is about to send a request, then yes; returns who asks."""
    asked: list[int] = []
    answers = list(may_start)

    def answer(lease_id: int) -> bool:
        asked.append(lease_id)
        return answers.pop(0) if answers else True

    cast("LocalLeaseService", proxy.app.proxy_context.leases).start_while(answer)
    return asked


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_it_goes_under_the_next_lease_and_no_attempt_is_counted(
    tmp_path: Path, stream: bool
) -> None:
    node = EmulatedNode(answer_tokens=5)
    async with proxy_over(tmp_path, node, retries={"attempts": 1}) as proxy:
        asked = void_leases(proxy, False, False)
        answer = await (proxy.stream() if stream else proxy.ask())
        assert answer.headers["x-gateway-attempts"] == "1"
        assert len(set(asked)) == 3
        assert node.requests == 1
        await proxy.settled()
        assert proxy.outcomes == [("a", "ok")]
        (record,) = proxy.finished
        assert (record.status, record.attempts, record.completion_tokens) == (200, 1, 5)
        assert proxy.node("a").failures == 0
        assert proxy.app.scheduler.records == {}


def test_a_stream_is_resumed_under_the_next_lease_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = 0

    async def plan(post: PostToNode, source: ResumeInput) -> ResumePlan:
        nonlocal plans
        plans += 1
        return await plan_resume(post, source)

    monkeypatch.setattr(resume, "plan_resume", plan)

    @in_virtual_time
    async def run() -> None:
        one, two = EmulatedNode(answer_tokens=40), EmulatedNode(answer_tokens=40)
        async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
            events: list[StreamResumed] = []
            proxy.app.bus.subscribe(StreamResumed, events.append)
            whole = await proxy.stream(temperature=0, max_tokens=40)
            asked = void_leases(proxy, True, False, False, True)
            one.faults.next("close", after_events=10)
            reply = await proxy.stream(temperature=0, max_tokens=40)
            assert reply.text == whole.text
            assert len(set(asked)) == 4
            assert [event.resumed_on for event in events] == ["b"]
            assert plans == 1
            await proxy.settled()
            assert [record.attempts for record in proxy.finished] == [1, 2]
            assert proxy.outcomes[1:] == [("a", "reset"), ("b", "ok")]
            assert proxy.node("b").failures == 0

    run()


# Several prompts in one request: each takes slots as they come free; there is one response.


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
