"""Groups of keys, what is used of limits, and names of keys, through the admin API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from gateway.callers.keys import new_key
from tests.admin.test_keys import CHAT, error, keyed_gateway, made_key
from tests.callers.metered_gateway import recorded
from tests.gateways import Running, until
from tests.stored.receivers import SECRET, receiving, status

pytestmark = pytest.mark.usefixtures("hurried")

OWN = new_key("own")


async def post(running: Running, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)


@asynccontextmanager
async def gateway(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    own = {"id": OWN.id, "sha256": OWN.sha256, "name": "owner"}
    async with keyed_gateway(folder, {"keys": [own], **settings}) as both:
        yield both


async def test_a_groups_limits_hold_for_the_next_request_of_its_keys_together(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (running, admin):
        made = await admin.put("/admin/groups/team", json={"limits": {"rpm": 2}})
        assert made.status_code == 200
        alice = await made_key(admin, name="alice", group="team")
        bob = await made_key(admin, name="bob", group="team")
        assert alice["warnings"] == []
        statuses = [(await post(running, one["key"])).status_code for one in (alice, bob, alice)]
        assert statuses == [200, 200, 429]
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["keys"], group["limits"]) == (2, {"rpm": 2})
        (limit,) = group["standing"]
        assert (limit["of"], limit["limit"], limit["used"], limit["remaining"]) == (
            "group", "rpm", 2, 0,
        )  # fmt: skip
        shown = (await admin.get("/admin/keys/alice")).json()
        assert [one["of"] for one in shown["standing"]] == ["group"]
        await admin.put("/admin/groups/team", json={"limits": {"rpm": 20}})
        assert (await post(running, alice["key"])).status_code == 200
        assert (await admin.delete("/admin/groups/team")).status_code == 200
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["origin"], group["standing"]) == ("undefined", [])
        actions = [one["action"] for one in (await admin.get("/admin/audit")).json()["entries"]]
        assert (actions.count("groups.set"), actions.count("groups.remove")) == (2, 1)


async def test_bodies_are_as_the_openapi_document_says(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (running, admin):
        document = (await admin.get("/openapi.json")).json()

        def check(name: str, body: object) -> None:
            schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            jsonschema.validate(body, schema)
            assert isinstance(body, dict)
            assert body.keys() <= document["components"]["schemas"][name]["properties"].keys()

        made = (await admin.put("/admin/groups/team", json={"limits": {"rpm": 2}})).json()
        key = await made_key(admin, name="alice", group="team", limits={"budget": "1/day"})
        await post(running, key["key"])
        check("KeyGroup", made)
        for group in (await admin.get("/admin/groups")).json()["groups"]:
            check("KeyGroup", group)
        check("ApiKey", (await admin.get("/admin/keys/alice")).json())
        for one in (await admin.get("/admin/keys")).json()["keys"]:
            check("ApiKey", one)


async def test_a_key_shows_when_it_was_used_last_and_what_is_left_of_its_limits(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (running, admin):
        key = await made_key(admin, name="<b>alice</b>", limits={"tokens_per_day": 100_000})
        path = f"/admin/keys/{key['id']}"
        assert (await admin.get(path)).json()["last_used_at"] is None
        answer = await post(running, key["key"])
        await recorded(running, 1)
        shown = (await admin.get(path)).json()
        (limit,) = shown["standing"]
        assert limit["used"] > 0
        assert limit["remaining"] == 100_000 - limit["used"]
        await admin.post(f"{path}/rotate", json={})
        (listed, _) = (await admin.get("/admin/keys")).json()["keys"]
        assert listed["previous_until"] is not None
        assert listed["last_used_at"] == shown["last_used_at"] is not None
        assert "users" not in listed
        # Its name is told where its request is explained.
        explained = await admin.get(f"/admin/requests/{answer.headers['x-request-id']}/why")
        (request,) = explained.json()["requests"]
        assert (request["caller"], request["caller_name"]) == (key["id"], "<b>alice</b>")


async def test_a_group_that_nobody_has_defined_is_a_problem_until_it_is(tmp_path: Path) -> None:
    """A start and a reload warn of it."""
    own = {"id": OWN.id, "sha256": OWN.sha256, "name": "owner", "group": "nigth"}

    def lines(event: str) -> int:
        return (tmp_path / "gateway.log").read_text().count(f'"event":"{event}"')

    async with gateway(tmp_path, keys=[own]) as (running, admin):

        async def problems() -> set[str]:
            return {one.id for one in await running.gateway.live.view.read_problems()}

        await until(lambda: lines("group") == 1)
        running.write_settings({"keys": [own], "queue": {"max": 99}})
        await running.gateway.reload()
        await until(lambda: lines("group") == 2)
        assert "groups_undefined" in await problems()
        await admin.put("/admin/groups/nigth", json={})
        assert "groups_undefined" not in await problems()
        before = lines("settings changed")
        running.write_settings({"keys": [own], "queue": {"max": 98}})
        await running.gateway.reload()
        await until(lambda: lines("settings changed") > before)
        assert lines("group") == 2


async def test_a_quota_that_runs_out_is_a_problem_a_metric_and_one_webhook_over_restarts(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    async with receiving(status(200)) as receiver:
        targets = [
            {
                "url": f"http://127.0.0.1:{receiver.port}/{name}",
                "secret_file": str(tmp_path / "secret"),
                "allow_private": True,
                **events,
            }
            for name, events in (("quotas", {"events": ["quota.near", "quota.spent"]}), ("all", {}))
        ]
        chosen = {"webhooks": {"targets": targets}}
        async with gateway(tmp_path, **chosen) as (running, admin):
            key = await made_key(admin, name="alice", limits={"tokens_per_day": 10})
            assert (await post(running, key["key"])).status_code == 200
            await running.gateway.background.quotas.look()
            await receiver.came(1)
            (used,) = running.gateway.quotas.used
            body = json.loads(receiver.requests[0].body)
            assert receiver.requests[0].line.startswith("POST /quotas ")
            assert (body["data"]["key"], body["data"]["name"]) == (key["id"], "alice")
            assert body["type"] == ("quota.spent" if used.spent else "quota.near")
            assert body["data"]["used"] == used.standing.used
            page = (await admin.get("/metrics")).text
            assert f'llama_gateway_quota_used_ratio{{of="key",id="{key["id"]}"' in page
            assert f'llama_gateway_key_info{{key="{key["id"]}",name="alice"}} 1' in page
            found = await running.gateway.live.view.read_problems()
            (problem,) = [one for one in found if one.id.startswith("quota:")]
            assert (problem.caller, problem.caller_name) == (key["id"], "alice")
            # It tells what is used up, and a viewer not by whom.
            assert problem.id.startswith("quota:key:tokens_per_day:day:")
            assert key["id"] not in problem.id
        async with gateway(tmp_path, **chosen, telemetry={"key_names": False}) as (running, admin):
            watch = running.gateway.background.quotas
            await until(lambda: bool(watch.used))
            await watch.look()
            assert "llama_gateway_key_info{" not in (await admin.get("/metrics")).text
            sender = running.gateway.background.webhook_sender
            assert sender is not None
            await until(lambda: sender.waiting == 0)
        assert len(receiver.requests) == 1


async def test_a_gateway_without_a_store_shows_groups_and_keeps_none(tmp_path: Path) -> None:
    chosen = {"store": {"url": "off"}, "groups": {"team": {"limits": {"rpm": 5}}}}
    async with gateway(tmp_path, **chosen) as (_, admin):
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["name"], group["origin"]) == ("team", "settings")
        assert error(await admin.put("/admin/groups/b", json={}))[:2] == (501, "not_supported")
        (key,) = (await admin.get("/admin/keys")).json()["keys"]
        assert (key["standing"], key["last_used_at"]) == ([], None)
