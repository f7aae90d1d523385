"""`llama-gateway requests`: through the gateway that runs, else from the store itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from gateway.callers.keys import new_key
from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.callers.ledger_rows import a_row, add_rows
from tests.callers.metered_gateway import ALICE, VIP, chat, metered_gateway, recorded
from tests.cli.running import Ran, run
from tests.cli.test_reports import settings_of, through

HEADER = ["ENDED", "SECONDS", "WAIT", "TTFT", "OUTCOME", "KEY", "MODEL", "NODE"]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Settings whose store has the requests of some seconds."""
    store = Store(locate_store(f"sqlite:///{tmp_path / 'own.db'}", tmp_path))
    store.start()
    now = time.time()
    rows = [
        a_row(1, ended_at=now - 1, key="web", wait_seconds=None, stream=True),
        a_row(2, ended_at=now - 2, started_at=now - 42, wait_seconds=30.0, ttft_seconds=35.25),
        a_row(3, ended_at=now - 3, status=503, outcome="queue_timeout", node=None),
        *(a_row(n, ended_at=now - n, key="many") for n in range(10, 1300)),
    ]
    store.run_now(lambda connection: add_rows(connection, rows))
    assert store.close(10.0)
    path = settings_of(tmp_path)
    spec = {"id": "web", "sha256": new_key("web").sha256, "name": "Web shop"}
    path.write_text(path.read_text() + yaml.safe_dump({"keys": [spec]}))
    return path


def asked(settings: Path, *arguments: str) -> Ran:
    return run("requests", *arguments, "--config", str(settings))


async def test_the_running_gateway_is_asked(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, VIP)
        await chat(running, ALICE)
        await recorded(running, 2)
        told = await through(running, "requests")
        found = json.loads((await through(running, "requests", "--key", "Alice", "--json")).out)
    assert told.status == 0, told.err
    header, latest, first = told.out.splitlines()
    assert header.split()[: len(HEADER)] == HEADER
    assert ("Alice" in latest, "vip" in first) == (True, True)
    assert [one["key"] for one in found["requests"]] == ["alice"]
    assert found["complete"]


def test_without_a_gateway_the_store_is_read(settings: Path) -> None:
    told = asked(settings, "--limit", "3")
    assert told.status == 0, told.err
    assert "no gateway answers" in told.err
    assert "there are more than 3" in told.err
    _, first, second, third = (line.split() for line in told.out.splitlines())
    assert first[1:6] == ["1.0", "-", "-", "ok", "Web"], "what is unknown is no 0"
    assert second[1:6] == ["40.0", "30.0", "35.2", "ok", "team-a"]
    assert third[1:6] == ["1.0", "0.0", "-", "503", "queue_timeout"]


def test_filters_and_the_slowest(settings: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        told = json.loads(asked(settings, *arguments, "--json").out)
        return [row["id"] for row in told["requests"]]

    assert ids("--slow", "--limit", "1") == ["r2"]
    assert ids("--slower-than", "30") == ["r2"]
    assert ids("--failed") == ids("--outcome", "queue_timeout") == ["r3"]
    assert ids("--key", "Web shop") == ids("--key", "web") == ["r1"]
    assert ids("--node", "elsewhere") == []
    everything = ids("--limit", "5000", "--key", "many")
    assert everything == [f"r{n}" for n in range(10, 1300)], "more than one page has"
    told = asked(settings, "--model", "nobody")
    assert (told.status, told.out) == (0, "")
    assert "no such request ended since" in told.err
