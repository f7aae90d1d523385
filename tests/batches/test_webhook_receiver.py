"""The receiver of docs/webhooks.md, run as it stands there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gateway.batches.webhook_receivers import WebhookPoster
from gateway.batches.webhooks import WebhookEvent
from gateway.config.webhooks import WebhookUrl
from gateway.transport.resolver import Resolver
from tests.batches.receivers import LIMIT, OTHER_SECRET, SECRET, target

PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


async def test_the_receiver_of_the_page_takes_what_is_signed_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("OPENAI_WEBHOOK_SECRET", SECRET)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    server = uvicorn.Server(
        uvicorn.Config(names["app"], port=0, log_level="error", lifespan="off", ws="none")
    )
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(server, "capture_signals", contextlib.nullcontext)
    serving = asyncio.create_task(server.serve())
    try:
        for _ in range(int(LIMIT / 0.01)):
            if server.started:
                break
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = WebhookUrl.parse(f"http://127.0.0.1:{port}/hooks")
        body = WebhookEvent("batch.completed", "batch_1", "alice", None, time.time()).body()
        poster = WebhookPoster(Resolver(), time.time)
        results = [
            await poster.post(target(str(url), *secrets), url, "wh_1", body, 10.0)
            for secrets in ((SECRET,), (OTHER_SECRET, SECRET), (OTHER_SECRET,))
        ]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, LIMIT)
    assert [result.status for result in results] == [204, 204, 400]
    # The second was the same event again.
    assert capsys.readouterr().out == "batch.completed batch_1\n"
