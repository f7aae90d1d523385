"""A stored response on a real server goes on after its process has died, with the uncut text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.stored.response_events import ResponseEvents
from tests.gateways import running_gateway
from tests.servers import start_demo_servers
from tests.stored.responses_over_nodes import (
    begin,
    check_whole,
    finish,
    logged,
    now,
    open_logs,
    run,
    text_of,
)
from tests.stored.test_response_events import cut_run

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
INPUT = [{"role": "user", "content": "tell me a story"}]
BODY = {"input": INPUT, "instructions": "be long", "max_output_tokens": 300, "temperature": 0,
        "seed": 7, "ignore_eos": True}  # fmt: skip


@pytest.mark.smoke
async def test_a_real_response_goes_on_from_its_log(tmp_path: Path) -> None:
    settings = {"health": {"interval": 0.5}}
    async with (
        start_demo_servers(2, slots=1, context=4096, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
        open_logs(tmp_path) as logs,
    ):
        app = running.gateway
        whole = await begin(logs, **BODY)
        first = await run(app, whole, owner="anonymous:127.0.0.1", **BODY)
        await whole.close()
        expected = await logged(logs, whole.name)
        check_whole(expected, "response.incomplete")
        for cut in (1, 2, 7, 30, 101, 222, 299):
            events = await begin(logs, **BODY)
            await cut_run(app, events, cut, owner="anonymous:127.0.0.1", **BODY)
            events = await ResponseEvents.reopen(logs, events.name, now)
            assert events.begun is not None
            again = await run(app, events, owner="anonymous:127.0.0.1", **BODY)
            await finish(events, again)
            await events.close()
            values = await logged(logs, events.name)
            response = check_whole(values, "response.incomplete")
            assert text_of(values) == text_of(expected), f"cut after {cut} tokens"
            usage = expected[-1]["response"]["usage"]
            assert response["usage"]["input_tokens"] == usage["input_tokens"]
            assert response["usage"]["output_tokens"] == usage["output_tokens"] == 300
            assert again.record.completion_tokens == first.record.completion_tokens == 300
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
