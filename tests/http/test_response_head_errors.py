"""Heads of a node's errors, and of responses under limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from gateway.http.heads import EXPOSED_HEADERS
from tests.callers.build import all_accounts
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway

SAID = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
ANTHROPICS = '{"type":"error","error":{"type":"invalid_request_error","message":"No such thing"}}'


@pytest.mark.parametrize("path", [path for path in GENERATION_PATHS if path != "/v1/messages"])
@in_virtual_time
async def test_a_nodes_error_passes_unchanged(tmp_path: Path, path: str) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=400, body=SAID)
        reply = await proxy.ask(path)
        assert (reply.status_code, reply.text) == (400, SAID)
        assert reply.headers["x-gateway-reason"] == "invalid_request"


@pytest.mark.parametrize(
    ("status", "word"),
    [(400, "invalid_request"), (413, "request_too_large"), (422, "invalid_request"),
     (500, "node_error")],
)  # fmt: skip
@in_virtual_time
async def test_the_head_of_a_nodes_error_has_the_reason(
    tmp_path: Path, status: int, word: str
) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=status, body=SAID)
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (status, word)


@pytest.mark.parametrize(
    ("path", "stream", "status", "kind"),
    [
        ("/v1/messages", False, 400, "invalid_request_error"),
        ("/v1/messages", True, 413, "request_too_large"),
        ("/v1/messages", False, 500, "api_error"),
        ("/v1/messages/count_tokens", False, 400, "invalid_request_error"),
    ],
)
@in_virtual_time
async def test_anthropics_clients_get_a_nodes_error_in_their_form(
    tmp_path: Path, path: str, stream: bool, status: int, kind: str
) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=status, body=SAID, path=path)
        reply = await proxy.ask(path, messages=[], stream=stream)
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        assert reply.json() == {
            "type": "error",
            "error": {"type": kind, "message": "No such thing"},
            "request_id": reply.headers["request-id"],
        }


@in_virtual_time
async def test_an_error_in_anthropics_form_passes_unchanged(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=400, body=ANTHROPICS)
        reply = await proxy.ask("/v1/messages")
        assert (reply.status_code, reply.text) == (400, ANTHROPICS)


@pytest.mark.parametrize("path", [path for path in GENERATION_PATHS if path != "/v1/messages"])
@in_virtual_time
async def test_an_empty_error_gets_a_message(tmp_path: Path, path: str) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=413, body="", path=path)
        reply = await proxy.ask(path)
        assert (reply.status_code, reply.headers["content-type"]) == (413, "application/json")
        assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("body", ["<html>no</html>", "", '{"error":7}'])
@in_virtual_time
async def test_an_error_that_is_not_json_is_described_by_its_status(
    tmp_path: Path, body: str
) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        node.faults.next("status", status=400, body=body)
        reply = await proxy.ask("/v1/messages")
        error = json.loads(reply.content)["error"]
        assert error == {
            "type": "invalid_request_error",
            "message": "The node answered with status 400.",
        }


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


def limited(**limits: Any) -> dict[str, Any]:
    return {
        "keys": [
            {"id": KEY.id, "sha256": KEY.sha256, "limits": limits},
            {"id": FREE.id, "sha256": FREE.sha256},
        ]
    }


def told(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if "ratelimit" in name}


async def test_a_response_tells_what_is_left() -> None:
    settings = limited(rpm=10, tpm=5000)
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=settings, serving=True) as gateway,
    ):
        first = await gateway.chat(headers=BEARER, max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "10"
        assert first.headers["x-ratelimit-remaining-requests"] == "9"
        assert re.fullmatch(r"1m0s|(59|60)(\.\d)?s", first.headers["x-ratelimit-reset-requests"])
        assert first.headers["x-ratelimit-limit-tokens"] == "5000"
        # What it has reserved itself is not left.
        assert 4800 < int(first.headers["x-ratelimit-remaining-tokens"]) <= 4900
        used = first.json()["usage"]["total_tokens"]
        second = await gateway.chat(headers=BEARER, max_tokens=100)
        left = int(second.headers["x-ratelimit-remaining-tokens"])
        assert left == int(first.headers["x-ratelimit-remaining-tokens"]) - used
        assert second.headers["x-ratelimit-remaining-requests"] == "8"


async def test_a_refused_and_a_wrong_request_are_told_too() -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=limited(rpm=1), serving=True) as gateway,
    ):
        assert (await gateway.chat(headers=BEARER)).status_code == 200
        refused = await gateway.chat(headers=BEARER)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        wrong = await gateway.public.post("/v1/chat/completions", content=b"{", headers=BEARER)
        assert wrong.status_code == 400
        assert wrong.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_caller_without_limits_is_told_nothing() -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=limited(rpm=1), serving=True) as gateway,
    ):
        response = await gateway.chat(headers={"Authorization": f"Bearer {FREE.text}"})
        assert response.status_code == 200
        assert told(response.headers) == {}


async def test_limits_that_are_no_rates_have_no_headers() -> None:
    settings = limited(concurrency=1, budget="1/month", models=["demo"])
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=settings, serving=True) as gateway,
    ):
        assert told((await gateway.chat(headers=BEARER)).headers) == {}


async def test_anthropics_api_has_anthropics_headers_too() -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=limited(rpm=10), serving=True) as gateway,
    ):
        response = await gateway.public.post(
            "/v1/messages",
            json={"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
            headers=BEARER,
        )
        assert response.status_code == 200
        assert response.headers["anthropic-ratelimit-requests-limit"] == "10"
        assert response.headers["anthropic-ratelimit-requests-remaining"] == "9"
        reset = response.headers["anthropic-ratelimit-requests-reset"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reset)
        assert "x-ratelimit-limit-requests" in response.headers


async def test_a_head_that_comes_with_a_heartbeat_tells_them() -> None:
    settings = limited(rpm=10) | {"heartbeat": 0.05}
    async with (
        EmulatedNode(prefill_tps=40.0) as node,
        bare_gateway(a_spec("n", node.url), settings=settings, serving=True) as gateway,
    ):
        response = await gateway.chat("word " * 20, headers=BEARER, stream=True, max_tokens=2)
        assert response.text.startswith(":")
        assert response.headers["x-ratelimit-remaining-requests"] == "9"


async def test_pages_of_other_origins_may_read_them() -> None:
    exposed = {name.lower() for name in EXPOSED_HEADERS}
    async with (
        EmulatedNode() as node,
        bare_gateway(
            a_spec("n", node.url), settings=limited(rpm=10, tpm=10_000), serving=True
        ) as gateway,
    ):
        response = await gateway.public.post(
            "/v1/messages",
            json={"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
            headers=BEARER,
        )
        names = set(told(response.headers))
        assert len(names) == 12
        assert names <= exposed


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [({"models": ["other"]}, 403, "model_not_allowed"), ({"max_class": "batch"}, 200, None)],
)
async def test_models_and_class_of_limits_hold(
    limits: dict[str, Any], status: int, code: str | None
) -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("n", node.url), settings=limited(**limits), serving=True) as gateway,
    ):
        response = await gateway.chat(
            headers=BEARER | {"X-Priority": "normal"}, model="demo", max_tokens=2
        )
        assert response.status_code == status
        assert response.headers.get("x-gateway-reason") == code
        if status == 200:
            assert response.headers["x-gateway-class"] == "batch"
        listed = (await gateway.public.get("/v1/models", headers=BEARER)).json()["data"]
        assert [one["id"] for one in listed] == (["demo"] if status == 200 else [])
        assert_no_account_is_open(gateway)


def assert_no_account_is_open(gateway: BareGateway) -> None:
    gateway.bus.flush()
    for account in all_accounts(gateway.handler.meter.book):
        assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)


async def test_several_prompts_are_one_request_with_the_tokens_of_all() -> None:
    async with (
        EmulatedNode(slots=4) as node,
        bare_gateway(
            a_spec("n", node.url), settings=limited(rpm=9, tpm=9000), serving=True
        ) as gateway,
    ):
        response = await gateway.public.post(
            "/v1/completions",
            json={"prompt": ["one", "two", "three"], "max_tokens": 4},
            headers=BEARER,
        )
        assert response.status_code == 200
        assert response.headers["x-ratelimit-remaining-requests"] == "8"
        assert_no_account_is_open(gateway)
        (account,) = all_accounts(gateway.handler.meter.book)
        used = response.json()["usage"]["total_tokens"]
        assert account.tokens.value(gateway.clock()) == used
