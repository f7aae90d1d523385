"""Responses that are kept or made later."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.stored.folder import ID_FILE
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.gateways import Running, running_gateway, until
from tests.small_disk import run_on_small_disk
from tests.web.two_keys import ALICE, BOB, KEYS, client, kept

pytestmark = pytest.mark.usefixtures("hurried")

# ruff: noqa: SIM117 - one level for the gateway, one for its clients


@asynccontextmanager
async def gateway(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Running]:
    nodes = [node or EmulatedNode()]
    async with running_gateway(folder, nodes, {"keys": KEYS, **settings}) as running:
        yield running


ASK: dict[str, Any] = {"model": "demo", "input": "tell me a story", "max_output_tokens": 12}


async def ended(api: AsyncOpenAI, id_: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            found = await api.responses.retrieve(id_)
            if found.status not in {"queued", "in_progress"}:
                return found
            await asyncio.sleep(0.02)


async def test_a_response_in_the_background_is_polled_to_its_end(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await alice.responses.create(**ASK, background=True, metadata={"a": "b"})
        assert made.status in {"queued", "in_progress"}
        assert made.id.startswith("resp_")
        assert (made.output, made.background, made.metadata) == ([], True, {"a": "b"})
        done = await ended(alice, made.id)
        plain = await alice.responses.create(**ASK)
        assert (done.status, done.output_text) == ("incomplete", plain.output_text)
        assert done.usage is not None
        assert done.usage.output_tokens == 12
        assert (done.id, done.created_at) == (made.id, made.created_at)
        gone = await alice.responses.with_raw_response.delete(made.id)
        assert json.loads(gone.text) == {"id": made.id, "object": "response", "deleted": True}
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found"):
            await alice.responses.retrieve(made.id)
        assert kept(tmp_path) == []
        assert "story" not in (tmp_path / "gateway.log").read_text()


async def test_a_stream_is_followed_again_from_any_event(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        stream = await alice.responses.create(**ASK, background=True, stream=True)
        live = [event async for event in stream]
        assert [event.sequence_number for event in live] == list(range(len(live)))
        assert (live[0].type, live[-1].type) == ("response.created", "response.incomplete")
        id_ = live[0].response.id
        for after in (0, 3, len(live) - 1):
            again = await alice.responses.retrieve(id_, stream=True, starting_after=after)
            assert [event async for event in again] == live[after + 1 :]
        whole = await alice.responses.retrieve(id_, stream=True)
        assert [event async for event in whole] == live


async def test_a_conversation_goes_on_from_a_stored_response(tmp_path: Path) -> None:
    async with gateway(tmp_path, batches={"store_responses": True}) as running:
        async with client(running) as alice, client(running, BOB) as bob:
            first = await alice.responses.create(**ASK, store=True)
            assert first.id.startswith("resp_")
            assert (await alice.responses.retrieve(first.id)).output_text == first.output_text
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": ASK["input"]}]},
                *[item.model_dump(exclude_none=True) for item in first.output],
                {"role": "user", "content": "go on"},
            ]
            wanted = await alice.responses.create(**{**ASK, "input": items})
            goes_on = {**ASK, "input": "go on", "previous_response_id": first.id}
            second = await alice.responses.create(**goes_on, store=True)
            assert second.output_text == wanted.output_text
            assert second.previous_response_id == first.id
            plain = await alice.responses.create(**goes_on)
            assert plain.output_text == wanted.output_text
            listed = [item async for item in alice.responses.input_items.list(second.id, limit=2)]
            assert [item.id for item in listed]
            assert [getattr(item, "role", None) for item in listed] == ["user", "assistant", "user"]
            for asks, id_ in ((bob, first.id), (alice, "resp_nothing"), (alice, plain.id)):
                with pytest.raises(openai.BadRequestError) as refused:
                    await asks.responses.create(
                        **{**goes_on, "previous_response_id": id_}, background=True
                    )
                assert refused.value.code == "previous_response_not_found"
                assert refused.value.param == "previous_response_id"


async def test_store_alone_keeps_nothing_unless_the_settings_allow_it(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await alice.responses.create(**ASK, store=True)
        with pytest.raises(openai.NotFoundError):
            await alice.responses.retrieve(made.id)
        assert kept(tmp_path) == []


OWNED: list[tuple[str, list[str]]] = [
    ("/v1/files/{file}", ["GET", "DELETE"]), ("/v1/files/{file}/content", ["GET"]),
    ("/v1/batches/{batch}", ["GET"]),
    *((f"/v1/batches/{{batch}}/{verb}", ["POST"]) for verb in ("cancel", "pause", "resume")),
    *((f"/v1/batches/{{batch}}/{part}", ["GET"]) for part in ("output", "errors")),
    ("/v1/messages/batches/{message_batch}", ["GET", "DELETE"]),
    *((f"/v1/messages/batches/{{message_batch}}/{verb}", ["POST"])
      for verb in ("cancel", "pause", "resume")),
    *((f"/v1/messages/batches/{{message_batch}}/results{partial}", ["GET"])
      for partial in ("", "?partial=true")),
    ("/v1/responses/{response}", ["GET", "DELETE"]), ("/v1/responses/{response}/cancel", ["POST"]),
    ("/v1/responses/{response}/input_items", ["GET"]),
    ("/v1/background/{deferred}", ["GET", "DELETE"]),
]  # fmt: skip
"""What is kept for callers, by the paths and methods that reach it."""


async def test_what_is_kept_for_another_key_is_not_there(tmp_path: Path) -> None:
    hers, his = ({"authorization": f"Bearer {key.text}"} for key in (ALICE, BOB))
    async with gateway(tmp_path) as running, client(running) as alice, client(running, BOB) as bob:

        async def made(path: str, **body: Any) -> httpx.Response:
            return await running.client.post(path, json=body, headers=hers | PREFER)

        file = await alice.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
        asked: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions"}
        batch = await alice.batches.create(**asked, completion_window="24h")
        requests = [{"custom_id": "a", "params": {"model": "demo", **CHAT}}]
        message_batch = (await made("/v1/messages/batches", requests=requests)).json()["id"]
        response = await alice.responses.create(**ASK, background=True)
        deferred = (await made("/v1/chat/completions", **CHAT)).headers["location"]
        ids = {"file": file.id, "batch": batch.id, "message_batch": message_batch,
               "response": response.id, "deferred": deferred.rpartition("/")[2]}  # fmt: skip
        for path, methods in OWNED:
            for method in methods:
                for headers, status in ((his, 404), ({}, 401)):
                    url = path.format(**ids)
                    refused = await running.client.request(method, url, headers=headers)
                    assert refused.status_code == status, (method, url)
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
            assert (await running.client.get(path, headers=his)).json()["data"] == []
        with pytest.raises(openai.BadRequestError, match="No such File object") as refused_file:
            await bob.batches.create(**asked, completion_window="24h")
        assert refused_file.value.param == "input_file_id"
        # Nor do the two APIs show each other's batches.
        other = await running.client.get(f"/v1/messages/batches/{batch.id}", headers=hers)
        assert other.status_code == 404
        assert (await ended(alice, response.id)).status == "incomplete"


async def test_one_that_runs_is_cancelled_and_its_stream_ends(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with gateway(tmp_path, node) as running, client(running) as alice:
        ask = {**ASK, "max_output_tokens": 1000}
        runs = await alice.responses.create(**ask, background=True)
        waits = await alice.responses.create(**ask, background=True)
        await until(lambda: node.busy == 1)
        for one in (waits, runs):
            cancelled = await alice.responses.cancel(one.id)
            assert cancelled.status == "cancelled"
            assert (await alice.responses.cancel(one.id)).status == "cancelled"
            events = [event async for event in await alice.responses.retrieve(one.id, stream=True)]
            assert events[-1].type == "response.failed"
            assert events[-1].response.status == "cancelled"
            async with alice.responses.stream(response_id=one.id) as stream:
                assert [event.type async for event in stream][-1] == "response.failed"
        await until(lambda: node.busy == 0)


async def test_a_client_that_leaves_a_stored_response_cancels_it(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with gateway(tmp_path, node, batches={"store_responses": True}) as running:
        async with client(running) as alice:
            ask = {**ASK, "max_output_tokens": 1000, "store": True}
            stream = await alice.responses.create(**ask, stream=True)
            event = await anext(aiter(stream))
            await until(lambda: node.busy == 1)
            await stream.close()
            await until(lambda: node.busy == 0)
            assert (await ended(alice, event.response.id)).status == "cancelled"


async def test_bad_requests_are_refused_and_keep_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        for wrong, param in (
            ({"background": "yes"}, "background"),
            ({"background": True, "metadata": {"a": 1}}, "metadata"),
            ({"background": True, "max_output_tokens": "x"}, None),
            ({"background": True, "webhook_url": "http://127.0.0.1/"}, "webhook_url"),
            ({"background": True, "background_options": {"completion_window": "1m"}},
             "background_options"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as refused:
                await alice.post("/responses", body={**ASK, **wrong}, cast_to=object)
            assert param is None or refused.value.param == param, wrong
        with pytest.raises(openai.NotFoundError):
            await alice.responses.create(**{**ASK, "model": "gpt-none"}, background=True)
        assert kept(tmp_path) == []


async def test_a_body_of_too_many_parts_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        parts = b"[" + b"[]," * 700_000 + b"[]]"
        for name in (b"tools", b"input", b"metadata", b"webhook_url", b"previous_response_id"):
            body = b'{"model":"demo","background":true,"%b":%b}' % (name, parts)
            answer = await running.client.post("/v1/responses", content=body)
            assert answer.status_code == 400
            assert "limits.json_containers" in answer.json()["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 12}
PREFER = {"prefer": "respond-async"}


@asynccontextmanager
async def deferring(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Running]:
    async with gateway(folder, node, **settings) as running:
        running.client.headers["authorization"] = f"Bearer {ALICE.text}"
        yield running


async def ask(running: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return await running.client.post(path, json=body, headers=PREFER)


async def answered(running: Running, url: str) -> httpx.Response:
    async with asyncio.timeout(30):
        while (found := await running.client.get(url)).status_code == 202:
            assert int(found.headers["retry-after"]) > 0
            assert found.json()["url"] == url
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_response_is_what_a_client_would_have_had(tmp_path: Path, path: str) -> None:
    body = {"input": "hello"} if path == "/v1/responses" else CHAT
    async with deferring(tmp_path) as running:
        accepted = await ask(running, path, body)
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async"
        url = accepted.headers["location"]
        told = accepted.json()
        assert (told["object"], told["url"], told["path"]) == ("background", url, path)
        replay = await answered(running, url)
        plain = await running.client.post(path, json=body)
        assert replay.status_code == 200
        assert set(replay.json()) == set(plain.json())
        assert replay.headers["x-gateway-replay"] == "true"
        assert replay.headers["x-should-retry"] == "false"
        assert replay.headers["content-type"] == plain.headers["content-type"]
        assert (await running.client.get(url)).content == replay.content
        gone = await running.client.delete(url)
        assert gone.json()["deleted"] is True
        assert (await running.client.get(url)).status_code == 404
        names = [p.name for p in (tmp_path / "state/batches").glob("*")]
        assert names == [ID_FILE]


async def test_a_nodes_error_is_replayed_with_its_status(tmp_path: Path) -> None:
    said = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
    async with deferring(tmp_path, node := EmulatedNode()) as running:
        node.faults.next("status", status=400, body=said)
        accepted = await ask(running, "/v1/chat/completions", CHAT)
        replay = await answered(running, accepted.headers["location"])
        assert (replay.status_code, replay.text) == (400, said)
        assert replay.headers["x-gateway-replay"] == "true"


async def test_one_that_runs_is_ended_by_its_deletion(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with deferring(tmp_path, node) as running:
        long = {**CHAT, "max_tokens": 1000}
        runs = (await ask(running, "/v1/chat/completions", long)).headers["location"]
        await until(lambda: node.busy == 1)
        waits = (await ask(running, "/v1/chat/completions", long)).headers["location"]
        async with asyncio.timeout(60):
            while (told := (await running.client.get(waits)).json())["position"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert told["status"] == "queued"
        for url in (waits, runs):
            assert (await running.client.delete(url)).json()["cancelled"] is True
            assert (await running.client.get(url)).status_code == 404
        await until(lambda: node.busy == 0)


async def test_a_stream_is_refused_and_other_preferences_change_nothing(tmp_path: Path) -> None:
    async with deferring(tmp_path) as running:
        refused = await ask(running, "/v1/chat/completions", {**CHAT, "stream": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream"
        usual = await running.client.post(
            "/v1/chat/completions", json=CHAT, headers={"prefer": "wait=10, return=minimal"}
        )
        assert usual.status_code == 200
        assert "choices" in usual.json()
        # What takes no slot is served at once.
        tokenized = await ask(running, "/tokenize", {"content": "x"})
        assert tokenized.status_code == 200
        assert "preference-applied" not in tokenized.headers


# Clients that wait for stored responses while the gateway ends (SIGTERM).


MORE: dict[str, Any] = {**ASK, "max_output_tokens": 40}
STORED = {"store_responses": True, "background_at_once": 1}


async def events_of(api: AsyncOpenAI, **more: Any) -> list[Any]:
    stream = await api.responses.create(**MORE, **more, store=True, stream=True)
    return [event async for event in stream]


def logs(folder: Path) -> int:
    return len(list((folder / "state").rglob("events-*")))


@pytest.mark.slow
async def test_what_outlasts_the_grace_ends_for_client_and_store(tmp_path: Path) -> None:
    settings = {"batches": STORED, "shutdown": {"grace": 0.5}}
    async with EmulatedNode(slots=1, decode_tps=2, answer_tokens=1000) as node:
        async with serving(tmp_path, node, settings=settings) as line, client(line, None) as api:
            running = asyncio.create_task(events_of(api))
            await until(lambda: node.busy == 1)
            queued = asyncio.create_task(events_of(api))
            await until(lambda: logs(tmp_path) == 2)
            plain = asyncio.create_task(api.responses.create(**MORE, store=True))
            await until(lambda: logs(tmp_path) == 3)
            later = await api.responses.create(**MORE, background=True)
            os.kill(line.newest, signal.SIGTERM)
            seen = [(await one)[-1] for one in (running, queued)]
            assert [event.type for event in seen] == ["response.failed"] * 2
            assert all("shut down" in event.response.error.message for event in seen)
            with pytest.raises(openai.InternalServerError) as refused:
                await plain
            error = refused.value
            assert (error.status_code, error.code) == (503, "shutting_down")
            # Clients send it again by themselves: this one costs nothing, and goes on nowhere.
            assert int(error.response.headers["retry-after"]) > 0
            assert "x-should-retry" not in error.response.headers
            (plain_id,) = re.findall(r"'(resp_[0-9a-f]+)'", error.message)
            assert await line.first.wait() == 0
        ids = [*(event.response.id for event in seen), plain_id]
    async with (
        EmulatedNode(decode_tps=500, answer_tokens=1000) as other,
        serving(tmp_path, other, settings=settings) as line,
        client(line, None) as api,
    ):
        for id_, known in zip(ids, [*seen, None], strict=True):
            found = await api.responses.retrieve(id_)
            assert found.error is not None
            assert (found.status, found.error.code) == ("failed", "server_error")
            assert known is None or found.to_dict() == known.response.to_dict()
        assert (await ended(api, later.id)).status == "incomplete"
    # The one that was cut, and the one in the background.
    assert (node.requests, other.requests) == (1, 1)


ON_A_FULL_DISK = """
import asyncio, sys
from pathlib import Path
import openai
from gateway.stored import background_requests
from tests.emulator import EmulatedNode
from tests.web.test_background import ASK, client, ended, gateway

background_requests.LEASE_SECONDS = 1.0  # after which it is tried again

def fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

async def main(disk, folder):
    node = EmulatedNode(decode_tps=40, answer_tokens=1000)
    kept = {"folder": str(disk / "batches")}
    ask = {**ASK, "max_output_tokens": 120, "background": True}
    async with gateway(folder, node, batches=kept) as running, client(running) as alice:
        like = await ended(alice, (await alice.responses.create(**ask)).id)
        seen, broken = [], False
        try:
            async for event in await alice.responses.create(**ask, stream=True):
                seen.append(event)
                if len(seen) == 12:
                    fill(disk / "fill")
        except openai.APIConnectionError:
            broken = True
        assert broken, seen[-1].type
        id_ = seen[0].response.id
        refused = None
        try:
            await alice.responses.create(**ask)
        except openai.InternalServerError as error:
            refused = error
        assert refused is not None
        assert (refused.status_code, refused.code) == (507, "storage_full")
        assert refused.response.headers["x-should-retry"] == "false"
        assert (await alice.responses.retrieve(id_)).status in {"queued", "in_progress"}
        (disk / "fill").unlink()
        after = await ended(alice, id_)
        assert after.status == like.status == "incomplete"
        assert after.output_text == like.output_text
        assert after.usage == like.usage, (after.usage, like.usage)
        whole = [e async for e in await alice.responses.retrieve(id_, stream=True)]
        assert [e.sequence_number for e in whole] == list(range(len(whole)))
        # What was seen before is the beginning of it.
        assert [e.to_dict() for e in whole[: len(seen)]] == [e.to_dict() for e in seen]

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
print("done", end="")
"""


@pytest.mark.slow
def test_a_response_whose_disk_fills_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "gateway"
    disk.mkdir()
    folder.mkdir()
    # 64 MiB of it stay free.
    assert run_on_small_disk(ON_A_FULL_DISK, "66m", disk, folder) == "done"
