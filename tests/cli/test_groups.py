"""`llama-gateway groups`, and what `keys` shows of limits: with a gateway, and without one."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.callers.ledger_rows import a_row, add_rows
from tests.cli.running import refusal, run
from tests.cli.test_keys import SETTINGS, alone, write_settings
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.store.stores import opened

__all__ = ["alone"]  # the fixture


def test_without_a_gateway_groups_are_made_changed_and_removed_in_the_store(alone: Path) -> None:
    ran = run(
        "groups", "set", "night", "--budget", "20/month", "--user-rpm", "5", "--models", "a,b"
    )
    assert ran.status == 0, ran.err
    assert "store: sqlite:///" in ran.err
    changed = run("groups", "set", "night", "--rpm", "60", "--unset", "budget,user-rpm", "--json")
    assert json.loads(changed.out)["limits"] == {"models": ["a", "b"], "rpm": 60}
    assert json.loads(changed.out)["user_limits"] is None
    made = run("keys", "create", "--name", "alice", "--group", "night")
    assert "warning" not in made.err
    listed = run("groups", "list")
    assert [line.split()[:3] for line in listed.out.splitlines()[1:]] == [["night", "store", "1"]]
    removed = run("groups", "remove", "night")
    assert removed.out == "night: removed\n"
    assert "warning: 1 keys are still of this group" in removed.err
    assert run("groups", "list", "--json").out.count('"undefined"') == 1
    assert alone.is_dir()


def test_a_key_of_an_undefined_group_is_made_with_a_warning(alone: Path) -> None:
    ran = run("keys", "create", "--name", "alice", "--group", "nigth")
    assert ran.status == 0
    assert "neither settings nor store define the group 'nigth'" in ran.err
    assert "the release after this one refuses" in ran.err
    assert "define the group" in run("keys", "set", "alice", "--group", "other").err
    assert alone.is_dir()


def test_a_group_of_the_settings_is_changed_there(alone: Path) -> None:
    write_settings(
        alone, {**SETTINGS, "store": {"url": "sqlite:///keys.db"}, "groups": {"day": {}}}
    )
    assert "group of the settings" in refusal("groups", "set", "day", "--rpm", "5", status=1)
    assert run("groups", "set", "bad name").status == 2


def test_keys_show_what_is_used_of_their_limits_without_a_gateway(alone: Path) -> None:
    run("keys", "create", "--id", "alice", "--name", "Alice", "--tokens-per-day", "1000")
    with opened(f"sqlite:///{alone}/config/keys.db") as store:
        row = a_row(1, ended_at=time.time() - 1.0, key="alice", prompt_tokens=300)
        store.run_now(lambda connection: add_rows(connection, [row]))
    listed = run("keys", "list")
    assert "tokens_per_day 3" in listed.out.replace("\n", " ")
    shown = run("keys", "show", "Alice").out
    assert "key's tokens_per_day: " in shown
    assert " of 1000, " in shown


async def test_a_running_gateway_has_a_changed_group_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(tmp_path, [EmulatedNode(model="m")], SETTINGS) as running:
        monkeypatch.chdir(tmp_path)
        url = str(running.admin.base_url)
        ran = await asyncio.to_thread(
            run, "groups", "set", "night", "--max-class", "batch", "--admin-url", url
        )
        assert ran.status == 0, ran.err
        groups = running.gateway.metering.in_force.groups
        assert groups["night"].limits is not None
        assert groups["night"].limits.max_class == "batch"
