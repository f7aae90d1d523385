from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.workshop.simulate.comparison import known_policies
from tests.cli.running import output, refusal, run
from tests.each_case import each_case

SMALL = ("--fleet", "2x2@40:600,1x2@16:250", "--generate", "rate=0.5,requests=200")
ONE = ("--fleet", "1x1@1:1")


def test_policies_are_compared_in_a_table_a_picture_and_for_scripts(tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    ran = run("simulate", *SMALL, "--plot", str(picture))
    assert (ran.status, ran.err) == (0, f"written: {picture}\n")
    assert picture.read_bytes().startswith(b"<?xml")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["POLICY", *known_policies()]
    out = output("simulate", *SMALL, "--policy", "nginx", "--policy", "least_finish", "--json")
    result = json.loads(out)
    assert (result["nodes"], result["slots"], result["requests"]) == (3, 6, 200)
    assert [one["policy"] for one in result["policies"]] == ["nginx", "least_finish"]
    for one in result["policies"]:
        assert 0 < one["bound"] <= one["completion"]["mean"]
        assert 0 < one["cached_share"] < 1
        assert {"p50", "p95", "p99", "mean"} == set(one["ttft"])
        assert one["ratio"] == pytest.approx(one["completion"]["mean"] / one["bound"])


def test_an_overload_is_reported_in_words_and_in_json() -> None:
    fleet = ("--fleet", "1x2@20:200", "--policy", "least_finish")
    for traffic, overloaded in (("rate=2,requests=300", True), ("rate=0.05,requests=50", False)):
        out = output("simulate", *fleet, "--generate", traffic)
        assert ("OVERLOAD: more work arrives than this fleet can do" in out) == overloaded
        found = json.loads(output("simulate", *fleet, "--generate", traffic, "--json"))
        (one,) = found["policies"]
        assert one["overloaded"] == (one["load"] > 1) == (one["too_late"] > 0) == overloaded


@each_case(
    ("words", "message"),
    [
        ("--fleet many", "'many' is no fleet: write COUNTxSLOTS@DECODE:PREFILL"),
        ("--trace none.jsonl", "none.jsonl: can't be read"),
        ("--speeds s.json", "--speeds is for an inventory"),
        ("--plot no/p.png", "there is no folder no"),
        ("--policy best", f"no policy 'best'; known: {', '.join(known_policies())}"),
        ("--standby 2x2@40:600 --elastic min=3,max=2", "max must not be below min"),
        ("--standby 2x2@40:600 --policy nginx", "compares under least_finish alone"),
        ("--models 2x1GiB:2GiB", "write 2x2@40:600/48GiB"),
        ("--fleet 1x2@40:600/8GB --models 1x1GB:1GB --exact", "leave --exact out"),
        ("--generate speed=1", "unknown field `speed` (known: requests, rate"),
        ("--generate rate=fast", "Expected `float`, got `str` - at `$.rate`"),
        ("--generate rate=inf", "<= 1000000000.0"),
        ("--generate turns=nan", ">= 1.0"),
        ("--generate batch=0.7,urgent=0.7", "shares of the classes"),
        ("--generate burst=0.5", ">= 1.0"),
        ("--generate lasting=4000", "lasting must be shorter than every"),
    ],
)
def test_wrong_usage_is_reported_before_the_work(words: str, message: str) -> None:
    fleet = () if "--fleet" in words or "--nodes" in words else ONE
    assert message in " ".join(refusal("simulate", *fleet, *words.split()).split())


GOOD = '{"prompt_tokens": 1, "output_tokens": 1}\n'
TOKENS = GOOD + '{"prompt_tokens": 1, "output_tokens": 1, '


@each_case(
    ("flag", "text", "message"),
    [
        ("--trace", GOOD + '{"prompt_tokens": 3,', "file.yaml:2: Input data was truncated"),
        ("--trace", "hello", "file.yaml:1: JSON is malformed: invalid character (byte 0)"),
        ("--trace", '{"prompt_tokens": 3}', "Object missing required field `output_tokens`"),
        ("--trace", GOOD.replace("1", "0"), "Expected `int` >= 1 - at `$.prompt_tokens`"),
        ("--trace", TOKENS + '"time": NaN}', "JSON is malformed: invalid character (byte 49)"),
        ("--trace", TOKENS + '"class": "vip"}', "batch)?$' - at `$.class`"),
        ("--trace", TOKENS + '"tokens": 7}', "unknown field `tokens`"),
        ("--trace", TOKENS + '"tokens": 7}', '(write {"prompt_tokens": 1800, "output_tokens": 120'),
        ("--trace", TOKENS + '"prefix": "a", "prefix_tokens": 2}', "more than prompt_tokens"),
        ("--speeds", "{,", "file.yaml: can't be read: "),
        ("--speeds", "3", "Expected `array`, got `int`"),
        ("--speeds", '[{"name": "a", "decode_tps": 0}]', "> 0.0 - at `$[0].decode_tps`"),
        ("--models", "- {name: a}", "required field `memory` - at `$[0]`"),
        ("--models", "- {name: a, memory: 1GiB, load_seconds: -1}", "0 - at `$[0].load_seconds`"),
        ("--models", "- {name: a, memory: 1GiB}\n- {name: a, memory: 1GiB}", "one twice"),
        ("--models", "- {name: a, memory: 1GiB}\n- {name: b, memory: 1GiB, share: 2}", "a `share`"),
        ("--models", "a: [", "expected"),
    ],
)
def test_a_mistake_in_a_file_is_reported(
    tmp_path: Path, flag: str, text: str, message: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{name: a, url: http://127.0.0.1:9}]\n")
    router = ("--fleet", "1x2@40:600/8GB")
    fleet = {"--trace": ONE, "--models": router, "--speeds": ("--nodes", str(nodes))}[flag]
    assert message in " ".join(refusal("simulate", *fleet, flag, str(path)).split())


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
