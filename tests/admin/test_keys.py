"""The keys of a running gateway, through its admin API; the store is a real file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import hash_key, new_key
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import Running, answered, running_gateway, until
from tests.stored.receivers import SECRET, receiving, status
from tests.web.two_keys import reason

pytestmark = pytest.mark.usefixtures("hurried")

OWN = new_key("own")


@asynccontextmanager
async def gateway(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    chosen = {"keys": [{"id": OWN.id, "sha256": OWN.sha256, "name": "owner"}], **settings}
    async with running_gateway(folder, [EmulatedNode(model="mistral-7b")], chosen) as running:
        yield running, running.admin


async def made_key(admin: httpx.AsyncClient, **fields: Any) -> Any:
    return await answered(admin, "/admin/keys", "POST", json=fields)


async def status_with(running: Running, key: str) -> int:
    return (await running.chat(key, max_tokens=1)).status_code


def files_with(folder: Path, text: str) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if text.encode() in file.read_bytes()]


async def test_a_created_key_works_at_once_and_is_shown_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (running, admin):
        made = await made_key(admin, name="alice", **{"class": "premium"})
        assert await status_with(running, made["key"]) == 200
        shown = (await admin.get("/admin/keys/alice")).json()
        assert (shown["state"], shown["source"], shown["class"]) == ("active", "store", "premium")
        assert shown["max_class"] == "premium"
        _, id_, secret = made["key"].split("_")
        every = await admin.get("/admin/keys")
        listed = every.text + (await admin.get("/admin/status")).text
        assert hash_key(made["key"]).sha256 not in listed
        assert {key["name"] for key in every.json()["keys"]} == {"alice", "owner"}
        # A whole key in place of a name is logged without its secret.
        refused = await admin.delete(f"/admin/keys/{made['key']}")
        assert reason(refused) == (404, "key_not_found")
        assert (await admin.delete("/admin/keys/alice")).json()["state"] == "revoked"
        assert await status_with(running, made["key"]) == 401
        trail = await admin.get("/admin/audit")
        assert trail.json()["entries"][1]["target"] == f"lg_{id_}_…"
        assert secret not in listed + refused.text + trail.text
    assert not files_with(tmp_path, secret)


async def test_the_first_keys_are_listed_and_the_others_found_by_letters(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, admin):
        # Ids are searched too: random ones might have these letters.
        groups = {"Zoe": None, "alice": "lab_1", "bob": "labx1", "carl": None}
        for number, (name, group) in enumerate(groups.items()):
            await made_key(admin, id=f"k{number}", name=name, group=group)
        await admin.delete("/admin/keys/carl")
        for query, found, names in (
            ("", 4, ["Zoe", "alice", "bob", "owner"]),
            ("limit=2", 4, ["Zoe", "alice"]),
            ("limit=2&revoked=1", 5, ["Zoe", "alice"]),
            # Of both sources; letters are large or small, and stand for themselves.
            ("find=o", 3, ["Zoe", "bob", "owner"]),
            ("find=o&limit=1", 3, ["Zoe"]),
            ("find=ZO", 1, ["Zoe"]),
            ("find=LAB_", 1, ["alice"]),
            ("find=%25", 0, []),
            ("name=bob&find=lab", 1, ["bob"]),
            ("name=bob&find=x_", 0, []),
        ):
            listed = (await admin.get(f"/admin/keys?{query}")).json()
            shown = [key["name"] for key in listed["keys"]]
            assert (listed["found"], shown) == (found, names), query
        for limit in ("0", "x", "100001"):
            refused = await admin.get(f"/admin/keys?limit={limit}")
            assert reason(refused) == (400, "invalid_request"), limit


async def test_odd_requests_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, admin):
        await admin.post("/admin/keys", json={"name": "alice"})
        for method, path, body, status, code in (
            ("GET", "/admin/keys/bob", None, 404, "key_not_found"),
            ("DELETE", "/admin/keys/bob", None, 404, "key_not_found"),
            ("POST", "/admin/keys/bob/rotate", None, 404, "key_not_found"),
            ("DELETE", "/admin/keys/owner", None, 409, "key_of_settings"),
            ("POST", "/admin/keys/own/rotate", None, 409, "key_of_settings"),
            ("PATCH", "/admin/keys/own", b"{}", 409, "key_of_settings"),
            ("POST", "/admin/keys", b'{"name": "alice"}', 409, "key_exists"),
            ("POST", "/admin/keys", b"", 400, "invalid_json"),
            ("POST", "/admin/keys", b"[]", 400, "invalid_json"),
            ("POST", "/admin/keys", b'{"name": "' + b"x" * 70_000, 413, "request_too_large"),
            ("POST", "/admin/keys/import", b"{}", 400, "invalid_request"),
            ("POST", "/admin/keys/import", b'{"keys": [1]}', 400, "invalid_request"),
            ("PATCH", "/admin/keys/alice", b'{"id": "x"}', 400, "invalid_request"),
            ("PATCH", "/admin/keys/alice", b'{"sha256": null}', 400, "invalid_request"),
            ("PATCH", "/admin/keys/alice", b'{"limits": {"rpm": 0}}', 400, "invalid_request"),
            ("POST", "/admin/keys/alice/rotate", b'{"grace": -1}', 400, "invalid_request"),
            ("POST", "/admin/keys/alice/rotate", b'{"grace": "x"}', 400, "invalid_request"),
            ("POST", "/admin/keys/alice/rotate", b'{"colour": 1}', 400, "invalid_request"),
        ):
            answer = await admin.request(method, path, content=body)
            assert reason(answer) == (status, code), (method, path, body)


async def test_a_groups_limits_hold_at_once_for_its_keys_together(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (running, admin):
        made = await admin.put("/admin/groups/team", json={"limits": {"rpm": 2}})
        assert made.status_code == 200
        alice = await made_key(admin, name="alice", group="team")
        bob = await made_key(admin, name="bob", group="team")
        assert alice["warnings"] == []
        statuses = [await status_with(running, one["key"]) for one in (alice, bob, alice)]
        assert statuses == [200, 200, 429]
        await recorded(running, 2)
        used = [one["last_used_at"] for one in (await admin.get("/admin/keys")).json()["keys"]]
        assert [at is not None for at in used] == [True, True, False]
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["keys"], group["limits"]) == (2, {"rpm": 2})
        (limit,) = group["standing"]
        assert (limit["of"], limit["limit"], limit["used"], limit["remaining"]) == (
            "group", "rpm", 2, 0,
        )  # fmt: skip
        shown = (await admin.get("/admin/keys/alice")).json()
        assert [one["of"] for one in shown["standing"]] == ["group"]
        await admin.put("/admin/groups/team", json={"limits": {"rpm": 20}})
        assert await status_with(running, alice["key"]) == 200
        assert (await admin.delete("/admin/groups/team")).status_code == 200
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["origin"], group["standing"]) == ("undefined", [])
        actions = [one["action"] for one in (await admin.get("/admin/audit")).json()["entries"]]
        assert (actions.count("groups.set"), actions.count("groups.remove")) == (2, 1)


async def test_a_quota_that_runs_out_is_a_problem_and_one_webhook(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    async with receiving(status(200)) as receiver:
        target = {"secret_file": str(tmp_path / "secret"), "allow_private": True}
        url = f"http://127.0.0.1:{receiver.port}"
        events = ["quota.near", "quota.spent"]
        targets = [
            {"url": f"{url}/quotas", "events": events, **target}, {"url": f"{url}/all", **target},
        ]  # fmt: skip
        chosen = {"webhooks": {"targets": targets}}
        async with gateway(tmp_path, **chosen) as (running, admin):
            key = await made_key(admin, name="alice", limits={"tokens_per_day": 10})
            assert await status_with(running, key["key"]) == 200
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
            found = await running.gateway.live.view.read_problems()
            (problem,) = [one for one in found if one.id.startswith("quota:")]
            assert (problem.caller, problem.caller_name) == (key["id"], "alice")
            # It tells what is used up, and a viewer not by whom.
            assert problem.id.startswith("quota:key:tokens_per_day:day:")
            assert key["id"] not in problem.id
        async with gateway(tmp_path, **chosen) as (running, _):
            watch = running.gateway.background.quotas
            await until(lambda: bool(watch.used))
            await watch.look()
            sender = running.gateway.background.webhook_sender
            assert sender is not None
            await until(lambda: sender.waiting == 0)
        assert len(receiver.requests) == 1


async def test_without_a_store_keys_and_groups_are_shown_and_none_is_kept(tmp_path: Path) -> None:
    chosen = {"store": {"url": "off"}, "groups": {"team": {"limits": {"rpm": 5}}}}
    async with gateway(tmp_path, **chosen) as (_, admin):
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["name"], group["origin"]) == ("team", "settings")
        (key,) = (await admin.get("/admin/keys")).json()["keys"]
        assert (key["id"], key["standing"], key["last_used_at"]) == ("own", [], None)
        for answer in (
            await admin.put("/admin/groups/b", json={}),
            await admin.post("/admin/keys", json={"name": "alice"}),
        ):
            assert reason(answer) == (501, "not_supported")
