"""Streams of real servers that are cut within a stop sequence still end at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api import sse
from tests.gateways import Running, running_gateway
from tests.reliability.cuts import SETTINGS
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

TALK = {"messages": [{"role": "user", "content": "Hello there"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**TALK, "stop": []},
    "/v1/completions": {"prompt": "Hello there", "stop": []},
    "/v1/messages": {**TALK, "stop_sequences": []},
}
TOKENS = 18
HALF_A_WORD = 2


async def streamed(running: Running, path: str, stop: str | None) -> tuple[str, str, int]:
    """Text, finish reason and number of events with data of a stream."""
    body = BODIES[path] | {"stream": True, "temperature": 0, "max_tokens": TOKENS}
    for name in ("stop", "stop_sequences"):
        if name in body:
            body[name] = [stop] if stop else []
    async with running.client.stream("POST", path, json=body) as reply:
        data = [sse.payload(event) for event in sse.split(await reply.aread())]
    text, reason = "", ""
    for value in [msgspec.json.decode(one) for one in data if one and one != b"[DONE]"]:
        assert not value.get("error"), value
        for choice in value.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
        delta = value.get("delta", {})
        text += delta.get("text") or ""
        reason = delta.get("stop_reason") or reason
    return text, reason, sum(1 for one in data if one)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stop_sequence_ends_the_answer_across_a_splice_point(
    tmp_path: Path, path: str
) -> None:
    plan = CutPlan()
    retries = {"backoff": 0.0, "quarantine": 0, "budget_min": 1000}
    async with (
        start_demo_servers(2, slots=1, extra=("--exact",)) as servers,
        cutting_proxies(servers, plan) as urls,
        running_gateway(tmp_path, urls, SETTINGS | {"retries": retries}) as running,
    ):
        free, _, _ = await streamed(running, path, None)
        words = free.split(" ")
        # From the middle of one word, which is a token, to that of another.
        end = " ".join(words[4:7])[HALF_A_WORD:-HALF_A_WORD]
        assert free.count(end) == 1
        whole, reason, events = await streamed(running, path, end)
        assert whole == free.partition(end)[0]
        assert reason == ("stop_sequence" if "stop_sequences" in BODIES[path] else "stop")
        for after in range(2, events - 2):
            cuts = plan.cuts
            plan.arm(after)
            assert (await streamed(running, path, end))[:2] == (whole, reason), after
            assert plan.cuts == cuts + 1
