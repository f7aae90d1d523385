from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.state_files import LARGEST_NAMES_FILE, DrainedNodes, PausedModels
from tests.each_case import each_case


def test_drains_last_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "drains.json"
    drains = DrainedNodes(path)
    drains.add("a")
    drains.add("b")
    drains.remove("b")
    drains.save()
    assert "a" in DrainedNodes(path)
    assert "b" not in DrainedNodes(path)
    assert [file.name for file in path.parent.iterdir()] == ["drains.json"]


def test_without_a_path_drains_are_kept_in_memory() -> None:
    drains = DrainedNodes()
    drains.add("a")
    assert "a" in drains
    drains.remove("a")
    assert "a" not in drains


@each_case(
    "damage",
    [b"", b"{", b"[]", b"null", b'{"drained": "a"}', b'{"drained": [1]}', b"\xff" * 9, b"[" * 9999],
)
def test_a_damaged_file_is_set_aside_and_logged(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    path = tmp_path / "drains.json"
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        drains = DrainedNodes(path)
    assert "a" not in drains
    assert (tmp_path / "drains.json.bad").read_bytes() == damage
    assert "drains.json.bad" in caplog.text
    drains.add("a")
    drains.save()
    assert "a" in DrainedNodes(path)


def test_an_enormous_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "drains.json"
    path.write_bytes(b'{"drained": ["' + b"a" * LARGEST_NAMES_FILE + b'"]}')
    DrainedNodes(path)
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_logged_and_the_drain_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    drains = DrainedNodes(tmp_path / "file" / "drains.json")
    with caplog.at_level(logging.WARNING):
        drains.add("a")
        drains.save()
    assert "a" in drains
    assert "forgotten at a restart" in caplog.text


@settings(max_examples=20)
@given(names=st.sets(st.text(max_size=20), max_size=10))
def test_any_name_is_read_back(names: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("drains") / "drains.json"
    drains = DrainedNodes(path)
    for name in names:
        drains.add(name)
    drains.save()
    assert all(name in DrainedNodes(path) for name in names)


def test_paused_models_last_over_a_restart_in_a_file_of_their_own(tmp_path: Path) -> None:
    drains, pauses = tmp_path / "drains.json", tmp_path / "paused.json"
    nodes, models = DrainedNodes(drains), PausedModels(pauses)
    nodes.add("a")
    nodes.save()
    models.add("org/model:7b")
    models.add("other")
    models.remove("other")
    models.save()
    assert PausedModels(pauses).names == {"org/model:7b"}
    assert DrainedNodes(drains).names == {"a"}
