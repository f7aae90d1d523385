"""Batches of a whole gateway that end, and the events that real receivers get of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.access.keys import new_key
from tests.batches.receivers import SECRET, ReceivedRequest, Receiver, receiving
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway

pytestmark = pytest.mark.usefixtures("hurried")

ALICE, BOB = new_key("alice"), new_key("bob")


@asynccontextmanager
async def gateway(folder: Path, **target: Any) -> AsyncIterator[Running]:
    (folder / "hooks.secret").write_text(SECRET)
    settings = {
        "keys": [{"id": key.id, "sha256": key.sha256} for key in (ALICE, BOB)],
        "webhooks": {
            "targets": [{"secret_file": "hooks.secret", "allow_private": True, **target}],
        },
    }
    async with EmulatedNode() as node, running_gateway(folder, [node.url], settings) as running:
        yield running


def client(running: Running, key: Any = ALICE) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key=key.text,
        max_retries=0,
        webhook_secret=SECRET,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


def lines(number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{line}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
        ).encode()
        + b"\n"
        for line in range(number)
    )


async def create(asked: AsyncOpenAI, content: bytes, **extra: Any) -> str:
    file = await asked.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await asked.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body=extra,
    )
    return batch.id


def unwrapped(asked: AsyncOpenAI, request: ReceivedRequest) -> tuple[str, str]:
    event: Any = asked.webhooks.unwrap(request.body, request.headers)
    return event.type, event.data.id


async def admin_page(running: Running, path: str) -> str:
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS) as asked:
        return (await asked.get(f"{running.admin_url}{path}")).text


def origin(receiver: Receiver) -> str:
    return f"http://127.0.0.1:{receiver.port}"


async def test_a_batch_that_completes_is_told_and_can_be_fetched_then(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{origin(receiver)}/hooks"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            id_ = await create(alice, lines(3), webhook_url=f"{url}/job-7")
            await receiver.came(2)
            assert [unwrapped(alice, request) for request in receiver.requests] == [
                ("batch.completed", id_)
            ] * 2
            assert {request.line for request in receiver.requests} == {
                "POST /hooks HTTP/1.1",
                "POST /hooks/job-7 HTTP/1.1",
            }
            ended = await alice.batches.retrieve(id_)
            assert (ended.status, ended.request_counts and ended.request_counts.completed) == (
                "completed",
                3,
            )
            page = await admin_page(running, "/metrics")
            assert "llama_gateway_webhook_deliveries_waiting" in page


async def test_a_batch_that_fails_or_is_cancelled_is_told(tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        gateway(tmp_path, url=origin(receiver)) as running,
        client(running) as alice,
    ):
        failed = await create(alice, b"\n\n")
        await receiver.came(1)
        assert unwrapped(alice, receiver.requests[0]) == ("batch.failed", failed)
        cancelled = await create(alice, lines(2000))
        await alice.batches.cancel(cancelled)
        await receiver.came(2)
        assert unwrapped(alice, receiver.requests[1]) == ("batch.cancelled", cancelled)


@pytest.mark.parametrize("path", ["/hooksy", "/", "/hooks/../x", "/hooks%2fx"])
async def test_a_webhook_url_that_is_not_listed_makes_no_batch(tmp_path: Path, path: str) -> None:
    async with receiving() as receiver:
        url = f"{origin(receiver)}/hooks"
        async with (
            gateway(tmp_path, url=url, named_only=True, keys=[ALICE.id]) as running,
            client(running) as alice,
            client(running, BOB) as bob,
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(alice, lines(1), webhook_url=origin(receiver) + path)
            assert caught.value.param == "webhook_url"
            assert (await alice.batches.list()).data == []
            with pytest.raises(openai.BadRequestError):
                await create(bob, lines(1), webhook_url=url)
    assert receiver.connections == 0


async def test_nobody_is_told_of_a_batch_that_names_no_url_of_a_named_target(
    tmp_path: Path,
) -> None:
    async with receiving() as receiver:
        url = f"{origin(receiver)}/hooks"
        async with (
            gateway(tmp_path, url=url, named_only=True) as running,
            client(running) as alice,
        ):
            await create(alice, b"\n")
            told = await create(alice, b"\n", webhook_url=url)
            await receiver.came(1)
            assert unwrapped(alice, receiver.requests[0]) == ("batch.failed", told)
    assert len(receiver.requests) == 1


async def test_neither_logs_nor_the_admin_api_show_secrets(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{origin(receiver)}/services/hidden-path"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            await create(alice, b"\n")
            await receiver.came(1)
            shown = await admin_page(running, "/admin/config")
            assert origin(receiver) in shown
    log = (tmp_path / "gateway.log").read_text()
    assert origin(receiver) in log
    for text in (shown, log):
        assert "hidden-path" not in text
        assert SECRET not in text
