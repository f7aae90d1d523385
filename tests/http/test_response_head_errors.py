"""Heads of a node's errors, and of responses under limits."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.callers.keys import new_key
from gateway.http.heads import EXPOSED_HEADERS
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway

SAID = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
ANTHROPICS = '{"type":"error","error":{"type":"invalid_request_error","message":"No such thing"}}'


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
OTHERS = [path for path in GENERATION_PATHS if path != MESSAGES]


NO_JSON = "The node answered with status 400."


@in_virtual_time
async def test_a_nodes_error_passes_unchanged_or_gets_a_message_and_anthropics_form(
    tmp_path: Path,
) -> None:
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:

        @each_case(
            ("path", "status", "said", "reason", "anthropics"),
            [
                *((path, 400, SAID, "invalid_request", ()) for path in OTHERS),
                (CHAT, 413, SAID, "request_too_large", ()),
                (CHAT, 422, SAID, "invalid_request", ()),
                (CHAT, 500, SAID, "node_error", ()),
                (MESSAGES, 400, ANTHROPICS, "invalid_request", ()),
                *((path, 413, "", "request_too_large", ()) for path in OTHERS),
                *((path, 400, SAID, "invalid_request", ("invalid_request_error", "No such thing"))
                  for path in (MESSAGES, f"{MESSAGES}/count_tokens")),
                (MESSAGES, 413, SAID, "request_too_large", ("request_too_large", "No such thing")),
                (MESSAGES, 500, SAID, "node_error", ("api_error", "No such thing")),
                *((MESSAGES, 400, said, "invalid_request", ("invalid_request_error", NO_JSON))
                  for said in ("<html>no</html>", "", '{"error":7}')),
            ],
        )  # fmt: skip
        async def check(
            path: str, status: int, said: str, reason: str, anthropics: tuple[str, ...]
        ) -> None:
            node.faults.next("status", status=status, body=said, path=path)
            reply = await proxy.ask(path, messages=[], stream=status == 413)
            assert (reply.status_code, reply.headers["x-gateway-reason"]) == (status, reason)
            if anthropics or not said:
                assert reply.headers["content-type"] == "application/json"
            if anthropics:
                assert reply.json() == {
                    "type": "error",
                    "error": dict(zip(("type", "message"), anthropics, strict=True)),
                    "request_id": reply.headers["request-id"],
                }
            elif said:
                assert reply.text == said
            else:
                assert reply.json()["error"]["code"] == reason

        await check()


KEY = new_key("lim")
BEARER = {"Authorization": f"Bearer {KEY.text}"}


async def test_a_response_and_a_refusal_tell_what_is_left_of_limits() -> None:
    limits = {"rpm": 3, "tpm": 5000}
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256, "limits": limits}]}
    async with bare_gateway(EmulatedNode(), settings=settings) as gateway:
        first = await gateway.chat(headers=BEARER, max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
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
        # Anthropic's API has Anthropic's too, and web pages may read all.
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        third = await gateway.public.post(MESSAGES, json=body, headers=BEARER)
        assert third.headers["anthropic-ratelimit-requests-limit"] == "3"
        assert third.headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = third.headers["anthropic-ratelimit-requests-reset"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reset)
        names = {name for name in third.headers if "ratelimit" in name}
        assert len(names) == 12
        assert names <= {name.lower() for name in EXPOSED_HEADERS}
        refused = await gateway.chat(headers=BEARER)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        wrong = await gateway.public.post(CHAT, content=b"{", headers=BEARER)
        assert wrong.status_code == 400
        for told in (refused, wrong):
            assert told.headers["x-ratelimit-remaining-requests"] == "0"
