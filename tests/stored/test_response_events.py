"""A second run takes the place of the first only as long as it repeats it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.api import sse
from gateway.api.resuming import named_event
from gateway.app.assembly import Gateway
from gateway.stored.response_events import (
    NotRepeated,
    Repetition,
    ResponseEvents,
)
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, proxy_over
from tests.gateways import running_gateway, until
from tests.servers import start_demo_servers
from tests.stored.batch_gateway import key
from tests.stored.responses_over_nodes import (
    begin,
    check_whole,
    finish,
    logged,
    now,
    open_logs,
    run,
    text_of,
)


def a_run(*deltas: str) -> list[dict[str, Any]]:
    """Events of an item with this text."""
    values = [{"type": "response.output_text.delta", "delta": delta} for delta in deltas]
    text = "".join(deltas)
    added = {"type": "response.output_item.added", "item": {"id": "i"}}
    return [added, *values, {"type": "response.output_item.done", "item": {"text": text}}]


def test_the_same_text_passes_however_it_is_cut_and_no_other() -> None:
    for seen in range(1, 5):
        repetition = Repetition(a_run("one ", "te", "xt")[:seen])
        parts = [repetition.new_part(value) for value in a_run("on", "e t", "ext")]
        assert repetition.done
        said = "".join(part.get("delta", "") for part in parts if part is not None)
        assert said == "one text".removeprefix("".join(("one ", "te", "xt")[: seen - 1]))
    for seen, other in ((2, "other text"), (9, "one"), (9, "one text more")):
        repetition = Repetition(a_run("one ", "te", "xt")[:seen])
        with pytest.raises(NotRepeated):
            list(map(repetition.new_part, a_run(other)))


_RESPONSE = {"id": "resp_n", "object": "response", "status": "in_progress"}


def node_events(count: int = 5, prefix: str = "n", *, tools: bool = False) -> bytes:
    """The events of a node, as llama.cpp writes them."""
    message = {"id": f"msg_{prefix}", "type": "message", "role": "assistant", "content": []}
    words = [f"w{number} " for number in range(count)]
    part = {"type": "output_text", "text": "".join(words), "annotations": [], "logprobs": []}
    done = message | {"content": [part], "status": "completed"}
    values: list[dict[str, Any]] = [
        {"type": "response.created", "response": _RESPONSE},
        {"type": "response.in_progress", "response": _RESPONSE},
        {"type": "response.output_item.added", "item": message | {"status": "in_progress"}},
        {"type": "response.content_part.added", "item_id": f"msg_{prefix}",
         "part": {"type": "output_text", "text": ""}},
    ]  # fmt: skip
    kind = "response.output_text.delta"
    values += [{"type": kind, "item_id": f"msg_{prefix}", "delta": word} for word in words]
    output: list[dict[str, Any]] = [done]
    values += [
        {"type": "response.output_text.done", "item_id": f"msg_{prefix}", "text": part["text"]},
        {"type": "response.content_part.done", "item_id": f"msg_{prefix}", "part": part},
        {"type": "response.output_item.done", "item": done},
    ]
    if tools:
        call: dict[str, Any] = {"id": f"fc_{prefix}", "type": "function_call", "name": "f"}
        call |= {"call_id": f"call_{prefix}", "arguments": "{}"}
        output.append(call)
        values += [
            {"type": "response.output_item.added", "item": call | {"arguments": ""}},
            {"type": "response.function_call_arguments.delta", "item_id": f"fc_{prefix}",
             "delta": "{}"},
            {"type": "response.output_item.done", "item": call},
        ]  # fmt: skip
    usage = {"input_tokens": 3, "output_tokens": count, "total_tokens": count + 3}
    end = {**_RESPONSE, "status": "completed", "output": output, "usage": usage, "model": "m"}
    values.append({"type": "response.completed", "response": end})
    return b"".join(map(named_event, values))


async def test_events_get_our_numbers_and_ids(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        await events.write(node_events(tools=True))
        await events.close()
        values = await logged(logs, events.name)
        response: dict[str, Any] = values[-1]["response"]
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
        assert values[-1]["type"] == "response.completed"
        assert response["usage"]["output_tokens"] == 5
        kinds = [value["type"].removeprefix("response.") for value in values[:4]]
        assert kinds == ["created", "queued", "in_progress", "output_item.added"]
        assert [values[n]["response"]["status"] for n in range(3)] == [
            "queued", "queued", "in_progress",
        ]  # fmt: skip
        call = response["output"][1]
        assert call["id"] == "fc_00000000000aff0001"
        assert call["call_id"] == "call_00000000000aff0001"
        assert b"msg_n" not in json.dumps(values).encode()


@pytest.mark.parametrize("seed", range(20))
async def test_any_cut_of_the_bytes_gives_the_same_log(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole = node_events(30, tools=seed % 2 == 0)
    pieces = list(sse.split(whole))
    async with open_logs(tmp_path) as logs:
        found = []
        for cuts in (0, rng.randrange(1, len(pieces))):
            events = await begin(logs)
            at = sorted(rng.sample(range(1, len(pieces)), cuts))
            for start, end in zip([0, *at], [*at, len(pieces)], strict=True):
                await events.write(b"".join(pieces[start:end]))
                if rng.random() < 0.1:
                    await events._log.flush()
            await events.close()
            found.append(logs.folder.path(events.name).read_bytes())
        assert found[0] == found[1]


async def test_a_cancelled_response_ends_as_failed_with_what_it_has(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        await events.write(b"".join(list(sse.split(node_events()))[:7]))
        await events.cancel()
        values = await logged(logs, events.name)
        response = check_whole(values, "response.failed")
        assert (response["status"], response["error"]) == ("cancelled", None)
        assert response["output"][0]["content"][0]["text"] == text_of(values) == "w0 w1 w2 "
        assert await events.response() == response
        await events.close()


async def test_of_two_that_end_a_response_that_never_ran_one_is_first(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        first = await begin(logs)
        name = first.name
        assert ((await first.response())["status"], (await first.response())["output"]) == (
            "queued", [],
        )  # fmt: skip
        await first.close()
        both = [await ResponseEvents.reopen(logs, name, now) for _ in range(2)]
        assert [events.begun for events in both] == [None, None]
        ends = [events.fail("server_error", "an end") for events in both]
        await asyncio.gather(*ends)
        for events in both:
            await events.close()
        kinds = [value["type"] for value in await logged(logs, name)]
        assert kinds == ["response.created", "response.queued", "response.failed"]


async def test_an_error_event_becomes_a_failed_response(tmp_path: Path) -> None:
    async with (
        proxy_over(tmp_path, node := EmulatedNode(), keys=[key()]) as proxy,
        open_logs(tmp_path) as logs,
    ):
        events = await begin(logs, tools=[{"type": "function", "name": "f"}])
        node.faults.next("reset", after_events=8)
        outcome = await run(proxy.app, events, tools=[{"type": "function", "name": "f"}])
        assert outcome.failed_on_nodes
        assert not events.ended
        await finish(events, outcome)
        await events.close()
        values = await logged(logs, events.name)
        response = check_whole(values, "response.failed")
        assert (response["status"], response["error"]["code"]) == ("failed", "node_failed")
        assert all("error" not in value for value in values)


@pytest.mark.parametrize("cut", [1, 4, 9, 25])
async def test_a_lost_run_goes_on_where_it_was(tmp_path: Path, cut: int) -> None:
    """The process is gone after `cut` tokens: the next goes on from what was written."""
    nodes = (EmulatedNode(), EmulatedNode())
    async with (
        proxy_over(tmp_path, *nodes, keys=[key()], nodes=A_FIRST) as proxy,
        open_logs(tmp_path) as logs,
    ):
        whole = await begin(logs)
        outcome = await run(proxy.app, whole)
        await whole.close()
        expected = text_of(await logged(logs, whole.name))
        events = await begin(logs)
        await cut_run(proxy.app, events, cut)
        events = await ResponseEvents.reopen(logs, events.name, now)
        assert events.begun is not None
        again = await run(proxy.app, events)
        await finish(events, again)
        await events.close()
        values = await logged(logs, events.name)
        response = check_whole(values, "response.completed")
        assert text_of(values) == expected
        first = (await logged(logs, whole.name))[-1]["response"]
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            assert response["usage"][name] == first["usage"][name]
        assert response["model"] == first["model"] == "demo"
        assert again.usage is not None
        assert outcome.record.completion_tokens == again.record.completion_tokens
        assert outcome.record.prompt_tokens == again.record.prompt_tokens


async def cut_run(app: Gateway, events: ResponseEvents, tokens: int, **body: Any) -> None:
    """Run it, and end the run after so many tokens as the end of the process does."""
    stopped = asyncio.Event()
    written = events.write

    async def write(events: bytes) -> None:
        for event in sse.split(events):
            if stopped.is_set():
                return
            await written(event)
            count = sum(b".delta\n" in one for one in seen) + (b".delta\n" in event)
            seen.append(event)
            if count >= tokens:
                stopped.set()

    seen: list[bytes] = []
    events.write = write  # type: ignore[method-assign]
    running = asyncio.create_task(run(app, events, **body))
    await until(stopped.is_set)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await events.close()


TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


async def test_what_no_node_can_continue_is_run_anew_and_must_be_the_same(tmp_path: Path) -> None:
    async with (
        proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy,
        open_logs(tmp_path) as logs,
    ):
        whole = await begin(logs)
        await run(proxy.app, whole, tools=TOOLS)
        await whole.close()
        events = await begin(logs)
        await cut_run(proxy.app, events, 7, tools=TOOLS)
        events = await ResponseEvents.reopen(logs, events.name, now)
        await finish(events, await run(proxy.app, events, tools=TOOLS))
        await events.close()
        values = await logged(logs, events.name)
        check_whole(values, "response.completed")
        assert text_of(values) == text_of(await logged(logs, whole.name))


async def test_what_may_come_out_otherwise_fails(tmp_path: Path) -> None:
    async with (
        proxy_over(tmp_path, EmulatedNode(), keys=[key()]) as proxy,
        open_logs(tmp_path) as logs,
    ):
        events = await begin(logs)
        await cut_run(proxy.app, events, 7, tools=TOOLS, temperature=1)
        events = await ResponseEvents.reopen(logs, events.name, now)
        outcome = await run(proxy.app, events, tools=TOOLS, temperature=1)
        assert outcome.error_code == "response_interrupted"
        await finish(events, outcome)
        await events.close()
        values = await logged(logs, events.name)
        response = check_whole(values, "response.failed")
        assert response["error"]["code"] == "response_interrupted"
        assert response["output"][0]["content"][0]["text"] == text_of(values) != ""


STORY = {
    "input": [{"role": "user", "content": "tell me a story"}], "instructions": "be long",
    "max_output_tokens": 300, "temperature": 0, "seed": 7, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(600)
async def test_a_real_response_goes_on_from_its_log(tmp_path: Path) -> None:
    settings = {"health": {"interval": 0.5}}
    async with (
        start_demo_servers(2, slots=1, context=4096, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
        open_logs(tmp_path) as logs,
    ):
        app = running.gateway
        whole = await begin(logs, **STORY)
        first = await run(app, whole, owner="anonymous:127.0.0.1", **STORY)
        await whole.close()
        expected = await logged(logs, whole.name)
        check_whole(expected, "response.incomplete")
        for cut in (1, 2, 7, 30, 101, 222, 299):
            events = await begin(logs, **STORY)
            await cut_run(app, events, cut, owner="anonymous:127.0.0.1", **STORY)
            events = await ResponseEvents.reopen(logs, events.name, now)
            assert events.begun is not None
            again = await run(app, events, owner="anonymous:127.0.0.1", **STORY)
            await finish(events, again)
            await events.close()
            values = await logged(logs, events.name)
            response = check_whole(values, "response.incomplete")
            assert text_of(values) == text_of(expected), f"cut after {cut} tokens"
            usage = expected[-1]["response"]["usage"]
            assert response["usage"]["input_tokens"] == usage["input_tokens"]
            assert response["usage"]["output_tokens"] == usage["output_tokens"] == 300
            assert again.record.completion_tokens == first.record.completion_tokens == 300
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
