from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.listeners import CorsSpec
from gateway.http.request_head import cors_headers
from gateway.http.response_head import EXPOSED_HEADERS
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, public, request

PAGE = "https://chat.example"
ALLOW = b"access-control-allow-origin"


def fields(cors: CorsSpec, *origins: str) -> dict[bytes, bytes]:
    return dict(cors_headers(cors, [(b"origin", origin.encode()) for origin in origins]))


def test_a_request_without_origin_gets_no_cors_headers() -> None:
    assert fields(CorsSpec(origins=("*",))) == {}


def test_any_page_may_read_if_all_origins_are_allowed() -> None:
    found = fields(CorsSpec(origins=("*",)), PAGE)
    assert found[ALLOW] == b"*"
    assert found[b"access-control-expose-headers"].decode().split(", ") == list(EXPOSED_HEADERS)
    assert b"access-control-allow-credentials" not in found


def test_an_allowed_page_may_read_and_caches_vary_by_origin() -> None:
    found = fields(CorsSpec(origins=(PAGE, "https://other.example")), PAGE)
    assert (found[ALLOW], found[b"vary"]) == (PAGE.encode(), b"Origin")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", PAGE + ".evil.example", "null", "*", ""]
)
def test_a_page_of_another_origin_may_not_read(origin: str) -> None:
    assert fields(CorsSpec(origins=(PAGE,)), origin) == {b"vary": b"Origin"}


def test_credentials_are_allowed_for_named_origins_only() -> None:
    cors = CorsSpec(origins=(PAGE,), credentials=True)
    assert fields(cors, PAGE)[b"access-control-allow-credentials"] == b"true"
    assert b"access-control-allow-credentials" not in fields(cors, "https://evil.example")


@in_virtual_time
async def test_an_allowed_page_may_read_every_kind_of_response(tmp_path: Path) -> None:
    settings = {"cors": {"origins": [PAGE]}, "heartbeat": 0.1}
    async with public(tmp_path, settings) as gate:
        origin = f"Origin: {PAGE}"
        short = {**HELLO, "max_tokens": 2}
        kinds = {
            "plain": request(short, origin),
            "stream": request({**short, "stream": True}, origin),
            "error": request(b"{", origin),
            "nowhere": request(short, origin, path="/nowhere"),
            "models": request(b"", origin, method="GET", path="/v1/models"),
        }
        for kind, data in kinds.items():
            found = await gate.ask(data)
            assert found.headers["access-control-allow-origin"] == PAGE, kind
            assert "X-Gateway-Reason" in found.headers["access-control-expose-headers"], kind
        gate.node.faults.next("hang", after_events=0, seconds=0.3)
        beaten = await gate.ask(kinds["stream"])
        assert beaten.body.startswith(b":\n")
        assert beaten.headers["access-control-allow-origin"] == PAGE
        stranger = await gate.ask(request(short, "Origin: https://evil.example"))
        assert "access-control-allow-origin" not in stranger.headers


@in_virtual_time
async def test_a_preflight_request_is_answered(tmp_path: Path) -> None:
    async with public(tmp_path, {"cors": {"origins": [PAGE]}}) as gate:
        found = await gate.ask(
            request(
                b"",
                f"Origin: {PAGE}",
                "Access-Control-Request-Method: POST",
                "Access-Control-Request-Headers: authorization, content-type",
                method="OPTIONS",
                path=CHAT,
            )
        )
        assert found.status == 200
        assert found.headers["access-control-allow-origin"] == PAGE
        assert "POST" in found.headers["access-control-allow-methods"]
        assert "authorization" in found.headers["access-control-allow-headers"].lower()
        assert gate.node.requests == 0
