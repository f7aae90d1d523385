"""Lines of batches and background responses are explained by the ids that their callers have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import Running, until
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


async def test_a_line_of_a_batch_is_explained_by_the_request_id_of_its_output(
    tmp_path: Path,
) -> None:
    async with gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=400)) as running:
        batch = await ended(running, await submit(running, lines(4)))
        results = await output(running, batch["output_file_id"])
        request = await why(running, results[-1]["response"]["request_id"])
    assert (request["state"], request["class"]) == ("finished", "batch")
    assert request["decisions"][-1]["kind"] == "granted"
    assert request["decisions"][-1]["actual"]["outcome"] == "ok"


async def test_a_background_response_is_explained_by_its_id(tmp_path: Path) -> None:
    async with gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=400)) as running:
        body = {"model": "demo", "input": f"{SECRET} 1", "background": True, "store": True}
        response = await running.client.post("/v1/responses", json=body, headers=HEADERS)
        assert response.status_code == 200, response.text
        id_ = response.json()["id"]
        async with asyncio.timeout(30):
            while True:
                shown = await running.client.get(f"/v1/responses/{id_}", headers=HEADERS)
                if shown.json()["status"] == "completed":
                    break
                await asyncio.sleep(0.05)
        await until(lambda: len(running.gateway.registry) == 0)
        request = await why(running, id_)
    assert request["state"] == "finished"
    assert request["decisions"][-1]["actual"]["outcome"] == "ok"
