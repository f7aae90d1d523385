"""A store that a newer version has changed: told with the remedy, and nothing in it is touched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from gateway.callers.keys import new_key
from gateway.store.schema import SCHEMA_LEVEL, levels
from tests.cli.running import run
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.known import known
from tests.store.stores import add, opened

KEY = new_key("own")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
REMEDY = "run version 9.9.9 or later, or put back a backup from before"


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """Return the file of a store that only later programs can use."""
    file = tmp_path / "state" / "gateway.db"
    with opened(f"sqlite:///{file}") as store:
        store.run_now(add("kept"))
        later = {"level": SCHEMA_LEVEL + 2, "needed_level": SCHEMA_LEVEL + 1, "program": "9.9.9"}
        store.run_now(lambda connection: connection.execute(update(levels).values(later)))
    return file


def contents(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as reader:
        return list(reader.iterdump())


def settings_of(file: Path, **more: Any) -> dict[str, Any]:
    return {
        "store": {"url": f"sqlite:///{file}"},
        "keys": [{"id": KEY.id, "sha256": KEY.sha256, "limits": {"rpm": 3}}],
        **more,
    }


async def test_a_gateway_serves_on_and_says_what_to_do(newer: Path, tmp_path: Path) -> None:
    before = contents(newer)
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], settings_of(newer)) as running,
    ):
        store, admin = known(running.gateway.store), running.admin
        await until(lambda: store.status().state == "too new")
        headers = {"authorization": f"Bearer {KEY.text}"}
        for status in (200, 200, 200, 429):  # the limit holds, by counters in memory
            path = "/v1/chat/completions"
            answer = await running.client.post(path, json=CHAT, headers=headers)
            assert answer.status_code == status
        found = (await admin.get("/admin/status")).json()["store"]
        assert (found["state"], found["remedy"]) == ("too new", REMEDY)
        for path in ("/admin/usage", "/admin/audit"):
            response = await admin.get(path)
            assert response.status_code in {200, 503}, path
            assert response.status_code == 200 or "9.9.9" in response.text
        refused = await admin.post("/admin/keys", json={"name": "alice"})
        assert refused.status_code == 503
        assert REMEDY in refused.text
        assert known(running.gateway.ledger).written == 0
    assert contents(newer) == before


@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "create"), ("usage",)], ids=str)
def test_a_command_is_refused_with_the_remedy(
    command: tuple[str, ...], newer: Path, tmp_path: Path
) -> None:
    before = contents(newer)
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings_of(newer, admin={"port": 1})))
    ran = run(
        *command, *(("--name", "alice") if "create" in command else ()), "--config", str(file)
    )
    assert (ran.status, ran.out) == (1, "")
    assert "version 9.9.9 has changed the store" in ran.err
    assert REMEDY in ran.err
    assert contents(newer) == before
