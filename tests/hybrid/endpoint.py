"""An OpenAI-compatible endpoint like vLLM and hosted services: a key for every path, no `/slots`,
`/props` or `/health`, no `timings`, and 429 or a queue of its own when there are too many requests.

The real ones need a GPU or an account; llama.cpp's server has neither these limits nor this key.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from typing import Any, Self

from tests.virtual import now

SOME_WORDS = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")
ROUND_TRIP = 0.001  # seconds that a refusal takes; none comes at once


class Endpoint:
    """`async with Endpoint(places=2) as gpu:` listens at `gpu.url`.

    `places` requests run at once. Others wait inside, or get 429 with `refuse`. Times are in
    seconds; without a time per `token` an answer is sent as a whole, or not at all.
    """

    def __init__(
        self,
        *,
        places: int = 1000,
        refuse: bool = False,
        first: float = 0.0,
        token: float = 0.0,
        tokens: int = 4,
        done: bool = True,
        finishes: bool = True,
    ) -> None:
        self.key, self.model = "secret", "org/Model-7B-Instruct"
        self.refuse = refuse
        self.first, self.token, self.tokens = first, token, tokens
        self.done = done  # whether streams end with `[DONE]`
        self.finishes = finishes  # and say why they ended
        self.seen: list[dict[str, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.paths: Counter[str] = Counter()
        self.refused_at: list[float] = []
        self.running = self.peak = self.port = 0
        self._places = asyncio.Semaphore(places)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Die like kill -9: every connection is reset, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        self.paths[path] += 1
        if fields.get("authorization") != f"Bearer {self.key}":
            self._answer(writer, 401, _error("Incorrect API key provided", "invalid_api_key"))
        elif "openai-organization" in fields:
            self._answer(writer, 401, _error("No such organization", "mismatched_organization"))
        elif (method, path) == ("GET", "/v1/models"):
            self._answer(writer, 200, {"object": "list", "data": [{"id": self.model}]})
        elif (method, path) == ("POST", "/v1/chat/completions"):
            await self._chat(writer, json.loads(body))
        else:
            self._answer(writer, 404, {"detail": "Not Found"})
        await writer.drain()
        return True

    async def _chat(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.seen.append(body)
        if body["model"] != self.model:
            message = f"The model `{body['model']}` does not exist."
            self._answer(writer, 404, _error(message, "model_not_found"))
            return
        if self.refuse and self._places.locked():
            await asyncio.sleep(ROUND_TRIP)
            self.refused_at.append(now())
            self._answer(writer, 429, _error("Rate limit reached", "rate_limit_exceeded"))
            return
        async with self._places:
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                await self._generate(writer, body)
            finally:
                self.running -= 1

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        count = min(self.tokens, body.get("max_tokens") or self.tokens)
        words = [SOME_WORDS[number % len(SOME_WORDS)] for number in range(count)]
        size = sum(len(message["content"]) for message in body["messages"])
        usage = {"prompt_tokens": size // 4, "completion_tokens": count}
        await asyncio.sleep(self.first)
        if not body.get("stream"):
            await asyncio.sleep(self.token * count)
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"object": "chat.completion", "model": self.model, "choices": [choice]}
            self._answer(writer, 200, reply | {"usage": usage})
            return
        self.statuses[200] += 1
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for word in words:
            if self.token:
                await writer.drain()
                await asyncio.sleep(self.token)
            _event(writer, {"choices": [{"index": 0, "delta": {"content": word}}]})
        if self.finishes:
            _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if body.get("stream_options", {}).get("include_usage"):
            _event(writer, {"choices": [], "usage": usage})
        if self.done:
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _answer(self, writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
        self.statuses[status] += 1
        data = json.dumps(value).encode()
        head = (
            b"HTTP/1.1 %d Whatever\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % (status, len(data)) + data)


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    value = {"object": "chat.completion.chunk", **value}
    _chunk(writer, b"data: %s\n\n" % json.dumps(value).encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
