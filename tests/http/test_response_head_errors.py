"""Heads of a node's errors, and of responses under limits."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from gateway.http.heads import EXPOSED_HEADERS
from tests.callers.build import all_accounts
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway

SAID = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
ANTHROPICS = '{"type":"error","error":{"type":"invalid_request_error","message":"No such thing"}}'


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
OTHERS = [path for path in GENERATION_PATHS if path != MESSAGES]


@in_virtual_time
async def test_a_nodes_error_passes_unchanged_or_gets_a_message(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:

        @each_case(
            ("path", "status", "said", "reason"),
            [
                *((path, 400, SAID, "invalid_request") for path in OTHERS),
                (CHAT, 413, SAID, "request_too_large"),
                (CHAT, 422, SAID, "invalid_request"),
                (CHAT, 500, SAID, "node_error"),
                (MESSAGES, 400, ANTHROPICS, "invalid_request"),
                *((path, 413, "", "request_too_large") for path in OTHERS),
            ],
        )
        async def check(path: str, status: int, said: str, reason: str) -> None:
            node.faults.next("status", status=status, body=said, path=path)
            reply = await proxy.ask(path)
            assert (reply.status_code, reply.headers["x-gateway-reason"]) == (status, reason)
            if said:
                assert reply.text == said
            else:
                assert reply.headers["content-type"] == "application/json"
                assert reply.json()["error"]["code"] == reason

        await check()


@in_virtual_time
async def test_anthropics_clients_get_a_nodes_error_in_their_form(tmp_path: Path) -> None:
    no_json = "The node answered with status 400."
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:

        @each_case(
            ("path", "stream", "status", "said", "kind", "message"),
            [
                (MESSAGES, False, 400, SAID, "invalid_request_error", "No such thing"),
                (MESSAGES, True, 413, SAID, "request_too_large", "No such thing"),
                (MESSAGES, False, 500, SAID, "api_error", "No such thing"),
                (f"{MESSAGES}/count_tokens", False, 400, SAID, "invalid_request_error",
                 "No such thing"),
                *((MESSAGES, False, 400, said, "invalid_request_error", no_json)
                  for said in ("<html>no</html>", "", '{"error":7}')),
            ],
        )  # fmt: skip
        async def check(
            path: str, *, stream: bool, status: int, said: str, kind: str, message: str
        ) -> None:
            node.faults.next("status", status=status, body=said, path=path)
            reply = await proxy.ask(path, messages=[], stream=stream)
            assert reply.status_code == status
            assert reply.headers["content-type"] == "application/json"
            assert reply.json() == {
                "type": "error",
                "error": {"type": kind, "message": message},
                "request_id": reply.headers["request-id"],
            }

        await check()


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_an_overflow_of_vllms_keeps_its_figures_in_each_api(
    tmp_path: Path, path: str, stream: bool
) -> None:
    said = (
        "You passed 31745 input tokens and requested 1024 output tokens. However, the model's "
        "context length is only 32768 tokens, resulting in a maximum input length of 31744 tokens."
    )
    body = json.dumps({"error": {"message": said, "type": "BadRequestError", "code": 400}})
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=400, body=body)
        reply = await proxy.ask(path, stream=stream)
        assert reply.status_code == 400
        assert reply.headers["x-gateway-reason"] == "context_length_exceeded"
        error = reply.json()["error"]
        assert "prompt is too long: 31745 tokens > 31744 maximum" in error["message"]
        assert "(32768 tokens)" in error["message"]
        if path != "/v1/messages":
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (31745, 32768)


KEY = new_key("lim")

FREE = new_key("free")

BEARER = {"Authorization": f"Bearer {KEY.text}"}


@asynccontextmanager
async def limited(node: EmulatedNode | None = None, **limits: Any) -> AsyncIterator[BareGateway]:
    """A gateway with one key that has these limits, and one that has none."""
    keys = [
        {"id": KEY.id, "sha256": KEY.sha256, "limits": limits},
        {"id": FREE.id, "sha256": FREE.sha256},
    ]
    settings = {"keys": keys, "heartbeat": 0.05}
    async with bare_gateway(node or EmulatedNode(), settings=settings) as gateway:
        yield gateway
        gateway.bus.flush()
        for account in all_accounts(gateway.handler.meter.book):
            assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)


def told(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if "ratelimit" in name}


async def test_a_response_tells_what_is_left() -> None:
    async with limited(rpm=10, tpm=5000) as gateway:
        first = await gateway.chat(headers=BEARER, max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "10"
        assert first.headers["x-ratelimit-remaining-requests"] == "9"
        assert re.fullmatch(r"1m0s|(59|60)(\.\d)?s", first.headers["x-ratelimit-reset-requests"])
        assert first.headers["x-ratelimit-limit-tokens"] == "5000"
        # What it has reserved itself is not left.
        assert 4800 < int(first.headers["x-ratelimit-remaining-tokens"]) <= 4900
        used = first.json()["usage"]["total_tokens"]
        await gateway.until(lambda: len(gateway.registry) == 0)
        gateway.bus.flush()
        second = await gateway.chat(headers=BEARER, max_tokens=100)
        left = int(second.headers["x-ratelimit-remaining-tokens"])
        assert left == int(first.headers["x-ratelimit-remaining-tokens"]) - used
        assert second.headers["x-ratelimit-remaining-requests"] == "8"


async def test_a_refused_and_a_wrong_request_are_told_too() -> None:
    async with limited(rpm=1) as gateway:
        assert (await gateway.chat(headers=BEARER)).status_code == 200
        refused = await gateway.chat(headers=BEARER)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        wrong = await gateway.public.post(CHAT, content=b"{", headers=BEARER)
        assert wrong.status_code == 400
        assert wrong.headers["x-ratelimit-remaining-requests"] == "0"


async def test_anthropics_api_has_anthropics_headers_too_and_pages_may_read_all() -> None:
    async with limited(rpm=10, tpm=10_000) as gateway:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        response = await gateway.public.post(MESSAGES, json=body, headers=BEARER)
        assert response.status_code == 200
        assert response.headers["anthropic-ratelimit-requests-limit"] == "10"
        assert response.headers["anthropic-ratelimit-requests-remaining"] == "9"
        reset = response.headers["anthropic-ratelimit-requests-reset"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reset)
        assert "x-ratelimit-limit-requests" in response.headers
        names = set(told(response.headers))
        assert len(names) == 12
        assert names <= {name.lower() for name in EXPOSED_HEADERS}
