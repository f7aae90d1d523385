from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from gateway.terms import Priority
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


async def chat(running: Running, **body: Any) -> tuple[httpx.Response, list[tuple[str, Any]]]:
    response = await running.admin.post("/admin/chat", json={**HELLO, **body})
    return response, events_of(response.text)


def events_of(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in lines:
            data = lines["data"]
            events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


async def test_a_chat_is_streamed_with_its_figures_and_is_a_caller_of_its_own(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path, [EmulatedNode(answer_tokens=5)]) as run:
        response, events = await chat(run)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert events[0][0] == "node"
        assert ("", "[DONE]") in events
        name, done = events[-1]
        assert (name, done["node"], done["status"]) == ("done", "node-0", 200)
        assert done["completion_tokens"] >= 5
        assert done["prompt_tokens"] > 0
        assert done["ttft"] is not None
        assert len(run.gateway.registry) == 0
        await recorded(run, 1)
        usage = await run.admin.get("/admin/usage?by=key")
        assert "playground:local" in usage.text
        await run.gateway.audit.flush()
        audit = await run.admin.get("/admin/audit?action=chat")
        assert [entry["outcome"] for entry in audit.json()["entries"]] == ["done"]
        assert "Hello" not in audit.text


async def test_one_that_waits_is_told_its_place(tmp_path: Path) -> None:
    async with running_gateway(
        tmp_path, [EmulatedNode(slots=1, decode_tps=20.0, answer_tokens=400)]
    ) as run:
        body = {**HELLO, "stream": True}
        async with run.client.stream("POST", "/v1/chat/completions", json=body) as busy:
            answer = busy.aiter_bytes()
            await anext(answer)
            asked = asyncio.create_task(chat(run, max_tokens=3))
            await until(lambda: run.gateway.scheduler.depths()[Priority.NORMAL] == 1)
            await asyncio.sleep(1.2)  # The first event that tells of the wait.
        _, events = await asked
        assert events[0][0] == "waiting"
        assert events[0][1]["position"] == 1
        assert events[-1][1]["queue_seconds"] > 1.0


async def test_what_can_not_be_served_gets_its_error(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as run:
        for body, status, code in (
            ({"messages": "words"}, 400, "invalid_request"),
            ({"model": "unknown"}, 404, "model_not_found"),
        ):
            response, _ = await chat(run, **body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        for content in (b"", b"{", b"[1]", b'"x"', b"\xff\xfe"):
            response = await run.admin.post("/admin/chat", content=content)
            assert response.status_code == 400, content
        large = await run.admin.post("/admin/chat", content=b"x" * 300_000)
        assert large.status_code == 413
        assert len(run.gateway.registry) == 0


async def test_a_page_that_leaves_frees_the_slot(tmp_path: Path) -> None:
    async with running_gateway(
        tmp_path, [EmulatedNode(slots=1, decode_tps=20.0, answer_tokens=4000)]
    ) as run:
        async with run.admin.stream("POST", "/admin/chat", json=HELLO) as response:
            parts = response.aiter_bytes()
            await anext(parts)
            assert len(run.gateway.registry) == 1
        await until(lambda: len(run.gateway.registry) == 0)
        await until(lambda: not run.gateway.fleet.nodes["node-0"].leases)
        recent = run.gateway.live.view.history.recent()
        assert recent.failed == 0


async def test_a_node_that_dies_before_it_answers_is_an_honest_error(tmp_path: Path) -> None:
    settings = {"retries": {"attempts": 1, "wait_for_node": 0.2}}
    async with running_gateway(tmp_path, [node := EmulatedNode()], settings) as run:
        node.faults.set(kind="reset")
        response, events = await chat(run)
        if response.status_code == 200:
            assert any("error" in value for _, value in events if isinstance(value, dict))
            assert events[-1][1]["status"] >= 500
        else:
            assert response.status_code in {502, 503}
        assert len(run.gateway.registry) == 0
