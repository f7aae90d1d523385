"""`serve --edges`: a gateway of several processes, as its clients and operators see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, asked, client_of, serving
from tests.gateways import until
from tests.polling import eventually
from tests.processes import gone
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EDGES = {"listen": {"port": 0, "edges": 2}}
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
STREAM = HELLO | {"stream": True, "max_tokens": 40}


async def edges_of(admin: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await admin.get("/admin/status")).json()["edges"]
    return found


async def until_ready(admin: httpx.AsyncClient, without: Iterable[int] = ()) -> list[int]:
    """The processes of both edges, once both serve and none is one of these."""

    async def look() -> list[int] | None:
        pids = [one["pid"] for one in await edges_of(admin) if one["ready"]]
        return pids if len(pids) == 2 and not set(pids) & set(without) else None

    return await eventually(look, LIMIT)


def relayed_by(answer: httpx.Response) -> str:
    return answer.headers["x-request-id"][: len("req_") + 16]


@pytest.mark.smoke
async def test_streams_are_spread_and_recorded_and_everything_else_works(tmp_path: Path) -> None:
    async with asked(tmp_path, EmulatedNode(slots=16), **EDGES) as (line, client, admin):

        async def ask(number: int) -> list[str]:
            """25 streams on one connection that is kept."""
            by = []
            limits = httpx.Limits(max_connections=1)
            async with client_of(line.url, limits=limits) as kept:
                for _ in range(25):
                    answer = await kept.post(CHAT, json=HELLO | {"stream": True})
                    assert answer.text.endswith("data: [DONE]\n\n")
                    by.append(relayed_by(answer))
            return by

        by = Counter(chain(*await asyncio.gather(*map(ask, range(8)))))
        assert by.total() == 200
        assert len(by) == 2
        assert max(by.values()) <= 1.3 * 100
        await until(lambda: len(line.logged("request")) == 200, LIMIT)
        assert {(one["status"], one["attempts"]) for one in line.logged("request")} == {(200, 1)}
        # What the brain serves itself.
        models = await client.get("/v1/models")
        assert [one["id"] for one in models.json()["data"]] == ["demo"]
        body = {"input": "Hello", "background": True, "stream": True, "max_output_tokens": 4}
        stored = await client.post("/v1/responses", json=body)
        assert "event: response.incomplete" in stored.text
        [id_] = set(re.findall(r'"id":"(resp_\w+)"', stored.text))
        kept = await client.get(f"/v1/responses/{id_}")
        assert kept.json()["status"] == "incomplete"
        assert (await client.get("/v1/no-such")).status_code == 404
        # Operators.
        metrics = (await admin.get("/metrics")).text
        assert "llama_gateway_edges 2" in metrics
        assert 'llama_gateway_requests_total{class="normal",model="demo",code="200"} 20' in metrics
        status = (await admin.get("/admin/status")).json()
        assert status["totals"]["requests"] >= 200
        assert {one["name"] for one in status["edges"]} == {"edge-1", "edge-2"}
        rows: list[dict[str, Any]] = []
        async with asyncio.timeout(LIMIT):
            while len(rows) < 201:
                rows = (await admin.get("/admin/requests/ended?limit=1000")).json()["requests"]
        # What an edge knows of a request, and what the brain does.
        for row in (row for row in rows if row["path"] == CHAT):
            assert row["prefill_seconds"] + row["decode_seconds"] <= row["seconds"] + 0.1
            assert row["ttft_seconds"] + row["wait_seconds"] > 0
            assert row["resumptions"] == 0
        pids = [one["pid"] for one in status["edges"]]
        # A signal that reaches the whole group, as a terminal's, is the brain's business.
        for pid in pids:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
                os.kill(pid, number)
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
        assert await until_ready(admin) == pids
    assert all(map(gone, pids))
    assert not line.logged("an edge has ended")


async def rest(parts: AsyncIterator[bytes]) -> bytes:
    return b"".join([part async for part in parts])


@pytest.mark.parametrize("killed", [False, True])
async def test_a_stop_waits_for_streams_and_edges_end_with_their_brain(
    tmp_path: Path, killed: bool
) -> None:
    node = EmulatedNode(answer_tokens=40)
    async with asked(tmp_path, node, **EDGES) as (line, client, admin):
        pids = await until_ready(admin)
        if killed:
            await line.kill()
        else:
            node.faults.next("hang", after_events=5)
            async with client.stream("POST", CHAT, json=STREAM) as answer:
                parts = answer.aiter_bytes()
                await anext(parts)
                line.first.send_signal(signal.SIGTERM)
                await line.until("shutting down")
                node.faults.release()
                assert (await rest(parts)).endswith(b"data: [DONE]\n\n")
            assert await line.status() == 0
        await until(lambda: all(map(gone, pids)), LIMIT)


async def test_a_renewed_certificate_reaches_the_edges(tmp_path: Path) -> None:
    authority = trustme.CA()
    folder = tmp_path / "tls"
    folder.mkdir()

    def write(name: str) -> None:
        issued = authority.issue_cert(name)
        for file, pem in (("cert", issued.cert_chain_pems[0]), ("key", issued.private_key_pem)):
            pem.write_to_path(folder / f"{file}.new")
            (folder / f"{file}.new").rename(folder / f"{file}.pem")

    write("old.example")
    files = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    settings = {"listen": {"port": 0, "edges": 2, "tls": files}}
    async with EmulatedNode() as node, serving(tmp_path, node, settings=settings) as line:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        context.check_hostname = False

        async def subject() -> object:
            port = httpx.URL(line.url).port
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            found = writer.get_extra_info("peercert")["subjectAltName"]
            writer.transport.abort()
            return found

        async def both_show_the_new_one() -> bool | None:
            # Each connection goes to the next edge.
            shown = {await subject(), await subject()}
            return True if shown == {(("DNS", "new.example"),)} else None

        assert await subject() == (("DNS", "old.example"),)
        write("new.example")
        await eventually(both_show_the_new_one)


LONG = {"max_tokens": 2000}
BODY = {
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "stream": True,
    "max_tokens": 30,
    "ignore_eos": True,
}


@pytest.mark.real
async def test_streams_through_edges_over_real_servers_and_one_that_dies(
    tmp_path: Path,
) -> None:
    async with start_demo_servers(2) as urls:
        nodes = [{"name": f"n{number}", "url": url} for number, url in enumerate(urls)]
        async with (
            serving(tmp_path, nodes, settings=EDGES) as line,
            client_of(line.url) as client,
            client_of(line.admin_url) as admin,
            contextlib.AsyncExitStack() as stack,
        ):
            pids = await until_ready(admin)

            async def ask() -> str:
                answer = await client.post(CHAT, json=BODY)
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                return relayed_by(answer)

            # More than the four slots: some wait, in the gateway.
            by = await asyncio.gather(*(ask() for _ in range(16)))
            assert len(set(by)) == 2
            for url in urls:
                async with client_of(url) as node:
                    metrics = (await node.get("/metrics")).text
                assert re.search(r"^llamacpp:requests_deferred 0$", metrics, re.MULTILINE)

            async def each_has(count: int) -> bool | None:
                streaming = [one["streams"] for one in await edges_of(admin)]
                return True if streaming == [count, count] else None

            # Over connections of their own, which are shared out by what runs.
            await eventually(lambda: each_has(0))
            fresh, endless = await stack.enter_async_context(client_of(line.url)), BODY | LONG
            streams = [asyncio.create_task(fresh.post(CHAT, json=endless)) for _ in range(4)]
            await eventually(lambda: each_has(2))
            os.kill(pids[0], signal.SIGKILL)
            lost = await line.until("edge died")
            assert lost["requests"] == 2
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert sum(isinstance(one, httpx.HTTPError) for one in ends) == 2
            # Its slots are free again, and used by the others.
            await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(8))), LIMIT)

            async def none_busy() -> bool | None:
                found = (await admin.get("/admin/nodes")).json()["nodes"]
                return True if not any(one["slots_busy"] for one in found) else None

            await eventually(none_busy)
            assert set(await until_ready(admin, without=pids[:1])) > set(pids[1:])
            died = [one for one in line.logged("request") if one.get("reason") == "edge_died"]
            assert {one["id"] for one in died} == set(lost["ids"].split(", "))
            await until(lambda: any("edge" in one["id"] for one in line.logged("problem")), LIMIT)
            assert "llama_gateway_edges_died_total 1" in (await admin.get("/metrics")).text
