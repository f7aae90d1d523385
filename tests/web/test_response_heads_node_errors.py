"""A node's error, in the form that each API's clients get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.virtual import in_virtual_time

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
