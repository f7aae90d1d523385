from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.config.inventory import Inventory, load_inventory
from gateway.workshop.simulate.fleets import (
    FleetError,
    NodeSpeeds,
    from_inventory,
    from_text,
    read_speeds,
)
from tests.each_case import each_case

USUAL = from_text("1x1@10:100+0.2")[0]


def inventory(folder: Path, text: str) -> Inventory:
    path = folder / "nodes.yaml"
    path.write_text(text)
    return load_inventory(path)


def test_a_fleet_is_read_from_text() -> None:
    machines = from_text("2x2@40:600, 1x4@16.5:250+0.3", 256, cache_ram_mib=0)
    known = [(m.name, m.slots, m.decode_tps, m.prefill_tps, m.batch_cost) for m in machines]
    assert known == [
        ("node-1", 2, 40.0, 600.0, 0.15),
        ("node-2", 2, 40.0, 600.0, 0.15),
        ("node-3", 4, 16.5, 250.0, 0.3),
    ]
    assert (machines[0].batch_tokens, machines[0].cache_tokens) == (256, 0)
    assert machines[0].token_step == pytest.approx(0.15 / 40)
    assert from_text("1x1@1:1")[0].cache_tokens == 65_536


@each_case(
    ("text", "message"),
    [
        ("", "write COUNTxSLOTS@DECODE:PREFILL, such as 4x2@40:600"),
        ("4x2", "write COUNTxSLOTS"),
        ("4x2@4.0.0:600", "write COUNTxSLOTS"),
        ("0x2@40:600", "1 to 100000 nodes"),
        ("1x0@40:600", "needs a slot"),
        ("1x2@0:600", "speeds must be positive"),
    ],
)
def test_an_impossible_fleet_is_an_error(text: str, message: str) -> None:
    with pytest.raises(FleetError, match=message):
        from_text(text)


def test_an_inventory_with_measured_speeds(tmp_path: Path) -> None:
    nodes = inventory(
        tmp_path,
        """
nodes:
  - {name: a, url: http://a, slots: 2}
  - {name: b, url: http://b, speed_hint: 3.0}
  - {name: c, url: http://c, enabled: false}
  - {name: d, url: http://d, standby: true}
""",
    )
    speeds = {"a": NodeSpeeds("a", 700.0, 44.0), "b": NodeSpeeds("b", slots=4)}
    machines, notes = from_inventory(nodes, speeds, USUAL)
    assert [(m.name, m.slots, m.prefill_tps, m.decode_tps) for m in machines] == [
        ("a", 2, 700.0, 44.0),
        ("b", 4, 300.0, 30.0),
    ]
    assert notes == [
        "assumed 10 and 100 tokens/s times `speed_hint` for b: --speeds FILE tells more"
    ]
    text = "nodes:\n" + "".join(f"  - {{name: n{i}, url: http://n{i}}}\n" for i in range(5))
    machines, notes = from_inventory(inventory(tmp_path, text), {}, USUAL)
    assert {machine.slots for machine in machines} == {1}
    assert notes[0].startswith("assumed one slot for n0, n1, n2 and 2 more")


@each_case(
    ("text", "message"),
    [
        ("nodes: []", "no node that gets work"),
        ("nodes:\n  - {name: a, url: http://a}\n", "speeds must be positive"),
    ],
)
def test_an_inventory_that_no_simulation_can_play_is_an_error(
    tmp_path: Path, text: str, message: str
) -> None:
    speeds = {"a": NodeSpeeds("a", float("nan"), 1.0)}
    with pytest.raises(FleetError, match=message):
        from_inventory(inventory(tmp_path, text), speeds, USUAL)


ROUTERS = """
defaults: {memory: 48GiB}
nodes:
  - {name: r1, url: "http://a:1", host: epyc}
  - {name: r2, url: "http://a:2", host: epyc}
  - {name: plain, url: http://b, slots: 2, model: [other]}
"""


def test_routers_are_those_that_have_models_in_the_measured_speeds(tmp_path: Path) -> None:
    nodes = inventory(tmp_path, ROUTERS)
    told = [
        {"name": "r1", "slots_total": 0, "models": [], "router": None},
        {"name": "r1/a", "router": "r1", "slots_total": 4, "models": ["a", "alias"]},
        {"name": "r1/b.gguf", "router": "r1", "slots_total": 0, "models": ["b"]},
        {"name": "r2", "slots_total": 0},
        {"name": "r2/a", "router": "r2", "slots_total": 0, "models": ["a"]},
        {"name": "plain", "prefill_tps": 50, "decode_tps": 5, "models": ["other"]},
    ]
    told[1] |= {"prefill_tps": 300.0, "decode_tps": 20.0, "batch_cost": 0.1}
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"nodes": told}))
    speeds = read_speeds(path)
    machines, notes = from_inventory(nodes, speeds, USUAL, on_demand=True)
    first, second, plain = machines
    assert (first.host, second.host) == ("epyc", "epyc")
    assert [one.memory >> 30 for one in machines] == [48, 48, 0]
    assert first.models == {"a", "alias", "b"}
    assert first.model_speeds["a"] == (300.0, 20.0)
    assert (first.slots, first.batch_cost, second.slots) == (4, 0.1, 1)
    assert plain.models == {"other"}
    assert "for r2: --speeds FILE tells more" in notes[1]
    with pytest.raises(FleetError, match="r1 is a router: routers need --models"):
        from_inventory(nodes, speeds, USUAL)
    # Without measured speeds those with memory are routers.
    unmeasured, _ = from_inventory(nodes, {}, USUAL, on_demand=True)
    assert {one.memory >> 30 for one in unmeasured} == {48}
    plain_ones, _ = from_inventory(nodes, {}, USUAL)
    assert {one.memory for one in plain_ones} == {0}
    without = inventory(tmp_path, ROUTERS.replace("48GiB", "null"))
    with pytest.raises(FleetError, match="says no `memory` of epyc"):
        from_inventory(without, speeds, USUAL, on_demand=True)


def test_speeds_are_what_the_nodes_command_writes(tmp_path: Path) -> None:
    message = {
        "nodes": [
            {"name": "a", "prefill_tps": 600.5, "decode_tps": 40, "slots_total": 2, "state": "up"},
            {"name": "b", "prefill_tps": None, "decode_tps": None, "slots_total": None},
        ]
    }
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps(message))
    assert read_speeds(path) == {"a": NodeSpeeds("a", 600.5, 40.0, None, 2), "b": NodeSpeeds("b")}


@each_case(
    ("name", "text", "message"),
    [
        ("s.json", "{,", "s.json: can't be read: .*line 1 column 2"),
        ("s.yaml", "a: [", "s.yaml: can't be read: .*line 1"),
        ("s.json", "3", "Expected `array`, got `int`"),
        ("s.json", '{"nodes": [3]}', r"Expected `object`, got `int` - at `\$\[0\]`"),
        (
            "s.json",
            '[{"name": "a", "decode_tps": 0}]',
            r"> 0.0 - at `\$\[0\]\.decode_tps`",
        ),
        ("none.json", "", r"none\.json: can't be read: .*No such file"),
    ],
)
def test_wrong_speeds_are_errors_with_their_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    if text:
        path.write_text(text)
    with pytest.raises(FleetError, match=message):
        read_speeds(path)
