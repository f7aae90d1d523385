from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway, error_of


@in_virtual_time
async def test_the_settings_in_force_are_shown_with_secrets_masked() -> None:
    key = new_key("team")
    settings = {
        "keys": [{"id": key.id, "sha256": key.sha256}],
        "queue": {"max": 7},
        "cors": {"origins": ["https://chat.example.org"]},
    }
    async with bare_gateway(settings=settings) as gateway:
        response = await gateway.admin.get("/admin/config")
    result = response.json()
    assert result["queue"]["max"] == 7
    assert result["keys"][0]["id"] == "team"
    assert result["listen"]["port"] == 8000
    assert key.sha256 not in response.text


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
    assert second.json() == {
        "nodes": {"added": [], "changed": [], "removed": []},
        "settings": {"changed": [], "needs_restart": []},
    }
    assert shown["queue"]["max"] == 3
    assert [node["name"] for node in nodes] == ["node-0", "fresh"]


@in_virtual_time
async def test_an_invalid_file_is_422_with_every_problem_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path, [one := EmulatedNode()]) as running:
        admin = running.admin
        await unwatched()
        running.write_nodes(
            [{"name": "x", "url": one.url, "slotz": 2}, {"name": "y", "url": "ftp://z"}]
        )
        response = await admin.post("/admin/reload")
        status = (await admin.get("/admin/status")).json()
        nodes = (await admin.get("/admin/nodes")).json()["nodes"]
    assert response.status_code == 422
    assert error_of(response)["code"] == "invalid_configuration"
    assert "slotz" in error_of(response)["message"]
    assert "(and 1 more)" in error_of(response)["message"]
    first, second = response.json()["problems"]
    assert set(first) == {"file", "line", "key", "message", "remedy"}
    assert (first["key"], first["message"]) == ("nodes[0].slotz", "unknown key")
    assert "slots" in first["remedy"]
    assert first["line"] > 0
    assert second["key"] == "nodes[1].url"
    assert [node["name"] for node in nodes] == ["node-0"]
    assert "slotz" in status["inventory_error"]
