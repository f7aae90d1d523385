"""The keys of a running gateway, through its admin API; the store is a real file."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import hash_key, new_key
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

pytestmark = pytest.mark.usefixtures("hurried")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

OWN = new_key("own")

SETTINGS: dict[str, Any] = {"keys": [{"id": OWN.id, "sha256": OWN.sha256, "name": "owner"}]}


@asynccontextmanager
async def keyed_gateway(
    folder: Path, settings: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    node = EmulatedNode(model="mistral-7b")
    async with running_gateway(folder, [node], settings or SETTINGS) as running:
        yield running, running.admin


async def made_key(admin: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await admin.post("/admin/keys", json=fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def status_with(client: httpx.AsyncClient, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code


def error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()["error"]
    return response.status_code, body["code"], body["message"]


def files_with(folder: Path, text: str) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if text.encode() in file.read_bytes()]


async def test_a_created_key_works_at_once_and_is_shown_once(tmp_path: Path) -> None:
    async with keyed_gateway(tmp_path) as (running, admin):
        made = await made_key(admin, name="alice", **{"class": "premium"})
        assert await status_with(running.client, made["key"]) == 200
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
        assert error(refused)[:2] == (404, "key_not_found")
        trail = await admin.get("/admin/audit")
        assert trail.json()["entries"][0]["target"] == f"lg_{id_}_…"
        assert secret not in listed + refused.text + trail.text
    assert not files_with(tmp_path, secret)


async def test_the_next_request_of_a_revoked_key_on_a_kept_connection_gets_401(
    tmp_path: Path,
) -> None:
    async with keyed_gateway(tmp_path) as (running, admin):
        made = await made_key(admin, name="alice")
        assert await status_with(running.client, made["key"]) == 200
        assert (await admin.delete("/admin/keys/alice")).json()["state"] == "revoked"
        assert await status_with(running.client, made["key"]) == 401
        assert (await admin.get("/admin/keys")).json()["keys"][0]["name"] == "owner"
        all_of_them = (await admin.get("/admin/keys?revoked=1")).json()["keys"]
        assert [key["state"] for key in all_of_them] == ["revoked", "active"]


async def test_a_rotation_gives_a_new_secret_and_the_old_one_a_grace(tmp_path: Path) -> None:
    async with keyed_gateway(tmp_path) as (running, admin):

        async def rotated(body: dict[str, Any] | None = None) -> dict[str, Any]:
            found: dict[str, Any] = (await admin.post("/admin/keys/alice/rotate", json=body)).json()
            return found

        first = await made_key(admin, name="alice")
        second = await rotated({"grace": "1h"})
        assert second["key"] != first["key"]
        for key in (first["key"], second["key"]):
            assert await status_with(running.client, key) == 200
        third = await rotated({"grace": 0})
        for key, status in ((first["key"], 401), (second["key"], 401), (third["key"], 200)):
            assert await status_with(running.client, key) == status
        assert (await rotated())["previous_until"] is not None, "by default there is one"
        assert await status_with(running.client, third["key"]) == 200


async def test_a_change_holds_for_the_next_request(tmp_path: Path) -> None:
    async with keyed_gateway(tmp_path) as (running, admin):
        made = await made_key(admin, name="alice", group="team")
        patch = {"limits": {"rpm": 1, "models": None}, "expires": "1h", "group": None}
        changed = (await admin.patch("/admin/keys/alice", json=patch)).json()
        assert (changed["limits"]["rpm"], changed["group"]) == (1, None)
        statuses = [await status_with(running.client, made["key"]) for _ in range(2)]
        assert statuses == [200, 429]
        patch = {"limits": {"tpm": 50}, "name": "alice b"}
        changed = (await admin.patch("/admin/keys/alice", json=patch)).json()
        assert (changed["limits"]["rpm"], changed["limits"]["tpm"]) == (1, 50)
        assert (await admin.get("/admin/keys/alice b")).json()["id"] == made["id"]


async def test_an_import_stores_all_or_names_every_bad_key(tmp_path: Path) -> None:
    keys = [new_key(f"k{number}") for number in range(3)]
    entries: list[dict[str, Any]] = [{"id": key.id, "sha256": key.sha256} for key in keys]
    async with keyed_gateway(tmp_path) as (running, admin):
        bad = [entries[0], {**entries[1], "limits": {"rpm": 0}}, {**entries[2], "colour": 1}]
        refused = await admin.post("/admin/keys/import", json={"keys": bad})
        assert refused.status_code == 400
        problems = [(one["index"], one["key"]) for one in refused.json()["problems"]]
        assert problems == [(1, "limits.rpm"), (2, "colour")]
        assert await status_with(running.client, keys[0].text) == 401
        done = (await admin.post("/admin/keys/import", json={"keys": entries})).json()
        assert done["imported"] == 3
        assert await status_with(running.client, keys[2].text) == 200
        # Whoever lost the answer to one that he stored by its hash asks again.
        again = await admin.post("/admin/keys", json=entries[0])
        assert (again.status_code, "key" in again.json()) == (200, False)


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
            assert error(refused)[:2] == (400, "invalid_request"), limit


async def test_a_bad_key_is_refused_with_a_reason(tmp_path: Path) -> None:
    limited = {"name": "x", "limits": {"models": ["nobody"]}}
    async with keyed_gateway(tmp_path) as (_, admin):
        for body, said in (
            ({"name": "owner"}, "a key of the settings is called 'owner'"),
            ({"name": "x", "id": "own"}, "a key of the settings is called"),
            ({"name": "x", "models": ["nobody"]}, "they serve mistral-7b"),
            ({"name": "x", "models": ["*"]}, "catch-all"),
            (limited, "limits.models: no node serves the model 'nobody'"),
            ({"name": "x", "limits": {"rpm": 0}}, "limits.rpm"),
            ({"name": 7}, "name"),
        ):
            found = error(await admin.post("/admin/keys", json=body))
            assert found[:2] == (400, "invalid_request"), body
            assert said in found[2]
        assert len((await admin.get("/admin/keys")).json()["keys"]) == 1


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
            assert error(answer)[:2] == (status, code), (method, path, body)


async def test_without_a_store_keys_are_refused_with_the_remedy(tmp_path: Path) -> None:
    settings = {**SETTINGS, "store": {"url": "off"}}
    async with keyed_gateway(tmp_path, settings) as (running, admin):
        status, _, message = error(await admin.post("/admin/keys", json={"name": "alice"}))
        assert (status, "'llama-gateway keys create' shows the lines" in message) == (501, True)
        assert [key["id"] for key in (await admin.get("/admin/keys")).json()["keys"]] == ["own"]
        assert await status_with(running.client, OWN.text) == 200


async def test_a_settings_key_hides_a_stored_one_of_its_id_and_that_is_told(tmp_path: Path) -> None:
    other = new_key("late")
    async with keyed_gateway(tmp_path) as (running, admin):
        entry = {"id": "late", "sha256": hashlib.sha256(b"first").hexdigest(), "name": "late"}
        await admin.post("/admin/keys", json=entry)
        assert await status_with(running.client, "lg_late_first") == 200
        own = {"id": "late", "sha256": other.sha256, "name": "late"}
        running.write_settings({"keys": [*SETTINGS["keys"], own]})
        await until(lambda: running.gateway.key_ring.find(other.text) is not None)
        assert await status_with(running.client, "lg_late_first") == 401
        found = (await admin.get("/admin/keys")).json()
        assert [key["state"] for key in found["keys"] if key["source"] == "store"] == ["hidden"]
        assert "that of the settings counts" in found["warnings"][0]
