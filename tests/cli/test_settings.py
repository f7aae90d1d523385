"""`llama-gateway settings`: what was in force, what has changed, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.config.versions import FileHistory
from tests.cli.running import Ran, run

MORNING = 1_796_025_600.0  # 2026-11-30T08:00:00Z
OLD, NEW = "gateway-20261130T080000Z", "gateway-20261130T090000Z"
NODES = "nodes: [{name: a, url: 'http://127.0.0.1:9'}]\n"
FIRST = "queue:\n  max: 7\n"
SECOND = "queue:\n  max: 8\nstore: {url: 'postgresql://gateway:hunter2@db/gateway'}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both files, with versions that a gateway has kept; the settings are those of the last one."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    (tmp_path / "nodes.yaml").write_text(NODES)
    (tmp_path / "gateway.yaml").write_text(SECOND)
    settings = FileHistory.of("gateway", tmp_path / "gateway.yaml", [])
    settings.keep(FIRST, MORNING)
    settings.keep(SECOND, MORNING + 3600)
    FileHistory.of("nodes", tmp_path / "nodes.yaml", []).keep(NODES, MORNING)
    return tmp_path


def settings(folder: Path, *words: str) -> Ran:
    files = ("--nodes", str(folder / "nodes.yaml"), "--config", str(folder / "gateway.yaml"))
    return run("settings", *words, *files)


def test_the_history_lists_both_files_and_where_their_versions_are(folder: Path) -> None:
    told = settings(folder, "history")
    assert told.status == 0, told.err
    lines = told.out.splitlines()
    assert lines[0] == f"{folder}/gateway.yaml: kept in {folder}/.gateway.yaml.history"
    assert lines[2].split() == [
        NEW,
        *["2026-11-30", "09:00:00", "4", "2", "1", "on", "the", "disk", "now"],
    ]
    assert lines[3].split()[0] == OLD
    assert f"{folder}/nodes.yaml: kept in" in told.out
    assert "max" not in told.out
    assert told.err == ""


def test_an_edit_that_is_not_in_force_is_told_and_shown(folder: Path) -> None:
    (folder / "gateway.yaml").write_text(SECOND.replace("8", "9"))
    edited = "was edited since: llama-gateway settings diff gateway"
    assert edited in settings(folder, "history").err
    told = settings(folder, "diff")
    assert told.status == 0
    assert told.out.startswith(f"--- {NEW}\n+++ {folder}/gateway.yaml\n@@ -1,4 +1,4 @@\n")
    assert "-  max: 8\n+  max: 9\n" in told.out
    assert "nodes.yaml is as nodes-20261130T080000Z" in told.err


def test_a_difference_masks_secrets_unless_asked_for(folder: Path) -> None:
    masked, whole = settings(folder, "diff", OLD), settings(folder, "diff", OLD, "--secrets")
    assert "hunter2" not in masked.out
    assert "+store: {url: 'postgresql://gateway:********@db/gateway'}" in masked.out
    assert "hunter2" in whole.out
    as_json = settings(folder, "diff", OLD, "--json")
    [told] = json.loads(as_json.out)["files"]
    assert (told["from"], told["added"], told["removed"]) == (OLD, 2, 1)
    assert "hunter2" not in as_json.out


def test_a_version_comes_back_and_what_was_there_is_kept(folder: Path) -> None:
    file = folder / "gateway.yaml"
    file.write_text("queue: {max: 55}\n")
    told = settings(folder, "rollback", OLD)
    assert told.status == 0, told.err
    assert file.read_text() == FIRST
    assert f"gateway.yaml is that of {OLD} again" in told.err
    assert "what was there is kept as gateway-" in told.err
    assert "POST /admin/reload" in told.err
    assert "-queue: {max: 55}" in told.out
    kept = told.err.partition("kept as ")[2].split()[0]
    back = json.loads(settings(folder, "rollback", kept, "--json").out)
    assert file.read_text() == "queue: {max: 55}\n"
    assert back["version"] == kept
    unknown = settings(folder, "rollback", "gateway-2025")
    assert (unknown.status, kept in unknown.err) == (2, True)
    (folder / "nodes.yaml").unlink()
    assert "nodes.yaml is gone" in settings(folder, "history").err
    assert settings(folder, "rollback", "nodes").status == 0
    assert (folder / "nodes.yaml").read_text() == NODES


def test_a_version_that_serve_would_refuse_is_not_written(folder: Path) -> None:
    history = FileHistory.of("gateway", folder / "gateway.yaml", [])
    pinned = history.keep("models: {m: {pin: gone}}\n", MORNING + 7200)
    public = history.keep("listen: {host: 0.0.0.0}\n", MORNING + 7300)
    assert pinned is not None
    assert public is not None
    told = settings(folder, "rollback", pinned.name)
    assert told.status == 2
    assert "gateway.yaml:1: models.m.pin" in told.err
    assert "no node of the inventory is named gone" in told.err
    assert f"was not changed: {pinned.name} can't be in force" in told.err
    assert "keys" in settings(folder, "rollback", public.name).err
    assert (folder / "gateway.yaml").read_text() == SECOND
    # As `serve` itself, it takes flags.
    assert settings(folder, "rollback", public.name, "--allow-anonymous").status == 0


def test_of_a_file_that_ansible_writes_the_difference_is_printed_instead(folder: Path) -> None:
    header = "# Managed by Ansible (gateway): change the variables, not this file. sha256:0f\n"
    (folder / "gateway.yaml").write_text(header + SECOND)
    told = settings(folder, "rollback", OLD)
    assert told.status == 1
    assert "+  max: 7\n" in told.out
    assert "was not changed: Ansible writes it" in told.err
    assert (folder / "gateway.yaml").read_text() == header + SECOND
