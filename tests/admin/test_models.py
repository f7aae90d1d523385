from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

ALIASES: dict[str, Any] = {
    "models": {"helper": {"use": ["demo", "org/other"]}, "alias": {"use": "demo"}}
}


@asynccontextmanager
async def two_models(
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[BareGateway, EmulatedNode]]:
    async with bare_gateway(
        one := EmulatedNode(slots=1, decode_tps=20),
        EmulatedNode(slots=1, decode_tps=20, model="org/other"),
        settings=settings,
        serving=True,
    ) as gateway:
        yield gateway, one


async def act(gateway: BareGateway, name: str, action: str) -> dict[str, Any]:
    response = await gateway.admin.post(f"/admin/models/{name}/{action}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@in_virtual_time
async def test_a_paused_model_takes_no_request_and_others_do() -> None:
    async with two_models() as (gateway, _):
        for _ in range(2):  # Twice is the same as once.
            assert (await act(gateway, "demo", "pause"))["paused"]
        refused = await gateway.chat(model="demo")
        served = await gateway.chat(model="org/other")
        listed = await gateway.public.get("/v1/models")
        status = (await gateway.admin.get("/admin/status")).json()
        metrics = (await gateway.admin.get("/metrics")).text
        for _ in range(2):
            assert not (await act(gateway, "demo", "resume"))["paused"]
        again = await gateway.chat(model="demo")
        after = (await gateway.admin.get("/metrics")).text
        unknown = await gateway.admin.post("/admin/models/dem/pause")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-should-retry"] == "false"
    assert (served.status_code, again.status_code) == (200, 200)
    assert {one["id"] for one in listed.json()["data"]} == {"demo", "org/other"}
    assert status["models_paused"] == ["demo"]
    assert 'llama_gateway_model_paused{model="demo"} 1' in metrics
    assert "llama_gateway_model_paused{" not in after
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert "'demo'" in error_of(unknown)["message"]


@in_virtual_time
async def test_an_alias_goes_on_with_the_models_that_are_left() -> None:
    async with two_models(ALIASES) as (gateway, _):
        await act(gateway, "demo", "pause")
        helped = await gateway.chat(model="helper")
        refused = await gateway.chat(model="alias")
        await act(gateway, "org/other", "pause")
        none_left = await gateway.chat(model="helper")
        models = (await gateway.admin.get("/admin/models")).json()["models"]
        await act(gateway, "demo", "resume")
        await act(gateway, "helper", "pause")
        by_alias = await gateway.chat(model="helper")
        by_name = await gateway.chat(model="demo")
    assert helped.status_code == 200
    assert {one.status_code for one in (refused, none_left, by_alias)} == {503}
    assert by_name.status_code == 200
    paused = {one["name"] for one in models if one["paused"]}
    assert paused == {"demo", "org/other", "helper", "alias"}
    helper = next(one for one in models if one["name"] == "helper")
    assert helper["stands_for"] == ["demo", "org/other"]
    assert (helper["nodes"], helper["slots_total"]) == ({"ready": 2}, 2)


@pytest.mark.parametrize(("name", "other"), [("hidden", "nick"), ("nick", "hidden")])
@in_virtual_time
async def test_a_pause_and_a_cap_hold_for_a_models_other_names(name: str, other: str) -> None:
    capped = {"models": {"hidden": {"max_tokens": 2}}}
    async with bare_gateway(
        EmulatedNode(model="hidden", aliases=("nick",)), settings=capped, serving=True
    ) as gateway:
        served = await gateway.chat(model="nick", max_tokens=50)
        paused = await act(gateway, name, "pause")
        refused = await gateway.chat(model=other)
        models = (await gateway.admin.get("/admin/models")).json()["models"]
        status = (await gateway.admin.get("/admin/status")).json()
        await act(gateway, name, "resume")
        again = await gateway.chat(model="nick")
    assert served.json()["usage"]["completion_tokens"] == 2
    assert paused["paused"]
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert [(one["name"], one["paused"]) for one in models] == [("hidden", True), ("nick", True)]
    assert status["models_paused"] == [name]
    assert again.status_code == 200
