"""What the fleet keeps over a restart."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.nodes.node import Node
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.state_files import (
    LARGEST_PROPERTIES_FILE,
    OperatorOrders,
    PropertiesStore,
    StoredNames,
)
from tests.each_case import each_case
from tests.nodes.build import a_node, a_spec

SAID = ServerProperties(models=("demo",), slots=4, context=4096, vision=False, refused={"rerank"})


def saying(facts: ServerProperties, **keys: Any) -> Node:
    node = a_node(**keys)
    node.properties = facts
    return node


def drained_nodes(path: Path) -> StoredNames:
    return StoredNames(path, "drained", "Drained nodes", "no node is drained")


def written(path: Path, *nodes: Node) -> None:
    store = PropertiesStore(path)
    for node in nodes:
        store.record(node.spec, node.properties)
    store.save()


def test_properties_last_over_a_restart_for_the_same_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "seen.json"
    written(path, saying(SAID))
    found = PropertiesStore(path).recall(a_spec())
    assert found == SAID
    assert found.remembered
    assert [file.name for file in path.parent.iterdir()] == ["seen.json"]
    for other in (a_spec(url="http://127.0.0.1:10"), a_spec("b"), a_spec(kind="openai")):
        assert PropertiesStore(path).recall(other) == ServerProperties()


def test_properties_are_read_from_older_versions_and_kept_readable_for_them(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    new = ServerProperties(
        models=("demo",),
        aliases={"tiny": "demo"},
        video=True,
        process="p",
        purpose="embeddings",
        is_router=True,
        most_loaded=4,
    )
    written(path, saying(new))
    assert PropertiesStore(path).recall(a_spec()) == new
    value = json.loads(path.read_text())
    facts = value["servers"][0]["facts"]
    assert facts["models"] == ["demo"]  # all that an older version reads of the names
    for name in ("aliases", "video", "process", "purpose", "is_router", "most_loaded"):
        del facts[name]
    path.write_text(json.dumps(value))
    assert PropertiesStore(path).recall(a_spec()) == ServerProperties(models=("demo",))


@each_case(
    "damage",
    [
        b"", b"{", b"[]", b"null", b'{"version": "1"}', b'{"version": 1}', b'{"drained": "a"}',
        b'{"drained": [1]}', b"\xff" * 9, b"[" * 9999,
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_logged(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    seen, drained = tmp_path / "seen.json", tmp_path / "drains.json"
    for path in (seen, drained):
        path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert PropertiesStore(seen).recall(a_spec()) == ServerProperties()
        drains = drained_nodes(drained)
    assert "a" not in drains
    for path in (seen, drained):
        assert path.with_name(f"{path.name}.bad").read_bytes() == damage
        assert f"{path.name}.bad" in caplog.text
    written(seen, saying(SAID))
    assert PropertiesStore(seen).recall(a_spec()) == SAID
    drains.keep("a")
    drains.save()
    assert "a" in drained_nodes(drained)


@each_case(
    "facts",
    [
        {"slots": -1}, {"slots": "many"}, {"context": 1 << 40}, {"models": ["x" * 5000]},
        {"models": ["m"] * 2000}, {"refused": 7}, {"aliases": {"a": "unknown"}},
        {"aliases": {f"{n}": "demo" for n in range(1000)}}, {"purpose": "war"},
        {"is_router": True, "most_loaded": -1},
    ],
)  # fmt: skip
def test_implausible_properties_are_left_out_and_the_rest_is_read(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    path = tmp_path / "seen.json"
    path.unlink(missing_ok=True)
    written(path, saying(SAID), saying(SAID, name="b"))
    value = json.loads(path.read_text())
    value["servers"][0]["facts"] |= facts
    path.write_text(json.dumps(value))
    seen = PropertiesStore(path)
    assert seen.recall(a_spec()) == ServerProperties()
    assert seen.recall(a_spec("b")) == SAID


def test_a_folder_that_cannot_be_used_is_logged_and_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        written(tmp_path / "file" / "seen.json", saying(SAID))
        drains = drained_nodes(tmp_path / "file" / "drains.json")
        drains.keep("a")
        drains.save()
    assert caplog.text.count("forgotten at a restart") == 2
    assert "a" in drains
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.WARNING):
        assert PropertiesStore(tmp_path / "folder").recall(a_spec()) == ServerProperties()
    assert "can't be read" in caplog.text


def test_nodes_that_report_too_much_do_not_fill_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen.json"
    chatty = [
        ServerProperties(models=tuple(f"{number}-{name}-{'x' * 490}" for name in range(1000)))
        for number in range(40)
    ]
    with caplog.at_level(logging.WARNING):
        written(path, *(saying(facts, name=f"n{i}") for i, facts in enumerate(chatty)))
    assert path.stat().st_size <= LARGEST_PROPERTIES_FILE
    assert "too much" in caplog.text
    assert PropertiesStore(path).recall(a_spec("n39")) == chatty[39]
    assert PropertiesStore(path).recall(a_spec("n0")) == ServerProperties()


def test_servers_that_left_long_ago_are_forgotten() -> None:
    store = PropertiesStore(most_servers=2)
    for name in "abc":
        store.record(a_spec(name), SAID)
    assert store.recall(a_spec("a")) == ServerProperties()
    assert store.recall(a_spec("c")) == SAID


async def test_changes_are_saved_until_a_successor_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    store = PropertiesStore(path, save_after=0.0)
    saving = asyncio.create_task(store.save_loop())
    store.record(a_spec(), SAID)
    async with asyncio.timeout(30):
        while PropertiesStore(path).recall(a_spec()) != SAID:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.005)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    store.stop_saving()
    store.record(a_spec(), ServerProperties(models=("other",)))
    store.save()
    assert PropertiesStore(path).recall(a_spec()) == SAID


def test_operators_orders_last_over_a_restart_in_a_file_each(tmp_path: Path) -> None:
    orders = OperatorOrders(lambda name: tmp_path / name)
    orders.drained.keep("a")
    orders.paused.keep("org/model:7b")
    for model in ("r/a", "other"):
        orders.pinned.keep(model)
    orders.pinned.keep("other", kept=False)
    orders.save()
    assert {file.name for file in tmp_path.iterdir()} == {"drains", "paused", "pinned"}
    again = OperatorOrders(lambda name: tmp_path / name)
    assert again.drained.names == {"a"}
    assert again.paused.names == {"org/model:7b"}
    assert again.pinned.names == {"r/a"}
