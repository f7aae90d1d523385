"""Requests of tenants, of editors, of conversations, and for models of nodes that are down."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api import sse
from gateway.callers.keys import ApiKey, new_key
from gateway.config.settings import Settings
from gateway.nodes.node import NodeState
from gateway.request.routes import routes_of
from gateway.terms import Priority
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.forward.proxy_over_nodes import (
    GENERATION_PATHS,
    ProxyOverNodes,
    prompt_field,
    proxy_over,
)
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.transport.raw import Peer, raw_server
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import CHAT
from tests.web.raw_client import Answer, public, request

BOB = new_key("bob")
KEY = {"authorization": f"Bearer {BOB.text}"}
LONG = "What nobody else may know, " * 150
CACHING: dict[str, Any] = {"slots": 4, "prefill_tps": 500.0, "decode_tps": 100.0}
CACHING |= {"cache_ram": 1 << 20}


def tenant(
    folder: Path, *nodes: EmulatedNode, cache: dict[str, Any]
) -> AbstractAsyncContextManager[ProxyOverNodes]:
    """A gateway with one key, whose cache is kept like this."""
    alike = ({"speed_hint": 1.0},) * len(nodes)  # There is nothing to explore.
    keys = [{"id": BOB.id, "sha256": BOB.sha256, "group": "other"}]
    return proxy_over(folder, *nodes, nodes=alike, keys=keys, cache=cache)


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_resumed_stream_hides_what_was_cached(tmp_path: Path, path: str) -> None:
    nodes = [EmulatedNode(**CACHING) for _ in range(3)]
    async with tenant(tmp_path, *nodes, cache={"hide": True}) as proxy:
        asked = {**prompt_field(path, LONG), "temperature": 0, "max_tokens": 30, "n_predict": 30}
        asked |= {"timings_per_token": True, "return_progress": True}
        if path in {"/v1/chat/completions", "/v1/completions"}:
            asked["stream_options"] = {"include_usage": True}
        whole = await proxy.stream(path, headers=KEY, **asked)
        for node in nodes:
            node.faults.next("reset", after_events=8)
        reply = await proxy.stream(path, headers=KEY | {"x-gateway-progress": "1"}, **asked)
        await proxy.settled()
        assert path == "/v1/responses" or proxy.finished[-1].attempts > 1
        assert proxy.finished[0].prompt_tokens > 500
        for found in (whole, reply):
            for word in (b"cache_n", b"prompt_n", b"prompt_progress", b"id_slot", b"processed="):
                assert word not in found.body
            for value in found.values:
                text = json.dumps(value)
                assert '"cached_tokens": 0' in text or '"cached_tokens"' not in text
                assert '"cache_read_input_tokens": 0' in text or "cache_read" not in text


@in_virtual_time
async def test_without_a_prompt_cache_no_prompt_draws_a_request(tmp_path: Path) -> None:
    nodes = [EmulatedNode(**CACHING) for _ in range(3)]
    async with tenant(tmp_path, *nodes, cache={"prompt_cache": False}) as proxy:
        for path in GENERATION_PATHS:
            for node in nodes:
                node.faults.next("reset", after_events=5)
            body = {**prompt_field(path, LONG), "max_tokens": 20, "n_predict": 20}
            reply = await proxy.stream(path, headers=KEY, cache_prompt=True, **body)
            assert reply.status == 200
        await proxy.settled()
        generating = {"/completion", "/v1/chat/completions", "/v1/completions", "/v1/responses"}
        seen = [request for node in nodes for request in node.seen if request.path in generating]
        assert {request.path for request in seen} == generating
        assert all(json.loads(request.body)["cache_prompt"] is False for request in seen)
        assert not any(request.path == "/v1/messages" for node in nodes for request in node.seen)
        for node in nodes:
            node.faults.clear()
        homes = []
        for number in range(16):  # each prompt twice
            messages = [{"role": "system", "content": f"{number // 2}: {LONG}"}]
            await proxy.ask(headers=KEY, messages=messages, max_tokens=4)
            homes.append(proxy.attempts[-1].node)
        assert homes[::2] != homes[1::2]


INFILL: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "):", "n_predict": 200}
MIDDLE: dict[str, Any] = {"prompt": "def f(", "suffix": "):", "max_tokens": 200}
QUICK = {"health": {"interval": 0.2}, "heartbeat": "off"}


def slow(slots: int = 2) -> EmulatedNode:
    return EmulatedNode(slots=slots, decode_tps=20.0, infill=True)


def asks(path: str, body: Mapping[str, Any], session: str, *, stream: bool = True) -> bytes:
    return request({**body, "stream": stream}, f"X-Session-Id: {session}", path=path)


def superseded(found: Answer) -> None:
    assert (found.status, found.code) == (409, "superseded")
    assert found.headers["x-should-retry"] == "false"


async def begun(wire: RawConnection) -> None:
    assert b" 200 " in await wire.head()
    await wire.until(b"data: ")


@pytest.mark.parametrize(
    ("path", "body"), [("/infill", INFILL), ("/v1/completions", MIDDLE), ("/completions", MIDDLE)]
)
@in_virtual_time
async def test_a_stream_is_superseded_with_an_error_event(
    tmp_path: Path, path: str, body: Mapping[str, Any]
) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        async with raw_connection(gate.url) as first, raw_connection(gate.url) as second:
            await first.send(asks(path, body, "editor"))
            await begun(first)
            await second.send(asks(path, body, "editor"))
            await begun(second)
            end = await first.until(b"0\r\n\r\n")
            event = json.loads(end.rsplit(b"data: ", 1)[1].split(b"\n")[0])
            assert event["error"]["code"] == "superseded"
            assert b"[DONE]" not in end
            node = gate.running.gateway.fleet.nodes["node-0"]
            await until(lambda: node.leased == gate.node.busy == 1, 5.0)
        await until(lambda: len(gate.records()) == 2)
        assert {record.reason for record in gate.ended} == {"superseded", "client_closed"}
        assert gate.running.gateway.fleet.nodes["node-0"].failures == 0
        assert len(gate.running.gateway.handler.latest_edits) == 0


@in_virtual_time
async def test_a_superseded_queued_request_takes_no_slot(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow(slots=1)) as gate:
        async with raw_connection(gate.url) as running, raw_connection(gate.url) as last:
            await running.send(asks("/infill", INFILL, "another"))
            await begun(running)
            waiting = asyncio.create_task(gate.ask(asks("/infill", INFILL, "editor")))
            await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 1)
            await last.send(asks("/infill", INFILL, "editor"))
            superseded(await waiting)
            assert len(gate.running.gateway.scheduler.queue_positions()) == 1
        assert gate.node.requests == 1


@pytest.mark.parametrize(
    ("latest_wins", "statuses"), [(True, [409, 409, 200]), (False, [200, 200, 200])]
)
@in_virtual_time
async def test_a_superseded_plain_request_gets_a_status_unless_off(
    tmp_path: Path, latest_wins: bool, statuses: list[int]
) -> None:
    settings = {**QUICK, "queue": {"latest_wins": latest_wins}}
    async with public(tmp_path, settings, slow()) as gate:
        asked = []
        for number in range(3):
            data = asks("/infill", {**INFILL, "n_predict": 20}, "editor", stream=False)
            asked.append(asyncio.create_task(gate.ask(data)))
            await until(lambda n=number: gate.node.requests > min(n, 1))
        found = await asyncio.gather(*asked)
        assert [one.status for one in found] == statuses
        for one in found:
            if one.status == 409:
                superseded(one)


@in_virtual_time
async def test_other_sessions_and_paths_supersede_nothing(tmp_path: Path) -> None:
    async with public(tmp_path, QUICK, slow()) as gate:
        for path, body, session in (
            ("/infill", INFILL, "other"),
            ("/v1/completions", {**MIDDLE, "suffix": ""}, "editor"),
            ("/v1/chat/completions", {"messages": [], "suffix": "x"}, "editor"),
        ):
            short = asks("/infill", {**INFILL, "n_predict": 10}, "editor", stream=False)
            first = asyncio.create_task(gate.ask(short))
            await until(lambda: gate.node.busy == 1)
            second = await gate.ask(asks(path, {**body, "max_tokens": 1, "n_predict": 1}, session))
            assert (second.status, (await first).status) == (200, 200)


DEAD = "http://127.0.0.1:9"
MESSAGES = [{"role": "user", "content": "Hello"}]


async def asked(running: Running, **keys: Any) -> httpx.Response:
    return await running.client.post(CHAT, json={"messages": MESSAGES, **keys})


async def down(running: Running, name: str) -> None:
    nodes = running.gateway.fleet.nodes
    await until(lambda: nodes[name].state is NodeState.DOWN)


def outcome_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.headers["x-gateway-reason"]


@in_virtual_time
async def test_an_unknown_name_is_503_until_each_node_told_its_models(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [{"name": "a", "url": DEAD}], wait_ready=False) as running:
        await down(running, "a")
        for named in ({"model": "mistral-7b"}, {}):
            answer = await asked(running, **named)
            assert outcome_of(answer) == (503, "no_node")
            assert int(answer.headers["retry-after"]) > 0
            assert f"'a' is down (no connection to {DEAD}" in answer.json()["error"]["message"]


@in_virtual_time
async def test_an_error_names_only_states_to_clients_that_see_no_nodes(tmp_path: Path) -> None:
    nodes = [{"name": "epyc-a", "url": DEAD}, {"name": "epyc-b", "url": DEAD, "model": "declared"}]
    private = {"listen": {"expose_node": False}}
    async with running_gateway(tmp_path, nodes, private, wait_ready=False) as running:
        await down(running, "epyc-a")
        message = (await asked(running, model="other")).json()["error"]["message"]
        assert "1 of 2 nodes never said what it serves (down)" in message
        assert "epyc" not in message
        assert "127.0.0.1" not in message


@in_virtual_time
async def test_a_down_node_is_known_by_its_models_after_a_restart(tmp_path: Path) -> None:
    async with EmulatedNode(model="mistral-7b") as server:
        nodes = [{"name": "a", "url": server.url}]
        async with running_gateway(tmp_path, nodes):
            pass
        await server.kill()
        async with running_gateway(tmp_path, nodes, wait_ready=False) as running:
            await down(running, "a")
            models = (await running.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["mistral-7b"]
            assert outcome_of(await asked(running, model="nobody")) == (404, "model_not_found")
            began = now()
            assert outcome_of(await asked(running, model="mistral-7b")) == (503, "no_node")
            assert 30 <= now() - began < 32
            await server.revive()
            assert (await asked(running, model="mistral-7b")).status_code == 200


# No path tells a caller what was cached of its prompt, where the settings hide it.


HIDDEN, SEEN = new_key("hidden"), new_key("seen")
OPEN = routes_of(Settings(ollama=True))
TEXT = "What is the code? " * 40
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "prompt": {"prompt": TEXT, "max_tokens": 3, "n_predict": 3},
    "input": {"input": TEXT, "max_output_tokens": 3},
    "documents": {"query": "x", "documents": [TEXT]},
    "input_prefix": {"input_prefix": TEXT, "input_suffix": "", "n_predict": 3},
    "tokens": {"tokens": [1, 2]},
}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": BODIES["messages"], "/api/generate": BODIES["prompt"],
    "/api/embed": BODIES["input"], "/api/embeddings": BODIES["prompt"],
}  # fmt: skip
FORM: dict[str, Any] = {"file": ("sound.wav", b"RIFF"), "model": (None, "demo")}

CACHED, FRESH, ALL = 91_234_567, 2_111_111, 93_345_678
"""Tokens; `ALL` are both, and tell nothing."""
MILLISECONDS = 7788.125
TELLING = ("91234567", "2111111", "7788", "tokens_cached", "cache_n", "prompt_progress", "id_slot")
"""Texts that no response to a caller from whom it is hidden may contain."""
TIMINGS: dict[str, Any] = {
    "cache_n": CACHED, "prompt_n": FRESH, "prompt_ms": MILLISECONDS, "predicted_n": 1,
    "prompt_per_token_ms": MILLISECONDS, "prompt_per_second": MILLISECONDS, "predicted_ms": 2.0,
    "predicted_per_second": 500.0,
}  # fmt: skip
OPENAI_USAGE: dict[str, Any] = {
    "prompt_tokens": ALL, "total_tokens": ALL + 1, "prompt_cache_hit_tokens": CACHED,
    "prompt_tokens_details": {"cached_tokens": CACHED}, "prompt_time": MILLISECONDS,
}  # fmt: skip
RESPONSES_USAGE = {"input_tokens": ALL, "input_tokens_details": {"cached_tokens": CACHED}}
ANTHROPIC_USAGE = {"input_tokens": FRESH, "cache_read_input_tokens": CACHED}
LATER: dict[str, Any] = {
    "timings": TIMINGS, "id_slot": 5, "tokens_cached": CACHED, "x_groq": {"usage": OPENAI_USAGE},
    "__verbose": {"timings": TIMINGS, "tokens_cached": CACHED, "id_slot": 5},
    "timings/cache_n": CACHED, "prompt_progress/processed": CACHED,
}  # fmt: skip
"""What tells it behind the prompt."""
PROGRESS = {"total": ALL, "cache": CACHED, "processed": CACHED, "time_ms": MILLISECONDS}
MORE = LATER | {"prompt_progress": PROGRESS}


def telling(value: Any, path: str, more: dict[str, Any]) -> Any:
    """The JSON of a response or an event, with all that tells what was cached."""
    if isinstance(value, list):
        return [telling(one, path, more) for one in value]
    told = {**value, **more}
    for holder in (told, told.get("message"), told.get("response")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            of_responses = RESPONSES_USAGE if path.endswith("/responses") else OPENAI_USAGE
            holder["usage"] |= ANTHROPIC_USAGE if path == "/v1/messages" else of_responses
    return told | ({"tokens_evaluated": ALL} if "tokens_evaluated" in told else {})


def telling_event(event: bytes, path: str, more: dict[str, Any]) -> bytes:
    data = sse.payload(event)
    if not data.startswith(b"{"):
        return event
    return event.replace(data, json.dumps(telling(json.loads(data), path, more)).encode())


@asynccontextmanager
async def telling_site(folder: Path) -> AsyncIterator[Running]:
    """A gateway over a node that tells in each response what was cached."""
    kinds: dict[str, Any] = dict.fromkeys(("embeddings", "rerank", "infill", "audio"), True)
    anew = httpx.Limits(max_keepalive_connections=0)  # The node closes connections behind streams.
    async with (
        EmulatedNode(**kinds) as node,
        httpx.AsyncClient(base_url=node.url, limits=anew, verify=NO_TLS) as own,
    ):

        async def serve(peer: Peer) -> None:
            while True:
                try:
                    head, _, data = (await peer.request()).partition(b"\r\n\r\n")
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                method, path = head.decode().split(" ")[:2]
                (kind,) = re.findall(rb"(?i)\r\ncontent-type: (.*)", head) or [b""]
                # The emulator knows responses by one path.
                reply = await own.request(
                    method,
                    path.replace("/v1/responses", "/responses").replace(
                        "/responses", "/v1/responses"
                    ),
                    content=data,
                    headers={"content-type": kind.strip()},
                )
                said = reply.content
                if method == "POST" and reply.headers["content-type"] == "text/event-stream":
                    first, *others = sse.split(said)
                    events = [telling_event(one, path, LATER) for one in others]
                    said = b"".join([telling_event(first, path, MORE), *events])
                elif method == "POST":
                    said = json.dumps(telling(reply.json(), path, MORE)).encode()
                await peer.say(
                    b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nContent-Length: %d\r\n"
                    b"openai-processing-ms: %d\r\nopenai-model: demo\r\n"
                    b"anthropic-ratelimit-input-tokens-remaining: %d\r\n\r\n%b"
                    % (reply.status_code, reply.headers["content-type"].encode(), len(said),
                       MILLISECONDS, FRESH, said)
                )  # fmt: skip

        async with raw_server(serve) as server:
            keys = [
                {"id": HIDDEN.id, "sha256": HIDDEN.sha256, "group": "tenants"},
                {
                    "id": SEEN.id,
                    "sha256": SEEN.sha256,
                    "cache": {"hide": False},
                    "group": "tenants",
                },
            ]
            groups = {"tenants": {"cache": {"hide": True}}}
            settings = {"keys": keys, "groups": groups, "ollama": True, "heartbeat": 0.01}
            endpoints = ["chat", "embeddings", "rerank", "infill", "audio", "vision"]
            spec = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "endpoints": endpoints}
            async with running_gateway(folder, [spec], settings) as running:
                yield running


async def asked_by(site: Running, key: ApiKey, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key.text}", "x-gateway-progress": "1"}
    if OPEN[path].multipart:
        reply = await site.client.post(path, files=FORM, headers=headers)
    else:
        body = OLLAMA.get(path) or BODIES.get(OPEN[path].prompt_field or "", {"content": TEXT})
        sent = {"model": "demo", "stream": False, **body, **more}
        reply = await site.client.post(path, json=sent, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def told_by(reply: httpx.Response) -> list[str]:
    whole = f"{reply.text} {reply.headers}"
    return [text for text in TELLING if text in whole]


def asked_of(path: str) -> list[dict[str, Any]]:
    """What is asked for beside the prompt, one request each."""
    found: list[dict[str, Any]] = [{}]
    if OPEN[path].generates:
        found.append({"stream": True})
    if OPEN[path].api.progress_fields is not None:
        found.append({"stream": True, "return_progress": True})
    if OPEN[path].api.merger is not None:
        found += [{"prompt": [TEXT, TEXT]}, {"prompt": [TEXT, TEXT], "stream": True}]
    return found


ASKED = [(path, more) for path in OPEN if OPEN[path].takes_slot for more in asked_of(path)]


async def test_every_path_hides_what_was_cached_and_only_where_it_must(tmp_path: Path) -> None:
    async with telling_site(tmp_path) as site:
        telling = set()
        for path, more in ASKED:
            hidden = await asked_by(site, HIDDEN, path, **more)
            assert told_by(hidden) == [], (path, more)
            seen = await asked_by(site, SEEN, path, **more)
            assert hidden.headers["content-type"] == seen.headers["content-type"]
            if OPEN[path].generates and not more:
                assert str(ALL) in hidden.text, "the prompt's tokens are still told"
            if told_by(seen):
                telling.add(path)
        assert {path for path, _ in ASKED} - telling <= {"/api/embed", "/api/embeddings"}
        path = "/v1/embeddings"
        hidden, seen = await asked_by(site, HIDDEN, path), await asked_by(site, SEEN, path)
        own = set(seen.headers) - set(hidden.headers)
        assert own == {"openai-processing-ms", "anthropic-ratelimit-input-tokens-remaining"}
        for path, route in OPEN.items():
            if not (route.takes_slot or path == "/v1/responses/input_tokens"):
                assert "cache_n" in (await asked_by(site, HIDDEN, path)).text


CALM: dict[str, Any] = {"health": {"interval": 30}, "heartbeat": "off"}
CALM |= {"logging": {"access": False}}
NUMBERS = itertools.count()


async def ask(running: Running, tokens: int, text: str = "word", **headers: str) -> httpx.Response:
    """Send a prompt that no other request has sent."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    messages = [{"role": "user", "content": f"{next(NUMBERS)} {text}"}]
    body = {"messages": messages, "max_tokens": tokens}
    reply = await running.client.post(CHAT, json=body, headers=named)
    assert reply.status_code in {200, 429}
    return reply


@asynccontextmanager
async def a_site(folder: Path, *nodes: EmulatedNode, **settings: Any) -> AsyncIterator[Running]:
    async with running_gateway(folder, nodes, {**CALM, **settings}) as running:
        yield running
        await until(lambda: not running.held(), seen=running.held)
        board = running.gateway.scheduler.dispatcher.placement_state
        assert all(row.ours == 0 and not row.running for row in board.rows)


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reload_applies_to_queued_requests_too(tmp_path: Path) -> None:
    key, node = new_key(), EmulatedNode(slots=4, decode_tps=20, answer_tokens=3000)
    async with a_site(tmp_path, node) as running:
        scheduler = running.gateway.scheduler

        def begin() -> list[asyncio.Task[Any]]:
            return [asyncio.create_task(ask(running, 3000, x_priority="batch")) for _ in range(3)]

        def queued() -> tuple[int, int]:
            return len(scheduler.queue_positions()), node.busy

        tasks = begin()
        await until(lambda: queued() == (0, 3))
        classes = {"batch": {"reserve_slots": 0.25, "queue_share": 1, "patience": "7s"}}
        queue = {"max": 3, "latest_wins": False}
        keys = [{"id": key.id, "sha256": key.sha256, "trust_user_headers": True}]
        more = {"queue": queue, "classes": classes, "keys": keys, "allow_anonymous": True}
        running.write_settings({**CALM, **more, "prompts": {"volatile": ["Today is "]}})
        await until(lambda: scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0)
        # The fourth slot is reserved from now on, and three may wait.
        tasks += begin()
        await until(lambda: queued() == (3, 3))
        full = await ask(running, 1, x_priority="batch")
        assert (full.status_code, full.headers["x-gateway-reason"]) == (429, "queue_full")
        running.write_settings({**CALM, "policy": "nothing"})
        await until(lambda: running.gateway.config_files.settings_error is not None)
        assert "least_finish" in str(running.gateway.config_files.settings_error)
        assert scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0
        # Without the reserve the queued requests run.
        running.write_settings(CALM)
        await until(lambda: queued() == (2, 4))
        await ended(tasks)


@in_virtual_time
async def test_a_conversation_stays_on_the_node_of_its_first_message(tmp_path: Path) -> None:
    nodes = [
        EmulatedNode(slots=2, prefill_tps=2000.0, decode_tps=400.0, cache_ram=1 << 20)
        for _ in range(4)
    ]
    # What tells them apart is at the beginning, so that conversations share no prefix.
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"{number}: " + "You answer at length and with care. " * 60}]
        for number in range(8)
    ]
    async with a_site(tmp_path, *nodes) as running:

        async def turn(messages: list[dict[str, str]]) -> tuple[str, int]:
            """Send one more message; its node, and the prompt tokens that this had cached."""
            messages.append({"role": "user", "content": "More about it."})
            reply = await running.client.post(CHAT, json={"messages": messages, "max_tokens": 20})
            answer = reply.json()
            messages.append(answer["choices"][0]["message"])
            details = answer["usage"].get("prompt_tokens_details", {})
            return reply.headers["x-gateway-node"], details.get("cached_tokens", 0)

        homes = [node for node, _ in await asyncio.gather(*map(turn, talks))]
        assert Counter(homes) == {f"node-{number}": 2 for number in range(4)}
        for _ in range(3):
            found = await asyncio.gather(*map(turn, talks))
            assert [node for node, _ in found] == homes
            assert all(cached > 200 for _, cached in found)


@in_virtual_time
async def test_a_session_named_by_a_header_keeps_its_node(tmp_path: Path) -> None:
    """Though nothing in its prompts connects them."""
    nodes = [EmulatedNode(slots=2, prefill_tps=1000.0, decode_tps=50.0) for _ in range(4)]
    async with a_site(tmp_path, *nodes) as running:

        async def node_of(name: str) -> str:
            reply = await ask(running, 8, name, x_openwebui_chat_id=name)
            return reply.headers["x-gateway-node"]

        names = [f"chat-{number}" for number in range(6)]
        homes = await asyncio.gather(*map(node_of, names))
        assert len(set(homes)) > 1
        for _ in range(3):
            assert [await node_of(name) for name in names] == homes
