"""Keys, groups and batches of callers in an operator's hands, through the admin API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import hash_key, new_key
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import Running, answered, running_gateway, until
from tests.known import known
from tests.polling import eventually
from tests.stored.batch_gateway import lines
from tests.stored.receivers import SECRET, receiving, status
from tests.web.two_keys import ALICE, BOB, gateway, kept, reason, two_callers

pytestmark = pytest.mark.usefixtures("hurried")

OWN = new_key("own")


@asynccontextmanager
async def keyed_gateway(
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
    async with keyed_gateway(tmp_path) as (running, admin):
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
    async with keyed_gateway(tmp_path) as (_, admin):
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
    async with keyed_gateway(tmp_path) as (_, admin):
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
    async with keyed_gateway(tmp_path) as (running, admin):
        await answered(admin, "/admin/groups/team", "PUT", json={"limits": {"rpm": 2}})
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
        assert (limit["of"], limit["limit"]) == ("group", "rpm")
        assert (limit["used"], limit["remaining"]) == (2, 0)
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
        async with keyed_gateway(tmp_path, **chosen) as (running, admin):
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
        async with keyed_gateway(tmp_path, **chosen) as (running, _):
            watch = running.gateway.background.quotas
            await until(lambda: bool(watch.used))
            await watch.look()
            sender = known(running.gateway.background.webhook_sender)
            await until(lambda: sender.waiting == 0)
        assert len(receiver.requests) == 1


async def test_without_a_store_keys_and_groups_are_shown_and_none_is_kept(tmp_path: Path) -> None:
    chosen = {"store": {"url": "off"}, "groups": {"team": {"limits": {"rpm": 5}}}}
    async with keyed_gateway(tmp_path, **chosen) as (_, admin):
        (group,) = (await admin.get("/admin/groups")).json()["groups"]
        assert (group["name"], group["origin"]) == ("team", "settings")
        (key,) = (await admin.get("/admin/keys")).json()["keys"]
        assert (key["id"], key["standing"], key["last_used_at"]) == ("own", [], None)
        for answer in (
            await admin.put("/admin/groups/b", json={}),
            await admin.post("/admin/keys", json={"name": "alice"}),
        ):
            assert reason(answer) == (501, "not_supported")


# The batches of all keys.


async def upload(running: Running, items: Iterable[Any], **query: str) -> httpx.Response:
    """Hand in a batch of these lines as an operator; a text is no JSON."""
    content = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in items)
    return await running.admin.post(
        "/admin/batches",
        params=query,
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", content.encode())},
    )


async def shown(running: Running, id_: str, *statuses: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        found: dict[str, Any] = (await running.admin.get(f"/admin/batches/{id_}")).json()
        return found if found["status"] in statuses else None

    return await eventually(look)


async def audited(running: Running) -> list[tuple[str, str, str]]:
    entries = (await running.admin.get("/admin/audit?action=batches")).json()["entries"]
    return [(one["action"], one["target"], one["outcome"]) for one in entries][::-1]


async def test_an_upload_is_the_batch_of_the_key_that_is_named(tmp_path: Path) -> None:
    async with two_callers(tmp_path) as (running, alice, bob):
        batch = (await upload(running, lines(2), key="alice", completion_window="2h")).json()
        assert (batch["key"], batch["api"], batch["errors_by_kind"]) == (ALICE.id, "openai", [])
        assert batch["completion_window"] == "2h"
        begun = await shown(running, batch["id"], "in_progress")
        assert begun["request_counts"]["total"] == 2
        # It is hers as if she had made it, her file too, and nobody else's.
        assert (await alice.batches.retrieve(batch["id"])).input_file_id == begun["input_file_id"]
        assert [one.id async for one in alice.files.list()] == [begun["input_file_id"]]
        assert not [one async for one in bob.batches.list()]
        assert await audited(running) == [("batches.create", f"{batch['id']} for alice", "done")]


async def test_an_upload_that_is_no_batch_leaves_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, batches={"batches_per_key": 1}) as running:
        unknown = await upload(running, lines(1), key="carol")
        assert reason(unknown) == (404, "key_not_found")
        unnamed = await upload(running, lines(1))
        assert reason(unnamed) == (404, "key_not_found")
        assert reason(await upload(running, lines(1), key="alice", colour="red"))[0] == 400
        unknown = await running.admin.post("/admin/batches/batch_none/cancel")
        assert reason(unknown) == (404, "batch_not_found")
        wrong = await upload(running, lines(1), key="alice", completion_window="soon")
        assert reason(wrong) == (400, "invalid_value")
        assert kept(tmp_path) == []
        assert (await upload(running, lines(1), key="alice")).status_code == 200
        full = await upload(running, lines(1), key="alice")
        assert reason(full) == (429, "too_many_batches")
        assert len(kept(tmp_path)) == 1
        assert (await upload(running, lines(1), key="bob")).status_code == 200


async def test_batches_of_all_keys_and_apis_are_listed_the_newest_first(tmp_path: Path) -> None:
    async with two_callers(tmp_path) as (running, _, _):
        owners = ("alice", "bob", "alice")
        ids = [(await upload(running, lines(1), key=name)).json()["id"] for name in owners]
        params = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}], "model": "m"}
        answer = await running.client.post(
            "/v1/messages/batches",
            json={"requests": [{"custom_id": "a", "params": params}]},
            headers={"x-api-key": BOB.text},
        )
        ids.append(answer.json()["id"])
        await running.admin.post(f"/admin/batches/{ids[0]}/cancel")
        cancelled = await shown(running, ids[0], "cancelled")
        assert cancelled["errors_by_kind"] == [
            {"code": "batch_cancelled", "lines": 1, "first_line": 1}
        ]
        late = await running.admin.post(f"/admin/batches/{ids[0]}/pause")
        assert reason(late) == (409, "batch_ended")

        async def listed(**query: Any) -> tuple[list[str], str | None]:
            found = (await running.admin.get("/admin/batches", params=query)).json()
            return [one["id"] for one in found["batches"]], found["next"]

        assert await listed() == (ids[::-1], None)
        newest, next_ = await listed(limit=3)
        assert (newest, next_) == (ids[:0:-1], ids[1])
        assert await listed(limit=3, before=ids[1]) == ([ids[0]], None)
        assert await listed(key="bob") == ([ids[3], ids[1]], None)
        assert await listed(key=ALICE.id, state="unfinished") == ([ids[2]], None)
        assert await listed(state="ended") == ([ids[0]], None)
        assert await listed(key="nobody") == ([], None)
        for query in ("state=some", "limit=101", "before=a%20b", "colour=red"):
            answer = await running.admin.get(f"/admin/batches?{query}")
            assert reason(answer)[0] == 400, query


async def test_results_and_errors_are_read_and_that_is_audited(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        items = [*lines(1), "no json", *lines(1), *lines(1, 1, model="unknown")]
        id_ = (await upload(running, items)).json()["id"]
        found = await shown(running, id_, "completed")
        assert (found["key"], found["key_name"]) == ("anonymous:local", None)
        kinds = {one["code"]: (one["lines"], one["first_line"]) for one in found["errors_by_kind"]}
        assert sum(number for number, _ in kinds.values()) == 3
        assert kinds["model_not_found"] == (1, 4)
        results = await running.admin.get(f"/admin/batches/{id_}/results")
        assert results.headers["content-disposition"].startswith("attachment")
        assert [json.loads(one)["custom_id"] for one in results.text.splitlines()] == ["line-0"]
        failed = await running.admin.get(f"/admin/batches/{id_}/errors")
        assert len(failed.text.splitlines()) == 3
        assert (await audited(running))[1:] == [
            ("batches.results", id_, "done"), ("batches.errors", id_, "done"),
        ]  # fmt: skip
