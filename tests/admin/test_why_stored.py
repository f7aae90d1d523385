"""Lines of batches and background responses are explained by the ids that their callers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.polling import eventually
from tests.stored.batch_gateway import HEADERS, ended, gateway_over, lines, output, submit

pytestmark = pytest.mark.usefixtures("hurried")

SECRET = "write text"


async def why(running: Running, name: str) -> dict[str, Any]:
    response = await running.admin.get(f"/admin/requests/{name}/why")
    assert response.status_code == 200, response.text
    assert SECRET not in response.text
    (request,) = response.json()["requests"]
    found: dict[str, Any] = request
    return found


async def test_lines_of_batches_and_background_responses_are_explained_by_their_ids(
    tmp_path: Path,
) -> None:
    async with gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=400)) as running:
        batch = await ended(running, await submit(running, lines(4)))
        results = await output(running, batch["output_file_id"])
        line = await why(running, results[-1]["response"]["request_id"])
        body = {"model": "demo", "input": f"{SECRET} 1", "background": True, "store": True}
        response = await running.client.post("/v1/responses", json=body, headers=HEADERS)
        assert response.status_code == 200, response.text
        path = f"/v1/responses/{response.json()['id']}"

        async def completed() -> bool | None:
            shown = await running.client.get(path, headers=HEADERS)
            return shown.json()["status"] == "completed" or None

        await eventually(completed)
        await until(lambda: len(running.gateway.registry) == 0)
        background = await why(running, response.json()["id"])
    assert line["class"] == "batch"
    assert line["decisions"][-1]["kind"] == "granted"
    for request in (line, background):
        assert request["state"] == "finished"
        assert request["decisions"][-1]["actual"]["outcome"] == "ok"
