"""`llama-gateway store`: backups of a store that is in use, back, and between databases."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.client import named_store
from gateway.config.settings import Settings
from gateway.store.copying import RESTORED
from tests.cli.running import Ran, output, refusal, run, run_process
from tests.cli.test_reports import filled, settings_of
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.postgres import PostgresServer
from tests.stored.batch_gateway import HEADERS, ended, gateway_over, lines, show, submit


def test_a_backup_is_restored_to_where_other_settings_have_the_store(tmp_path: Path) -> None:
    config, backup = str(filled(tmp_path)), str(tmp_path / "backup.db")
    made = run("store", "backup", backup, "--config", config)
    assert made.status == 0, made.err
    assert "checked" in made.out
    assert f"from sqlite:///{tmp_path}/own.db to sqlite:///{backup}" in made.err
    (tmp_path / "other").mkdir()
    other = str(settings_of(tmp_path / "other", "sqlite:///gateway.db"))
    told = json.loads(output("store", "restore", backup, "--config", other, "--json"))
    assert told["digest"][:16] in made.out
    assert told["tables"]["usage"] == 3
    assert told["to"] == f"sqlite:///{tmp_path}/other/gateway.db"
    both = [json.loads(output("audit", "--config", one, "--json")) for one in (config, other)]
    assert both[0]["entries"] == both[1]["entries"] != []
    again = run("store", "restore", backup, "--config", other)
    assert (again.status, "is there already" in again.err) == (1, True)
    assert "Nothing was copied" in again.err
    for place in ("mysql://x/y", "postgresql://${MISSING_VARIABLE}@x/y"):
        assert "this is no place of a store" in refusal("store", "copy", backup, place)


def test_a_store_moves_to_postgresql_and_back_and_no_password_is_shown(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    filled(tmp_path)
    url = postgres.new_database()
    with_variable = url.replace("secret-of-tests", "${STORE_PASSWORD}")
    variables = {"STORE_PASSWORD": "secret-of-tests"}
    there = run_process(["store", "copy", str(tmp_path / "own.db"), with_variable], variables)
    back = run_process(["store", "copy", url, str(tmp_path / "back.db"), "--json"])
    refused = run_process(["store", "copy", str(tmp_path / "own.db"), url])
    for ran, status in ((there, 0), (back, 0), (refused, 1)):
        assert ran.status == status, ran.err
        assert "secret-of-tests" not in ran.out + ran.err
        assert "gateway:***@127.0.0.1" in ran.err
    assert json.loads(back.out)["digest"][:16] in there.out
    assert "holds a store already" in refused.err


async def ran(*arguments: str) -> Ran:
    """The command in a process of its own, beside the gateway that serves here."""
    return await asyncio.to_thread(run_process, arguments)


def test_a_store_that_was_moved_away_is_the_installed_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "users"))
    folder = tmp_path / "unit"
    assert named_store(Settings(), folder).path == tmp_path / "users/llama-gateway/gateway.db"
    folder.mkdir()
    assert named_store(Settings(), folder).path == folder / "gateway.db"


async def test_a_batch_of_a_running_gateway_is_restored_paused_and_runs_when_resumed(
    tmp_path: Path,
) -> None:
    places = {name: tmp_path / name for name in ("old", "new")}
    settings: dict[str, Any] = {
        name: {
            "store": {"url": f"sqlite:///{folder}/gateway.db"},
            "batches": {"folder": str(folder / "files")},
        }
        for name, folder in places.items()
    }
    for folder in places.values():
        folder.mkdir()
    backup = str(tmp_path / "backup.db")
    slow = EmulatedNode(slots=1, decode_tps=5)
    async with gateway_over(places["old"], slow, **settings["old"]) as running:
        batch = await submit(running, lines(3))
        await until(lambda: running.gateway.fleet.nodes["node-0"].leased)
        made = await ran("store", "backup", backup, "--config", str(running.settings_file))
        assert made.status == 0, made.err
        folder_id = (places["old"] / "files" / "folder-id").read_text().strip()
        assert f"folder-id is {folder_id}" in made.err
        shutil.copytree(places["old"] / "files", tmp_path / "files")
    config = places["new"] / "gateway.yaml"
    config.write_text(yaml.safe_dump(settings["new"]))
    shutil.move(tmp_path / "files", places["new"] / "files")
    told = await ran("store", "restore", backup, "--config", str(config))
    assert "1 unfinished batches are paused" in told.err
    fast = EmulatedNode(slots=2, decode_tps=500)
    async with gateway_over(places["new"], fast, **settings["new"]) as running:
        paused = (await show(running, batch))["llama_gateway"]["paused"]
        assert paused["reason"] == RESTORED
        answer = await running.client.post(f"/v1/batches/{batch}/resume", headers=HEADERS)
        assert answer.status_code == 200
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_copy_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    config, there = str(filled(tmp_path, count=30_000)), tmp_path / "there"
    there.mkdir()
    command = [sys.executable, "-m", "gateway", "store", "backup", str(there / "b.db")]
    with subprocess.Popen(
        [*command, "--config", config], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        while not list(there.iterdir()):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert list(there.iterdir()) == []
