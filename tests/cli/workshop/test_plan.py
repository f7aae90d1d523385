from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.workshop.plan.catalogue import packaged_catalogue
from tests.callers.metered_gateway import recorded
from tests.cli.running import output, refusal, run, run_beside
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

OWN = ("--prompt", "100", "--completion", "100", "--tokens-per-second", "10")
QUICK = ("--requests", "300")


def planned(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output("plan", *arguments, *QUICK, "--json"))
    return found


@pytest.mark.parametrize(("requests", "instances"), [(100, 1), (10_000, 28)])
def test_the_published_sum_comes_out_beside_the_answer(requests: int, instances: int) -> None:
    found = planned("--requests-per-hour", str(requests), *OWN)
    assert found["arithmetic"]["instances"] == instances
    # It leaves out reading and waiting, so the answer is more.
    assert found["nodes"] >= instances
    assert found["answer"]["utilisation"] <= 0.8
    assert found["answer"]["source"] == "simulator"


def test_the_table_shows_the_answer_first_and_the_arithmetic_last() -> None:
    ran = run(
        *("plan", "--requests-per-hour", "600", *OWN, *QUICK, "--slots", "2"),
        *("--prefill-tokens-per-second", "90", "--price-per-month", "60"),
    )
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "2 x node: 120.00 a month"
    assert lines[2].split()[:3] == ["FLEET", "USE", "WAIT"]
    assert ran.out.index("how it comes about") < ran.out.index("  estimate    Erlang C")
    assert "through the real scheduler" in ran.out
    assert "x 730 = 120.00 a month; all machines run, used or not" in ran.out


def test_without_a_node_the_catalogue_is_asked() -> None:
    found = planned(
        *("--requests-per-hour", "300", "--prompt", "200", "--completion", "100"),
        *("--type", "cpu-16", "--type", "t4", "--price-per-kwh", "0.3"),
    )
    kinds = {part["type"] for one in found["options"] for part in one["parts"]}
    assert kinds == {"cpu-16", "t4"}
    cpu = next(one for one in found["options"] if one["fleet"] == "1 x cpu-16")
    assert 0.09 * 0.3 < cpu["price"]["electricity_per_hour"] < 0.23 * 0.3
    deployments = ["single", "queue", "balanced", "hybrid"]
    assert [row["deployment"] for row in found["decisions"]] == deployments
    assert found["break_even"]["source"] == "estimate"
    assert found["currency"] == packaged_catalogue().currency


def test_a_backlog_is_planned_by_its_hours() -> None:
    found = planned("--backlog", "5000", "--within", "4", *OWN, "--slots", "2")
    assert found["traffic"]["backlog_hours"] == 4
    assert found["answer"]["simulated"]["seconds"] <= 4 * 3600
    assert found["answer"]["utilisation"] <= 1
    assert found["break_even"] is None


def test_an_impossible_goal_names_the_figure_and_by_how_much() -> None:
    told = refusal(
        "plan", "--requests-per-hour", "100", *OWN, *QUICK, "--completion-p95", "5", status=1
    )
    assert "no fleet of these nodes meets the goal" in told
    assert "decode_tps 10 and prefill_tps 100 make a completion p95 of" in told
    assert "s above the goal of 5 s: both would have to be" in told


RATE = f"--requests-per-hour 5 {' '.join(OWN)} "
CATALOGUE = "--requests-per-hour 5 --prompt 100 --completion 100 "


@each_case(
    ("words", "problem"),
    [
        ("", "how much is there to do?"),
        (f"--requests-per-hour nan {' '.join(OWN)}", "requests per hour must be above 0"),
        ("--requests-per-hour 5 --prompt 9", "--completion TOKENS is missing"),
        (RATE + "--price-per-hour 1 --price-per-month 1", "can't stand beside price_per_hour"),
        (RATE + "--prompt 1e9", "of a prompt must be from 0"),
        (RATE + "--peak 0.5", "the peak must be from 1"),
        (RATE + "--ttft-p95 inf", "the goal of TTFT must be"),
        (RATE + "--time-limit nan", "--time-limit nan: must be a"),
        (RATE + "--models 2x1GiB:2GiB", "node-1 has no memory for models"),
        (RATE + "--models 1x9GiB:9GiB --memory 8GiB", "the largest router has 8.0 GiB"),
        (RATE + "--plot even.gif", "must end in .png"),
        (CATALOGUE + "--type cpu-9", "has no type 'cpu-9'"),
        ("--trace /nowhere/day.jsonl", "can't be read"),
        ("--fleet --models 2x1GiB:2GiB", "--models has no meaning with --fleet"),
    ],
)
def test_wrong_figures_are_refused(words: str, problem: str) -> None:
    assert problem in refusal("plan", *words.split())


@each_case(
    ("line", "problem"),
    [
        (
            "price_per_hour: -1",
            ":5: types[0].price_per_hour: must be greater than or equal to 0",
        ),
        ("price_per_hour: .nan", ":5: types[0].price_per_hour: must be a finite number"),
        (
            "price_per_month: 1e99",
            ":5: types[0].price_per_month: must be less than or equal to",
        ),
        ("tier: tpu", ":5: types[0].tier: "),
        ("", ":2: types[0]: has no price (write price_per_hour, price_per_month or"),
        (
            "watts: 1\n    idle_watts: 2",
            ":6: types[0].idle_watts: must not be above watts (1)",
        ),
    ],
)
def test_a_wrong_or_missing_figure_is_reported(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"types:\n  - name: a\n    decode_tps: 3\n    prefill_tps: 4\n    {line}\n")
    assert f"mine.yaml{problem}" in refusal("plan", *CATALOGUE.split(), "--catalogue", str(path))


CHAT = {"messages": [{"role": "user", "content": "tell me of " + "nodes " * 60}]}


async def test_the_running_fleet_is_planned_by_its_speeds_and_its_ledger(tmp_path: Path) -> None:
    settings = {"store": {"url": f"sqlite:///{tmp_path}/gateway.db"}}
    node = EmulatedNode(slots=2, prefill_tps=2000, decode_tps=100, answer_tokens=20)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(node)
        nodes = [{"name": "epyc", "url": node.url, "cost_per_hour": 0.2}]
        running = await stack.enter_async_context(running_gateway(tmp_path, nodes, settings))
        fleet = ("plan", "--fleet", *QUICK, "--json")
        before = await run_beside(running, *fleet)
        assert before.status == 1
        assert "no node's speed is measured yet" in before.err
        for _ in range(3):
            answer = await running.client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
        await recorded(running, 3)
        ran = await run_beside(running, *fleet, "--completion-p95", "30")
        assert ran.status == 0, ran.err
        found = json.loads(ran.out)
        changes = ["as it is", "one more like epyc", "goal x 0.75", "goal x 1.5"]
        assert [row["change"] for row in found["changes"]] == changes
        assert found["nodes"][0]["decode_tps"] == pytest.approx(100, rel=0.3)
        assert found["changes"][1]["price"]["per_hour"] == pytest.approx(0.4)
        assert found["nodes"][0]["batch_cost"] >= 0
        assert found["traffic"]["completion_tokens"] == pytest.approx(20)
        assert found["advice"]["verdict"] == "enough"
        assert "from the ledger: 3 requests, 3 of them in its busiest hour" in ran.err
