"""The alias `*`, which takes every unknown model name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.access.keys import new_key
from gateway.fleet.node import NodeState
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import CHAT

DEAD = "http://127.0.0.1:9"
PROMPT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TO_DEMO: dict[str, Any] = {"models": {"*": {"use": "demo"}, "alias": {"use": "other"}}}


async def asked(running: Running, model: str | None, key: str = "", **body: Any) -> httpx.Response:
    headers = {"x-api-key": key} if key else {}
    named = {} if model is None else {"model": model}
    return await running.client.post(CHAT, json={**PROMPT, **named, **body}, headers=headers)


def outcome(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.headers.get("x-gateway-reason")


@pytest_asyncio.fixture
async def node() -> AsyncIterator[EmulatedNode]:
    async with EmulatedNode() as one:
        yield one


@pytest.mark.parametrize("name", ["gpt-4o", "*", "a/b:c", "DEMO", "x" * 10_000, "\u00e9\n"])
async def test_an_unknown_name_is_served_by_the_catch_all(
    name: str, node: EmulatedNode, tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, [node.url], TO_DEMO) as running:
        answer = await asked(running, name)
        assert answer.status_code == 200
        assert answer.headers["x-gateway-node"] == "node-0"


async def test_the_catch_all_leaves_known_names_alone(node: EmulatedNode, tmp_path: Path) -> None:
    declared = {"name": "other", "url": DEAD, "model": "declared"}
    settings = TO_DEMO | {"retries": {"wait_for_node": 0}}
    async with running_gateway(tmp_path, [node.url, declared], settings) as running:
        assert (await asked(running, "demo")).status_code == 200
        # Down, but known: the catch-all does not replace it.
        assert outcome(await asked(running, "declared")) == (503, "no_node")
        # An alias for a model that nobody serves.
        for answer in (await asked(running, "alias"), await running.client.get("/v1/models/alias")):
            assert outcome(answer) == (404, "model_not_found")
            assert "'alias' (it stands for 'other') does not exist here" in answer.text


@pytest.mark.parametrize("padding", ["", "x" * 100_000])
async def test_a_request_without_a_model_gets_the_catch_alls_where_there_are_several(
    node: EmulatedNode, tmp_path: Path, padding: str
) -> None:
    declared = {"name": "other", "url": DEAD, "model": "declared"}
    async with running_gateway(tmp_path, [declared, node.url], TO_DEMO) as running:
        answer = await asked(running, None, padding=padding)
        assert (answer.status_code, answer.headers["x-gateway-node"]) == (200, "node-1")


async def test_a_request_without_a_model_is_told_of_the_setting_where_nothing_applies(
    node: EmulatedNode, tmp_path: Path
) -> None:
    declared = {"name": "other", "url": DEAD, "model": "declared"}
    key = new_key()
    spec = {"id": key.id, "sha256": key.sha256, "models": ["demo", "declared"]}
    settings = {**TO_DEMO, "keys": [spec]}
    async with running_gateway(tmp_path, [declared, node.url], settings) as running:
        # A key that may not use the catch-all.
        answer = await asked(running, None, key.text)
        assert outcome(answer) == (400, "invalid_request")
        for word in ("default_model", "'declared'", "'demo'"):
            assert word in answer.json()["error"]["message"]


@in_virtual_time
async def test_a_model_of_a_down_node_is_known(tmp_path: Path) -> None:
    settings = TO_DEMO | {"retries": {"wait_for_node": 0}}
    async with (
        EmulatedNode() as demo,
        EmulatedNode(model="phi") as phi,
        running_gateway(tmp_path, [demo.url, phi.url], settings) as running,
    ):
        nodes = running.gateway.fleet.nodes
        await until(lambda: nodes["node-1"].state is NodeState.READY)
        await phi.kill()
        await until(lambda: nodes["node-1"].state is NodeState.DOWN)
        assert outcome(await asked(running, "phi")) == (503, "no_node")
        assert (await asked(running, "gpt-4o")).status_code == 200


@in_virtual_time
async def test_a_node_that_never_answered_does_not_block_unknown_names(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as demo,
        running_gateway(tmp_path, [demo.url, DEAD], TO_DEMO) as running,
    ):
        nodes = running.gateway.fleet.nodes
        await until(lambda: nodes["node-1"].state is NodeState.DOWN)
        assert (await asked(running, "gpt-4o")).status_code == 200


@in_virtual_time
async def test_the_catch_all_waits_for_a_starting_node_to_report_its_models(
    tmp_path: Path,
) -> None:
    async with EmulatedNode() as demo, EmulatedNode(model="phi") as phi:
        phi.loading = True
        async with running_gateway(tmp_path, [demo.url, phi.url], TO_DEMO) as running:
            nodes = running.gateway.fleet.nodes
            await until(lambda: nodes["node-1"].state is NodeState.LOADING)
            assert outcome(await asked(running, "phi")) == (503, "no_node")
            assert (await asked(running, "demo")).status_code == 200
            phi.loading = False
            await until(lambda: nodes["node-1"].state is NodeState.READY)
            assert (await asked(running, "phi")).headers["x-gateway-node"] == "node-1"
            assert (await asked(running, "gpt-4o")).headers["x-gateway-node"] == "node-0"


async def test_the_rules_of_the_catch_all_and_its_target_apply(
    node: EmulatedNode, tmp_path: Path
) -> None:
    models = {
        "*": {"use": "inner", "set": {"temperature": 0.5}, "strip": ["logit_bias"]},
        "inner": {"use": ["nobody", "demo"], "default": {"top_k": 7}, "max_tokens": 5},
    }
    async with running_gateway(tmp_path, [node.url], {"models": models}) as running:
        body: dict[str, Any] = {"temperature": 2, "logit_bias": {"1": 1}, "max_tokens": 99}
        assert (await asked(running, "gpt-4o", **body)).status_code == 200
        seen = json.loads(node.seen[-1].body)
        assert (seen["temperature"], seen["top_k"], seen["max_tokens"]) == (0.5, 7, 5)
        assert "logit_bias" not in seen


async def test_a_key_needs_the_name_or_the_star(node: EmulatedNode, tmp_path: Path) -> None:
    allowed = {
        "all": None, "demo": ["demo"], "named": ["gpt-4o"], "star": ["*"], "both": ["demo", "*"]
    }  # fmt: skip
    made = {name: new_key(name) for name in allowed}
    keys = [
        {"id": key.id, "sha256": key.sha256, "models": allowed[name]} for name, key in made.items()
    ]
    served = {
        "all": {"demo", "gpt-4o", "o3"}, "demo": {"demo"}, "named": {"gpt-4o"},
        "star": {"gpt-4o", "o3"}, "both": {"demo", "gpt-4o", "o3"},
    }  # fmt: skip
    async with running_gateway(tmp_path, [node.url], TO_DEMO | {"keys": keys}) as running:
        for name, key in made.items():
            listed = await running.client.get("/v1/models", headers={"x-api-key": key.text})
            names = {card["id"] for card in listed.json()["data"]}
            # Of the names that the catch-all takes, only those of the key are listed.
            assert names == served[name] & {"demo", *(allowed[name] or ())}
            for model in ("demo", "gpt-4o", "o3"):
                good = (200, None) if model in served[name] else (403, "model_not_allowed")
                assert outcome(await asked(running, model, key.text)) == good, (name, model)
                path, headers = f"/v1/models/{model}", {"x-api-key": key.text}
                found = await running.client.get(path, headers=headers)
                assert (found.status_code == 200) == (model in served[name]), (name, model)


async def test_models_are_listed_without_the_star_and_found_by_any_name(
    node: EmulatedNode, tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, [node.url], TO_DEMO) as running:
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["demo"]
        card = (await running.client.get("/v1/models/gpt-4o")).json()
        assert card["id"] == "gpt-4o"
        sizes = [
            (await running.client.get("/props", params={"model": name})).json()
            for name in ("demo", "gpt-4o")
        ]
        assert sizes[0] == sizes[1]


async def test_names_invented_by_clients_do_not_become_labels(
    node: EmulatedNode, tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, [node.url], TO_DEMO) as running:
        for number in range(5):
            assert (await asked(running, f"made-up-{number}")).status_code == 200
        async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
            text = (await admin.get("/metrics")).text
        assert "made-up" not in text
        assert 'model="demo"' in text
        assert not any(
            "made-up" in str(key) for key in running.gateway.fleet.model_index.cached_lookups
        )


async def test_without_a_catch_all_an_unknown_name_is_404(
    node: EmulatedNode, tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, [node.url], {}) as running:
        for name in ("gpt-4o", "*"):
            assert outcome(await asked(running, name)) == (404, "model_not_found")
        assert running.gateway.fleet.model_index.cached_lookups == {}
