"""Background requests outlive the gateway that runs them."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from gateway.batches.files import kept_by
from gateway.batches.request_rows import RequestKind, RequestState
from gateway.http.request_head import ANONYMOUS_OWNER
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually

pytestmark = pytest.mark.usefixtures("hurried")

BODY = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 40}


async def test_what_runs_when_the_gateway_ends_is_run_by_the_next_one(tmp_path: Path) -> None:
    path, prefer = "/v1/chat/completions", {"prefer": "respond-async"}
    async with EmulatedNode(slots=1, decode_tps=100, answer_tokens=1000) as node:
        async with running_gateway(tmp_path, [node.url]) as running:
            answers = [await running.client.post(path, json=BODY, headers=prefer) for _ in range(2)]
            await until(lambda: node.busy == 1)
        urls = [answer.headers["location"] for answer in answers]
        async with running_gateway(tmp_path, [node.url]) as running, asyncio.timeout(60):
            for url in urls:
                while (found := await running.client.get(url)).status_code == 202:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert found.status_code == 200
                assert found.json()["usage"]["completion_tokens"] == 40
            ledger = running.gateway.ledger
            assert ledger is not None


async def ended(running: Running, id_: str) -> dict[str, object]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, object] = (await running.client.get(f"/v1/responses/{id_}")).json()
            if found["status"] not in {"queued", "in_progress"}:
                return found
            await asyncio.sleep(0.05)


async def test_requests_of_a_key_that_keeps_as_much_as_it_may_wait_until_there_is_room(
    tmp_path: Path,
) -> None:
    limits = {
        "file_bytes": 60_000, "bytes_per_key": 60_000, "background_at_once": 1,
    }  # fmt: skip
    ask = {"input": "tell me a story", "max_output_tokens": 100, "background": True}
    node = EmulatedNode(slots=1, decode_tps=1000, answer_tokens=1000)
    async with node, running_gateway(tmp_path, [node.url], {"batches": limits}) as running:
        api, requests = running.client, running.gateway.background.requests
        assert requests is not None

        async def keeps(size: int) -> bool | None:
            job = partial(kept_by, owner=ANONYMOUS_OWNER, now=time.time())
            return (await requests.store.run(job, write=False)).bytes == size or None

        upload = {"file": ("x", b"x" * 50_000)}
        sent = await api.post("/v1/files", data={"purpose": "user_data"}, files=upload)
        file = sent.json()["id"]
        first, second = [(await api.post("/v1/responses", json=ask)).json()["id"] for _ in range(2)]
        assert (await ended(running, first))["status"] == "incomplete"
        owner = ANONYMOUS_OWNER
        row = await requests.find(owner, first, RequestKind.RESPONSE)
        assert (await requests.wait_ended(row, 20)).state is RequestState.DONE
        folder = requests.folder.location
        logs = sum(path.stat().st_size for path in folder.glob("*-*") if path.name != "folder-id")
        assert logs > 60_000
        await eventually(lambda: keeps(logs))
        refused = await api.post("/v1/responses", json=ask)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert "batches.bytes_per_key" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        later = await api.post(
            "/v1/chat/completions", json=BODY, headers={"prefer": "respond-async"}
        )
        assert (later.status_code, later.json()["error"]["code"]) == (429, "insufficient_quota")
        assert len(list(folder.glob("request-*"))) == 2  # Nothing is left of those.
        assert (await api.get(f"/v1/responses/{second}")).json()["status"] == "queued"
        before = time.time()
        assert (await api.delete(f"/v1/files/{file}")).status_code == 200
        assert (await ended(running, second))["status"] == "incomplete"
        found = await requests.find(owner, second, RequestKind.RESPONSE)
        assert found.started_at is not None
        assert found.started_at >= before
        for id_ in (first, second):
            assert (await api.delete(f"/v1/responses/{id_}")).status_code == 200
        await eventually(lambda: keeps(0))
