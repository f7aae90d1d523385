"""What the OpenAPI document says of stored responses and deferred requests is what they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jsonschema

from gateway.web.openapi_background import (
    BACKGROUND_QUERY,
    BACKGROUND_RESPONSES,
    BACKGROUND_STATUSES,
    BACKGROUND_SUMMARIES,
)
from gateway.web.site import SITE_ROUTES
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

UNKNOWN = {
    "/v1/responses/{id}": f"/v1/responses/resp_{'0' * 32}",
    "/v1/background/{id}": f"/v1/background/bg_{'0' * 32}",
}


def check(path: str, value: Any) -> None:
    jsonschema.validate(value, BACKGROUND_RESPONSES[path])


def test_every_path_in_the_background_is_described() -> None:
    routed = {
        route.path if route.method == "GET" else f"{route.method} {route.path}"
        for route in SITE_ROUTES
        if route.path.startswith(("/v1/responses/", "/v1/background/"))
    }
    assert routed == set(BACKGROUND_SUMMARIES) == set(BACKGROUND_STATUSES)
    assert routed == set(BACKGROUND_RESPONSES)
    assert set(BACKGROUND_QUERY) <= routed


async def test_answers_are_as_the_document_says(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        client = running.client
        body = {"model": node.model, "input": "x", "background": True}
        response = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{response['id']}"
        check("/v1/responses/{id}", (await client.get(path)).json())
        items = await client.get(f"{path}/input_items?limit=1&order=asc")
        check("/v1/responses/{id}/input_items", items.json())
        check("POST /v1/responses/{id}/cancel", (await client.post(f"{path}/cancel")).json())
        check("DELETE /v1/responses/{id}", (await client.delete(path)).json())

        body = {"model": node.model, "messages": [{"role": "user", "content": "x"}]}
        taken = await client.post(
            "/v1/chat/completions", json=body, headers={"prefer": "respond-async"}
        )
        assert taken.status_code == 202
        async with asyncio.timeout(20):
            while (answer := await client.get(taken.headers["location"])).status_code == 202:
                check("/v1/background/{id}", answer.json())
                await asyncio.sleep(0.05)
        check("/v1/background/{id}", answer.json())
        assert answer.headers["x-gateway-replay"] == "true"
        gone = await client.delete(taken.headers["location"])
        check("DELETE /v1/background/{id}", gone.json())


async def test_wrong_queries_and_unknown_ids_get_statuses_of_the_document(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        for described, path in UNKNOWN.items():
            answers = [await running.client.get(path), await running.client.delete(path)]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert 404 in BACKGROUND_STATUSES[described]
            assert 404 in BACKGROUND_STATUSES[f"DELETE {described}"]
        path = UNKNOWN["/v1/responses/{id}"]
        for wrong, described in (
            (f"{path}?starting_after=-1", "/v1/responses/{id}"),
            (f"{path}/input_items?limit=0", "/v1/responses/{id}/input_items"),
            (f"{path}/input_items?order=up", "/v1/responses/{id}/input_items"),
        ):
            assert (await running.client.get(wrong)).status_code == 400
            assert 400 in BACKGROUND_STATUSES[described]
