"""An OpenAI-compatible endpoint like vLLM and hosted services: a key for every path, no `/slots`,
`/props` or `/health`, no `timings`, and 429 or a queue of its own when there are too many requests.

The real ones need a GPU or an account; llama.cpp's server has neither these limits nor this key.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.emulator.apis import DONE, data_event, to_json
from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.node import EmulatedNode
from tests.emulator.on_demand import GoResponse
from tests.emulator.request_body import RefusedError, read_json
from tests.emulator.response import Response
from tests.virtual import now

ROUND_TRIP = 0.001  # seconds that a refusal takes; none comes at once


class Endpoint(EmulatedNode):
    """`places` requests run at once. Others wait inside, or get 429 where it `refuses`.

    Times are in seconds; without a time per `token` an answer is sent as a whole, or not at all.
    """

    def __init__(
        self,
        *,
        places: int = 1000,
        refuses: bool = False,
        first: float = 0.0,
        token: float = 0.0,
        tokens: int = 4,
        done: bool = True,
    ) -> None:
        super().__init__(model="org/Model-7B-Instruct", api_key="secret", close_after_stream=False)
        self.response_class = GoResponse
        self.refuses = refuses
        self.first, self.token, self.tokens = first, token, tokens
        self.done = done  # whether streams end with `[DONE]`
        self.finishes = True  # and say why they ended
        self.paths: Counter[str] = Counter()
        self.refused: list[tuple[int, float]] = []
        """Statuses of refusals, and their times."""
        self.running = self.peak = 0
        self._places = asyncio.Semaphore(places)

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        self.paths[request.path] += 1
        super().handle(connection, request)

    def _info_response(self, request: ReceivedRequest) -> tuple[int, bytes, str]:
        self._check_key(request)
        if (request.method, request.path) != ("GET", "/v1/models"):
            raise self._refusal(404, "Not Found", "not_found")
        value = {"object": "list", "data": [{"id": self.model}]}
        return 200, to_json(value), "application/json"

    def _check_key(self, request: ReceivedRequest) -> None:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise self._refusal(401, "Incorrect API key provided", "invalid_api_key")
        if "openai-organization" in request.headers:
            raise self._refusal(401, "No such organization", "mismatched_organization")

    def _refusal(self, status: int, message: str, code: str) -> RefusedError:
        self.refused.append((status, now()))
        return RefusedError(status, code, message)

    async def _do_work(self, request: ReceivedRequest, response: Response) -> None:
        self._check_key(request)
        body = read_json(request.body)
        if body["model"] != self.model:
            message = f"The model `{body['model']}` does not exist."
            raise self._refusal(404, message, "model_not_found")
        if self.refuses and self._places.locked():
            await asyncio.sleep(ROUND_TRIP)
            raise self._refusal(429, "Rate limit reached", "rate_limit_exceeded")
        response.interruptible = True
        async with self._places:
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                await self._answer(body, response)
            finally:
                self.running -= 1

    async def _answer(self, body: dict[str, Any], response: Response) -> None:
        words = ["one "] * min(self.tokens, body.get("max_tokens") or self.tokens)
        size = sum(len(message["content"]) for message in body["messages"])
        usage = {"usage": {"prompt_tokens": size // 4, "completion_tokens": len(words)}}
        await asyncio.sleep(self.first)
        if not body.get("stream"):
            await asyncio.sleep(self.token * len(words))
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"object": "chat.completion", "model": self.model, "choices": [choice]}
            await response.plain(200, to_json(reply | usage))
            return
        chunk = {"object": "chat.completion.chunk"}
        last = []
        if self.finishes:
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            last.append(data_event(chunk | {"choices": [choice]}))
        if body.get("stream_options", {}).get("include_usage"):
            last.append(data_event(chunk | {"choices": [], **usage}))
        await response.open_stream()
        for word in words:
            await asyncio.sleep(self.token)
            choice = {"index": 0, "delta": {"content": word}}
            await response.events([data_event(chunk | {"choices": [choice]})])
        await response.end_stream([*last, DONE] if self.done else last)
