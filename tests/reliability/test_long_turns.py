"""What one request or one node makes of a turn of the event loop, by the CPU time of its thread."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.events import event
from tests.gateways import NO_TLS, running_gateway

pytestmark = pytest.mark.slow


SECRET = "k" * 40
SETTINGS = {
    "health": {"open": 0.1, "open_max": 0.1, "slow_start": 0.0},
    "ollama": True,
    "batches": {"store_responses": True},
    "keys": [
        {"id": "alice", "name": "alice", "sha256": hashlib.sha256(SECRET.encode()).hexdigest()}
    ],
}
HEADERS = {"authorization": f"Bearer lg_alice_{SECRET}"}


class Node(ThreadingHTTPServer):
    """A node in threads of its own. `answers`: by path JSON, or the pieces of a stream."""

    daemon_threads = True
    answers: Mapping[str, bytes | list[bytes]]


class NodeHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Node)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = self.server.answers.get(self.path)
        self.send_response(404 if answer is None else 200)
        kind = "text/event-stream" if isinstance(answer, list) else "application/json"
        self.send_header("content-type", kind)
        self.end_headers()
        with suppress(OSError):  # the gateway may have had enough
            for piece in answer if isinstance(answer, list) else [answer or b"{}"]:
                self.wfile.write(piece)
                time.sleep(0.02)  # so that they come one by one

    do_GET = do_POST  # noqa: N815 - the server's name for it

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def node() -> Iterator[Node]:
    with Node(("127.0.0.1", 0), NodeHandler) as server:
        server.answers = USUAL
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


USUAL: dict[str, bytes | list[bytes]] = {
    "/health": b'{"status":"ok"}',
    "/props": b'{"total_slots":4,"model_path":"demo.gguf","build_info":"b11669"}',
    "/v1/models": b'{"data":[{"id":"demo"}]}',
}


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"finish_reason": reason, "index": 0, "delta": delta, **more}]})


def probabilities(count: int) -> dict[str, Any]:
    others = [{"token": f" {n}", "logprob": -1.5, "bytes": [32], "id": n} for n in range(20)]
    token = {"token": " t", "logprob": -0.5, "bytes": [32], "id": 1, "top_logprobs": others}
    return {"logprobs": {"content": [token] * count}}


OPENING = chunk({"role": "assistant", "content": None}) + chunk({"content": "a"})
END = chunk({}, "stop") + b"data: [DONE]\n\n"
VECTOR = [0.0123456789 + at * 1e-5 for at in range(1024)]
EMBEDDINGS = {"data": [{"embedding": VECTOR, "index": at} for at in range(1900)], "usage": {}}
STRINGS = event({"choices": [{"index": 0, "delta": {"content": "b"}}], "x": ["s"] * 20_000})
LISTS = event({"choices": [{"index": 0, "delta": {"content": "b"}}], "x": [[]] * 300_000})
TOKENS = [chunk({"content": f" t{at}"}) for at in range(60_000)]
LIKELY = [chunk({"content": " t"}, **probabilities(1))] * 6000
EMBED = {"model": "demo"}
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CHAT, OLLAMA_CHAT = "/v1/chat/completions", "/api/chat"
LIKELIEST = {"logprobs": True, "top_logprobs": 20}


FLOODS = (
    *(b" \n\n", b"data:\n\n", b"data:\n", b"x\n", b":\n"),
    *(b"data: {}\n\n", b"data: null\n\n", b"event: x\n\n"),
)


CASES: list[tuple[str, dict[str, Any], list[bytes] | bytes]] = [
    (CHAT, {"stream": True}, [OPENING, STRINGS, STRINGS, STRINGS, OPENING * 90, END]),
    (CHAT, {"stream": True}, [LISTS, LISTS, OPENING * 90, END]),
    (CHAT, {}, [OPENING, b"".join(TOKENS), END]),
    (CHAT, LIKELIEST, [OPENING, b"".join(LIKELY), END]),
    (OLLAMA_CHAT, LIKELIEST | {"stream": False}, [OPENING, b"".join(LIKELY), END]),
    ("/api/embed", {"input": ["a"]}, json.dumps(EMBEDDINGS).encode()),
    *(
        (path, {"stream": stream}, [*opening, data * ((1 << 20) // len(data)), END])
        for path, stream, opening in [
            *((CHAT, True, []), (CHAT, True, [OPENING]), (CHAT, False, [OPENING])),
            (OLLAMA_CHAT, True, [OPENING]),
        ]
        for data in FLOODS
    ),
]


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """Collections are measured elsewhere."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
async def test_no_turn_of_the_event_loop_is_long(tmp_path: Path) -> None:
    """A turn of more than 50 ms fails it, as any test (`tests/loop_watch`)."""
    with node() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        async with running_gateway(tmp_path, [url], SETTINGS) as running:

            async def ask(method: str, path: str, body: object = None) -> httpx.Response:
                return await asyncio.to_thread(
                    lambda: httpx.request(
                        method, running.url + path, json=body, headers=HEADERS, verify=NO_TLS,
                        timeout=60,
                    )
                )  # fmt: skip

            for path, fields, answer in CASES:
                server.answers = USUAL | {CHAT: answer, "/v1/embeddings": answer}
                await ask("POST", path, (ASK if "input" not in fields else EMBED) | fields)
            items = [{"role": "user", "content": str(number)} for number in range(60_000)]
            body = {"model": "demo", "input": items, "background": True}
            made = (await ask("POST", "/v1/responses", body)).json()["id"]
            for query in ("", f"&order=asc&after=msg_{made[5:]}00e000"):
                page = await ask("GET", f"/v1/responses/{made}/input_items?limit=1{query}")
                assert len(page.json()["data"]) == 1
