from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from gateway.workshop.simulate.comparison import known_policies
from tests.cli.running import output, refusal, run, run_on_terminal

SMALL = ("--fleet", "2x2@40:600,1x2@16:250", "--generate", "rate=0.5,requests=200")
ONE = ("--fleet", "1x1@1:1")
STANDBY = (*SMALL, "--standby", "2x2@40:600")


def test_every_policy_is_shown_in_a_table() -> None:
    ran = run("simulate", *SMALL)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].split()[:3] == ["POLICY", "COMPLETION", "BOUND"]
    assert [line.split()[0] for line in lines[1:]] == list(known_policies())


def test_json_has_all_figures() -> None:
    out = output("simulate", *SMALL, "--policy", "nginx", "--policy", "least_finish", "--json")
    result = json.loads(out)
    assert (result["nodes"], result["slots"], result["requests"]) == (3, 6, 200)
    assert [one["policy"] for one in result["policies"]] == ["nginx", "least_finish"]
    for one in result["policies"]:
        assert 0 < one["bound"] <= one["completion"]["mean"]
        assert {"p50", "p95", "p99", "mean"} == set(one["ttft"])
        assert one["ratio"] == pytest.approx(one["completion"]["mean"] / one["bound"])


def test_an_overload_is_reported_in_words_and_in_json() -> None:
    fleet = ("--fleet", "1x2@20:200", "--policy", "nginx", "--policy", "least_finish")
    flood = (*fleet, "--generate", "rate=2,requests=300")
    out = output("simulate", *flood)
    assert "OVERLOAD: more work arrives than this fleet can do" in out
    assert re.search(r"\n  least_finish: \d{3,}% .* [1-9]\d* of 300 requests waited longer", out)
    for one in json.loads(run("simulate", *flood, "--json").out)["policies"]:
        assert one["overloaded"]
        assert one["load"] > 1
        assert one["longest_queue"] > one["slots"]
        assert one["too_late"] > 0
    calm = (*fleet, "--generate", "rate=0.05,requests=100")
    assert "OVERLOAD" not in run("simulate", *calm).out
    for one in json.loads(run("simulate", *calm, "--json").out)["policies"]:
        assert not one["overloaded"]
        assert one["load"] < 1


def test_the_same_seed_gives_the_same_figures() -> None:
    def played(seed: int) -> object:
        ran = run("simulate", *SMALL, "--policy", "least_finish", "--seed", str(seed), "--json")
        return json.loads(ran.out)["policies"][0]["completion"]

    assert played(4) == played(4)
    assert played(4) != played(5)


def test_an_inventory_and_the_speeds_that_the_gateway_measured(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes:\n  - {name: a, url: http://a}\n  - {name: b, url: http://b}\n")
    speeds = tmp_path / "speeds.json"
    measured = {"prefill_tps": 500.0, "decode_tps": 30.0, "slots_total": 2}
    speeds.write_text(json.dumps({"nodes": [{"name": "a", **measured}]}))
    ran = run(
        *("simulate", "--nodes", str(nodes), "--speeds", str(speeds), "--policy", "haproxy"),
        *("--generate", "rate=0.1,requests=20", "--json"),
    )
    assert ran.status == 0
    assert json.loads(ran.out)["slots"] == 3
    assert "assumed one slot for b" in ran.err
    assert "times `speed_hint` for b: --speeds FILE tells more" in ran.err


def test_a_trace_file_is_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"time": i, "prompt_tokens": 100 + i * 20, "output_tokens": 10, "session": "s"}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run(
        *("simulate", "--fleet", "2x2@40:600", "--trace", str(path), "--json"),
        *("--policy", "least_finish", "--limit", "8"),
    )
    result = json.loads(ran.out)
    assert result["requests"] == 8
    assert result["policies"][0]["cached_share"] > 0.5


def test_broken_lines_of_a_trace_are_reported_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 10, "output_tokens": 5}\n{"prompt_tokens": "x"}\n')
    arguments = ("simulate", "--fleet", "1x1@40:600", "--trace", str(path), "--policy", "nginx")
    told = refusal(*arguments)
    assert f"{path}:2: Expected `int`, got `str` - at `$.prompt_tokens` (write " in told
    ran = run(*arguments, "--skip-broken")
    assert ran.status == 0
    assert f"{path}: skipped 1 broken lines" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fleet", "many"), "'many' is no fleet: write COUNTxSLOTS@DECODE:PREFILL"),
        (
            (*ONE, "--generate", "rate=x"),
            "--generate: Expected `float`, got `str` - at `$.rate`",
        ),
        ((*ONE, "--trace", "none.jsonl"), "none.jsonl: can't be read"),
        ((*ONE, "--trace", "."), "can't be read: Is a directory"),
        ((*ONE, "--speeds", "s.json"), "--speeds is for an inventory"),
        ((*ONE, "--plot", "p.txt"), "must end in .png, .svg or .pdf"),
        ((*ONE, "--plot", "no/p.png"), "there is no folder no"),
        (("--nodes", "none.yaml"), "none.yaml"),
        (("--nodes", "none.yaml", "--speed", "fast"), "no fleet"),
        (("--batch", "1"), "--batch"),
        ((*SMALL, "--policy", "best"), f"no policy 'best'; known: {', '.join(known_policies())}"),
        ((*SMALL, "--standby", "2x2"), "--standby: '2x2' is no fleet"),
        (
            (*STANDBY, "--elastic", "starup=3"),
            "--elastic: Object contains unknown field `starup`",
        ),
        ((*STANDBY, "--elastic", "max=x"), "Expected `int | null`"),
        ((*STANDBY, "--elastic", "min=3,max=2"), "max must not be below min"),
        ((*STANDBY, "--policy", "nginx"), "compares under least_finish alone: leave --policy out"),
        (("--fleet", "1x2@40:600", "--models", "2x1GiB:2GiB"), "write 2x2@40:600/48GiB"),
        (("--fleet", "1x2@40:600/8GiB"), "routers need --models"),
        (("--fleet", "1x2@40:600/8Gib", "--models", "1x9GiB:9GiB"), "the largest router has 8.0"),
        (("--fleet", "1x2@40:600/8", "--models", "x"), "write COUNTxSMALLEST:LARGEST"),
        (("--fleet", "1x2@40:600/8GB", "--models", "1x1GB:1GB", "--exact"), "leave --exact out"),
        (("--fleet", "1x2@40:600/x", "--models", "1x1GB:1GB"), "not a size"),
    ],
)
def test_wrong_usage_is_reported_before_the_work(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(refusal("simulate", *arguments).split())


@pytest.mark.parametrize(("name", "begin"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
def test_a_picture_is_written(tmp_path: Path, name: str, begin: bytes) -> None:
    path = tmp_path / name
    ran = run("simulate", *SMALL, "--policy", "nginx", "--policy", "haproxy", "--plot", str(path))
    assert ran.status == 0
    assert path.read_bytes().startswith(begin)
    assert 5_000 < path.stat().st_size < 200_000
    assert f"written: {path}" in ran.err


def test_a_missing_matplotlib_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    told = refusal("simulate", *SMALL, "--plot", str(tmp_path / "plot.png"), status=1)
    assert f"{sys.executable} -m pip install 'matplotlib>=3.9'\n" in told


def test_a_terminal_shows_the_progress() -> None:
    status, output = run_on_terminal(
        *("simulate", "--policy", "nginx"),
        *("--fleet", "20x2@40:600", "--generate", "rate=3,requests=5000"),
        COLUMNS="100",
    )
    assert status == 0
    assert "nginx" in output
    assert "%" in output


def test_standby_machines_are_compared_with_a_fleet_that_is_always_on() -> None:
    out = output(
        *("simulate", "--fleet", "1x2@40:600", "--standby", "2x2@40:600"),
        *("--generate", "rate=0.2,requests=400,burst=6,every=1200,lasting=200"),
        *("--elastic", "startup=20,stop_after=120,start_above=5,cost=0.5", "--json"),
    )
    always, elastic, alone = json.loads(out)["fleets"]
    names = ["always on", "elastic", "base alone"]
    assert [one["fleet"] for one in (always, elastic, alone)] == names
    assert elastic["machine_hours"] < always["machine_hours"]
    assert elastic["cost"] == pytest.approx(elastic["machine_hours"] * 0.5)
    assert elastic["starts"] > 0
    assert elastic["wait"]["mean"] < alone["wait"]["mean"]


ROUTERS = (
    *("simulate", "--fleet", "1x2@40:600/16GiB,1x2@40:600/24GiB", "--models", "4x2GiB:9GiB"),
    *("--generate", "rate=0.5,requests=120,answer=50", "--placements", "3"),
)


def test_model_placements_are_compared_in_a_table_and_for_scripts() -> None:
    out = output(*ROUTERS)
    found = json.loads(run(*ROUTERS, "--json").out)
    head, ours, own, by_hand, *rest = out.splitlines()
    assert head.split()[:2] == ["PLACEMENT", "COMPLETION"]
    assert ours.startswith("gateway ")
    assert own.startswith("each router's own ")
    assert by_hand.startswith("by hand ")
    assert rest[1] == "The best placement by hand, for this traffic:"
    assert rest[2].startswith("  node-1: model-")
    placements = ["gateway", "each router's own", "by hand"]
    assert [one["placement"] for one in found["placements"]] == placements
    assert found["models"][0] == {"name": "model-1", "memory": 2 << 30, "load_seconds": 2.0}
    assert set(found["placements"][2]["loaded"]) == {"node-1", "node-2"}


def test_a_plain_server_beside_routers_serves_its_own_model(tmp_path: Path) -> None:
    nodes, speeds, trace = (tmp_path / name for name in ("n.yaml", "speeds.json", "day.jsonl"))
    nodes.write_text(
        "nodes:\n  - {name: r1, url: 'http://a', memory: 8GiB, slots: 1}\n"
        "  - {name: plain, url: 'http://b', model: own, slots: 1}\n"
    )
    speed = {"prefill_tps": 600.0, "decode_tps": 40.0}
    rows = [{"name": "r1/model-1", "router": "r1", "models": ["model-1"], **speed}]
    speeds.write_text(json.dumps([*rows, {"name": "plain", "models": ["own"], **speed}]))
    lines = [{"prompt_tokens": 9, "output_tokens": 9, "model": name} for name in ("own", "model-1")]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = output(
        *("simulate", "--nodes", str(nodes), "--speeds", str(speeds), "--trace", str(trace)),
        *("--models", "1x2GiB:2GiB", "--json"),
    )
    ours, *_ = json.loads(out)["placements"]
    assert (ours["requests"], ours["loads"]) == (2, 1)


def test_that_models_do_not_fit_at_once_is_said() -> None:
    out = output(
        *("simulate", "--fleet", "1x2@40:600/16GiB", "--models", "2x9GiB:10GiB"),
        *("--generate", "rate=0.02,requests=10,answer=50"),
    )
    assert "by hand: no placement tried holds all models at once" in out


def test_a_trace_may_name_no_other_models(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 9, "output_tokens": 9, "model": "other"}\n')
    ran = run(*ROUTERS[:5], "--trace", str(path))
    assert ran.status == 2
    assert "not in --models: other" in " ".join(ran.err.split())
