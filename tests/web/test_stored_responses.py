"""Stored responses of a whole gateway, by the official client."""

# ruff: noqa: SIM117 - one level for the gateway, one for its clients

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.access.keys import ApiKey, new_key
from gateway.batches import response_log
from gateway.batches.folder import ID_FILE
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

pytestmark = pytest.mark.usefixtures("hurried")

ALICE, BOB = new_key("alice"), new_key("bob")


@asynccontextmanager
async def gateway(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Running]:
    keys = [{"id": key.id, "sha256": key.sha256} for key in (ALICE, BOB)]
    async with (
        node or EmulatedNode() as running_node,
        running_gateway(folder, [running_node.url], {"keys": keys, **settings}) as running,
    ):
        yield running


def client(running: Running, key: ApiKey | None = ALICE) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key="none" if key is None else key.text,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


def kept(folder: Path) -> list[str]:
    """What the folder has but its own id, which may still have its temporary name."""
    names = [path.name for path in (folder / "state/batches").glob("*")]
    return sorted(name for name in names if not name.endswith(ID_FILE))


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


async def test_the_heartbeats_of_codexs_stored_stream_repeat_the_number_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 0.05)
    async with EmulatedNode() as node, gateway(tmp_path, node) as running, client(running) as alice:
        node.faults.next("hang", after_events=4)
        stream = await alice.responses.create(
            **ASK, background=True, stream=True, extra_headers={"originator": "codex_exec"}
        )
        live = []
        async for event in stream:
            live.append(event)
            if [one.type for one in live[-2:]] == ["keepalive", "keepalive"]:
                node.faults.release()
        assert [event.type for event in live].count("keepalive") >= 2
        real = [event.sequence_number for event in live if event.type != "keepalive"]
        assert real == list(range(len(real)))
        for before, event in pairwise(live):
            repeats = event.sequence_number == before.sequence_number
            assert repeats == (event.type == "keepalive")


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


async def test_a_response_of_another_key_is_not_there(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        async with client(running) as alice, client(running, BOB) as bob:
            made = await alice.responses.create(**ASK, background=True)
            for ask in (
                bob.responses.retrieve,
                bob.responses.cancel,
                bob.responses.delete,
                bob.responses.input_items.list,
            ):
                with pytest.raises(openai.NotFoundError):
                    await ask(made.id)
            async with client(running, None) as nobody:
                with pytest.raises(openai.AuthenticationError):
                    await nobody.responses.retrieve(made.id)
            assert (await ended(alice, made.id)).status == "incomplete"


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


async def test_an_error_of_a_node_fails_the_response(tmp_path: Path) -> None:
    said = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
    async with gateway(tmp_path, node := EmulatedNode()) as running, client(running) as alice:
        node.faults.next("status", status=400, body=said)
        made = await alice.responses.create(**ASK, background=True)
        failed = await ended(alice, made.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "No such thing" in failed.error.message


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


async def test_a_key_may_have_so_many_requests_waiting(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    limits = {"waiting_per_key": 2}
    async with gateway(tmp_path, node, batches=limits) as running, client(running) as alice:
        ask = {**ASK, "max_output_tokens": 1000, "background": True}
        made = [await alice.responses.create(**ask) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await alice.responses.create(**ask)
        assert int(refused.value.response.headers["retry-after"]) > 0
        await alice.responses.cancel(made[0].id)
        await alice.responses.create(**ask)


async def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path, store={"url": "off"}) as running, client(running) as alice:
        with pytest.raises(openai.InternalServerError) as refused:
            await alice.responses.create(**ASK, background=True)
        assert refused.value.status_code == 501
        assert (await alice.responses.create(**ASK, store=True)).output_text
