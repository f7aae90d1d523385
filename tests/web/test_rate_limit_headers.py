"""What responses tell callers with limits about them, and other callers not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.access.keys import new_key
from gateway.http.response_head import EXPOSED_HEADERS
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.web.bare_gateway import BareGateway, bare_gateway

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
    for account in gateway.handler.meter.book.all_accounts():
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
        (account,) = gateway.handler.meter.book.all_accounts()
        used = response.json()["usage"]["total_tokens"]
        assert account.tokens.value(gateway.clock()) == used
