"""What is kept of background requests goes with their time, and what a crash leaves goes too."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from gateway.batches.background_requests import ORPHAN_SECONDS, NewRequest, keep_background
from gateway.batches.folder import ID_FILE
from gateway.batches.request_rows import RequestKind, RequestState
from tests.gateways import running_gateway

DEAD = "http://127.0.0.1:9"


async def test_late_requests_end_and_old_ones_are_removed_with_their_files(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [DEAD], wait_ready=False) as running:
        requests = running.gateway.background.requests
        assert requests is not None
        new = NewRequest(
            RequestKind.RESPONSE, "k1", "/v1/responses", b'{"input": "x", "stream": true}',
            "normal", 0.0, 60.0, echoed={"model": "m"},
        )  # fmt: skip
        late = await requests.add(new)
        old = await requests.add(replace(new, seconds=3600.0))
        await requests.clean()
        found = await requests.wait_ended(late, 20.0)
        await requests.wait_ended(old, 20.0)
        assert found.state is RequestState.EXPIRED
        assert (await requests.response(found))["status"] == "failed"
        events = b"".join([piece async for piece in requests.follow(found)])
        assert events.count(b"event: response.failed\n") == 1
        for row in (late, old):
            await requests.store.run(
                partial(keep_background, ids=[row.id], keep_until=time.time() - 1)
            )
        folder = tmp_path / "state/batches"
        left_over = folder / f"request-{'0' * 32}"
        left_over.write_bytes(b"text")
        before = time.time() - ORPHAN_SECONDS - 10
        os.utime(left_over, (before, before))
        await requests.clean(orphans=True)
        assert [path.name for path in folder.iterdir()] == [ID_FILE]
