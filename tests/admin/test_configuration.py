from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import error_of


async def unwatched() -> None:
    """Let nothing but the admin API reload the files."""
    watching = [task for task in asyncio.all_tasks() if task.get_name() == "watch the files"]
    assert watching
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


@in_virtual_time
async def test_a_reload_reports_changes_and_what_needs_a_restart(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as two,
        running_gateway(tmp_path, [one := EmulatedNode(), "http://127.0.0.1:9"]) as running,
    ):
        admin = running.admin
        await unwatched()
        running.write_nodes(
            [{"name": "node-0", "url": one.url, "slots": 2}, {"name": "fresh", "url": two.url}]
        )
        running.write_settings({"queue": {"max": 3}, "limits": {"connections": 77}})
        first = await admin.post("/admin/reload")
        second = await admin.post("/admin/reload")
        shown = (await admin.get("/admin/config")).json()
        nodes = (await admin.get("/admin/nodes")).json()["nodes"]
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == {
        "nodes": {"added": ["fresh"], "changed": ["node-0"], "removed": ["node-1"]},
        "settings": {"changed": ["limits", "queue"], "needs_restart": ["limits.connections"]},
    }
    assert not any(names for told in second.json().values() for names in told.values())
    assert shown["queue"]["max"] == 3
    assert [node["name"] for node in nodes] == ["node-0", "fresh"]


async def versions_of(running: Running, number: int) -> list[dict[str, Any]]:
    history = running.gateway.config_files.histories["gateway"]
    await until(lambda: len(history.versions()) >= number)
    files = (await running.admin.get("/admin/config/history")).json()["files"]
    found: list[dict[str, Any]] = files[0]["versions"]
    return found


@in_virtual_time
async def test_a_version_can_come_back_and_a_bad_rollback_writes_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()], {"queue": {"max": 1}}) as running:
        admin = running.admin
        [first] = await versions_of(running, 1)
        await unwatched()
        running.write_settings({"queue": {"max": "many"}})
        assert (await admin.post("/admin/reload")).status_code == 422
        running.write_settings({"queue": {"max": 2}})
        assert (await admin.post("/admin/reload")).status_code == 200
        newest, first = await versions_of(running, 2)
        assert (newest["in_force"], newest["on_disk"]) == (True, True)
        assert (first["in_force"], first["on_disk"]) == (False, False)
        done = await admin.post("/admin/config/rollback", json={"version": first["name"]})
        told = {"file": str(running.settings_file), "version": first["name"], "kept": None}
        assert done.json() == told
        [entry] = (await admin.get("/admin/audit?action=config")).json()["entries"]
        assert (entry["action"], entry["target"]) == ("config.rollback", first["name"])
        assert "max" not in str(entry["details"])

        async def refused(**body: str) -> tuple[int, str]:
            response = await admin.post("/admin/config/rollback", json=body)
            return response.status_code, error_of(response)["code"]

        name = first["name"]
        assert await refused(version="gateway-1999") == (404, "version_not_found")
        assert await refused(version="../gateway.yaml") == (404, "version_not_found")
        assert await refused(name=name) == (400, "invalid_request")
        assert await refused(version=name, more="") == (400, "invalid_request")
        text = running.settings_file.read_text()
        running.settings_file.write_text(f"# Managed by Ansible (gateway): no\n{text}")
        assert await refused(version=name) == (409, "file_managed")
        # A folder stands where the file would be: nobody may replace it.
        running.settings_file.unlink()
        running.settings_file.mkdir()
        (running.settings_file / "x").write_text("")
        assert await refused(version=name) == (409, "file_not_writable")


@in_virtual_time
async def test_each_setting_says_where_it_comes_from_and_no_hash_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE", "77")
    key = new_key("team")
    own = {"id": key.id, "sha256": key.sha256, "name": "Team"}
    settings = {"queue": {"max": "${QUEUE}", "max_wait": 60}, "keys": [own]}
    async with running_gateway(tmp_path, [EmulatedNode()], settings) as running:
        await versions_of(running, 1)
        response = await running.admin.get("/admin/config/origins")
        shown = await running.admin.get("/admin/config")
        lines = [line.strip() for line in running.settings_file.read_text().splitlines()]
    rows = {row["key"]: row for row in response.json()["values"]}
    for name, value, by, line in (
        ("queue.max", 77, "QUEUE", "max: ${QUEUE}"),
        ("queue.max_wait", 60.0, None, "max_wait: 60"),
        ("keys[0].name", "Team", None, "name: Team"),
        ("resume", "text", None, None),
        ("admin.port", 0, "--admin-port", None),
    ):
        row = rows[name]
        assert (row["value"], row["by"]) == (value, by)
        assert (row["line"] and lines[row["line"] - 1]) == line
    assert (shown.json()["queue"]["max"], shown.json()["keys"][0]["id"]) == (77, "team")
    assert key.sha256 not in response.text + shown.text
    assert response.json()["complete"]
