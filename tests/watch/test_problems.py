from __future__ import annotations

import asyncio
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gateway.callers.keys import new_key
from gateway.callers.limits import LimitStanding, UsedQuota
from gateway.cli import app
from gateway.events import EdgeLost
from gateway.schedule.model_placer import UnkeptWish
from gateway.terms import Priority
from gateway.watch.history import RecentTraffic
from gateway.watch.metrics import ClusterSample
from gateway.watch.problems import (
    MOST_NAMED,
    MOST_PROBLEMS,
    OVER_SECONDS,
    FleetCondition,
    NodeCondition,
    Problem,
    ProblemLog,
    QueueCondition,
    Severity,
    StorageCondition,
    find_problems,
)
from tests.cli.running import Ran, run
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

REFUSED = "connection refused"
WELL = FleetCondition(in_service=4, usable=4, models={"m": (4, 4)}, store={"state": "up"})
PROGRAMS = {"journalctl", "df", "openssl", "llama-gateway"}


def out(
    name: str, state: str = "down", host: str = "epyc-a", reason: str = REFUSED, **more: Any
) -> NodeCondition:
    return NodeCondition(name, host, state, reason, **more)


def only(condition: FleetCondition) -> Problem:
    problems = find_problems(condition)
    assert len(problems) == 1, problems
    return problems[0]


LEADING = ClusterSample("prod", "gw-a", "leader", 60.0, 3, "gw-a", (), (), (), 0)

QUOTA = UsedQuota(
    "team-a",
    LimitStanding("key", "budget", "month", 20.0, 16.6, 0.0, 1_796_083_200.0),
    spent=False,
)
NAMED = replace(WELL, name_of={"team-a": "Team A"}.get)
OF_GROUP = LimitStanding("group", "tokens_per_day", "day", 10.0, 9.9, 0.0, 1_796_083_200.0)

LIMITED = RecentTraffic(
    50,
    refused=Counter(rate_limit_exceeded=30),
    callers=Counter({"team-a": 40, "team-b": 10}),
    limited=Counter({"team-a": 30}),
)


def a_flood(caller: str) -> QueueCondition:
    return QueueCondition(waiting=40, top_caller=caller, top_waiting=38, callers=2)


OF_ALL = QUOTA.standing._replace(kind="total")


def a_spill(paid: float, reserved: float, money: float | None) -> dict[str, Any]:
    return {"paid": paid, "reserved": reserved, "money": money, "window": 3600.0}


SPECIFIC: dict[str, dict[str, Any]] = {
    "no leader": {"cluster": replace(LEADING, role="limbo", leader="")},
    "alone": {"cluster": replace(LEADING, role="alone", leader="")},
    "member lost": {"cluster": replace(LEADING, lost=["gw-b"])},
    "files apart": {"cluster": replace(LEADING, apart=["gw-b", "gw-c"])},
    "edge died": {"lost_edges": [EdgeLost("edge-2", "it has ended", ("r1", "r2"))]},
    "node killed": {"nodes": [out("a-0")], "usable": 3},
    "node slow": {"nodes": [out("a-0", "degraded", reason="writes at 30 % of its usual")]},
    "model swapped": {"nodes": [out("a-0", "ready", drift=("model: wanted m, serves other",))]},
    "queue flood": {"queue": QueueCondition(waiting=240, oldest_seconds=60.0)},
    "GPU budget spent": {"spill": a_spill(0.9, 0.2, 1.0)},
    "disk full": {"store": {"state": "full", "error": "it is full", "remedy": "free space"}},
    "folder full": {"storage": StorageCondition("it is full; free space", is_full=True)},
    "folder broken": {"storage": StorageCondition("/srv/b is gone; put it back", results=3)},
    "key's room used up": {"storage": StorageCondition(full_callers=["team-a"])},
    "one key flooding": {"queue": a_flood("team-a")},
    "a key's budget nearly used up": {"quotas": [QUOTA]},
    "a group's tokens used up": {"quotas": [UsedQuota("night", OF_GROUP, spent=True)]},
    "budget of all used up": {"quotas": [QUOTA._replace(standing=OF_ALL)]},
    "group undefined": {"undefined_groups": {"nigth": 2}},
    "ejected": {"nodes": [out("a-0", "ejected")], "usable": 3},
    "loading": {"nodes": [out("a-0", "loading")], "usable": 3},
    "drained": {"nodes": [out("a-0", "draining")]},
    "start failed": {"nodes": [out("s-0", "standby", start_failures=2)]},
    "model out": {"models": {"m": (4, 4), "rare": (1, 0)}},
    "load failed": {"nodes": [out("r1/org/m 1", "", model="org/m 1", load_failures=2)]},
    "load slow": {"nodes": [out("r1/m", "loading", reason="it is loaded since 300 s", model="m")]},
    "second gateway": {"tell_slots": 4, "used_by_others": ["a-0", "a-1"]},
    "left alone": {"nodes": [out("r1", "ready", left_alone=True)]},
    "pin not kept": {"unkept": [UnkeptWish("m", "r1", "r1/m does not fit")]},
    "too few copies": {"unkept": [UnkeptWish("m", "", "1 are loaded, of 2")]},
    "model paused": {"paused_models": {"org/m 1"}},
    "models differ": {"differing_models": {"m": ("m: build of llama.cpp: 1 on a; 2 on b",)}},
    "requests fail": {"traffic": RecentTraffic(requests=20, failed=5)},
    "keys lost": {"keys_lost": "a reload took the last key away"},
    "inventory": {"inventory_error": "nodes.yaml:3: no such key 'slotz'"},
    "settings": {"settings_error": "gateway.yaml:3: no such key"},
    "certificate": {"certificate_error": "the key does not match"},
    "certificate expires": {"certificates": {"listen.tls": 2.0}},
    "ledger": {"ledger": {"dropped": 3, "error": None}},
    "audit": {"audit_lost": 2},
    "limits": {"traffic": LIMITED},
}
FAULTS = {name: replace(WELL, **values) for name, values in SPECIFIC.items()}


ALONE = QueueCondition(waiting=40, top_caller="team-a", top_waiting=40, callers=1)


@each_case(
    "condition",
    [
        WELL,
        FleetCondition(),
        replace(WELL, queue=ALONE),
        replace(WELL, spill=a_spill(0.5, 0.2, 1.0)),
        replace(WELL, spill=a_spill(5.0, 0.0, None)),
        replace(WELL, cluster=LEADING),
        replace(WELL, cluster=replace(LEADING, role="limbo", leader="", role_seconds=5.0)),
        replace(WELL, tell_slots=2, used_by_others=["a-0"]),
        replace(WELL, tell_slots=5, used_by_others=["a-0", "a-1"]),
    ],
)
def test_what_works_is_no_problem(condition: FleetCondition) -> None:
    assert find_problems(condition) == []


@each_case("fault", FAULTS)
def test_each_fault_is_one_problem_with_cause_and_remedy(fault: str) -> None:
    problem = only(FAULTS[fault])
    for text in (problem.title, problem.cause, problem.remedy):
        assert text
    assert problem.cause.endswith((".", ")"))
    assert problem.commands
    assert "below" not in problem.remedy, "it points to a place of the page"


def test_commands_of_remedies_exist() -> None:
    commands = {line for fault in FAULTS.values() for line in only(fault).commands}
    for line in commands:
        program, *words = shlex.split(line)
        assert program in PROGRAMS, line
        if program != "llama-gateway":
            continue
        names = [word for word in words if re.fullmatch(r"[a-z]+", word)]
        result = CliRunner().invoke(app, [*_subcommand(names), "--help"])
        assert result.exit_code == 0, line
        for flag in (word for word in words if word.startswith("--")):
            assert flag in result.output, line


def _subcommand(names: list[str]) -> list[str]:
    return names[:2] if names[0] in {"keys", "groups"} else names[:1]


FAILED_REQUESTS = Counter({
    ("node_failed", "a-0"): 3, ("node_timeout", "a-1"): 1, ("internal_error", ""): 4,
    ("node_failed", "a-1"): 2,
})  # fmt: skip
MODEL_EJECTED = NodeCondition("r1/m", "epyc-a", "ejected", REFUSED, model="m")
FULL = StorageCondition("the disk is full; free space on it", is_full=True, results=7)
TOLD: list[tuple[FleetCondition, Severity, list[str]]] = [
    (FAULTS["load failed"], Severity.WARNING, [
        "r1 could not load org/m 1\nConnection refused. Failed loads in a row: 2.",
        "llama-gateway models load 'org/m 1' r1",
    ]),
    (FAULTS["load slow"], Severity.NOTICE, ["r1/m is loading\nIt is loaded since 300 s"]),
    # A model of a router is no lost node.
    (replace(WELL, in_service=1, usable=1, nodes=[MODEL_EJECTED]), Severity.WARNING, [
        "r1/m is ejected\n",
    ]),
    (FAULTS["node killed"], Severity.WARNING, [
        "a-0 is down\nConnection refused.\n", "llama-gateway nodes probe a-0",
    ]),
    (FAULTS["model paused"], Severity.WARNING, [
        "paused it.\nllama-gateway models resume 'org/m 1'\n",
    ]),
    (FAULTS["models differ"], Severity.NOTICE, ["\nm: build of llama.cpp: 1 on a; 2 on b.\n"]),
    (FAULTS["queue flood"], Severity.CRITICAL, ["240"]),
    (replace(WELL, queue=QueueCondition(waiting=3, oldest_seconds=200.0)), Severity.WARNING, []),
    (replace(WELL, traffic=RecentTraffic(9, 0, Counter(queue_full=4))), Severity.CRITICAL, [
        "4 were refused",
    ]),
    (replace(WELL, storage=FULL), Severity.WARNING, [
        "no room", "The disk is full; free space on it. 7 results wait", "batches.folder_bytes",
        "df -h",
    ]),
    (replace(WELL, traffic=RecentTraffic(20, 10, failures=FAILED_REQUESTS)), Severity.CRITICAL, [
        "the most frequent reason is node_failed (5 times)", "a-0 was the last node of 3",
        "llama-gateway nodes probe a-0",
    ]),
]  # fmt: skip


@each_case(("condition", "severity", "words"), TOLD)
def test_a_problem_is_as_severe_as_it_should_be_and_says_what_happened_and_what_to_do(
    condition: FleetCondition, severity: Severity, words: list[str]
) -> None:
    problem = only(condition)
    assert problem.severity is severity
    # A line each, so that a text may say that it is the whole of one.
    told = "\n".join([problem.title, problem.cause, problem.remedy, *problem.commands])
    assert [word for word in words if word not in told] == []


def test_nodes_of_one_host_are_one_problem_and_critical_if_half_the_fleet_is_out() -> None:
    both = [out("a-0"), out("a-1")]
    problem = only(replace(WELL, nodes=both, usable=2))
    assert problem.nodes == ("a-0", "a-1")
    assert problem.title == "2 nodes of epyc-a are down"
    assert problem.severity is Severity.CRITICAL
    apart = [out("a-0"), out("b-0", host="epyc-b")]
    assert len(find_problems(replace(WELL, nodes=apart, usable=2))) == 2


def test_the_most_severe_come_first_and_a_thousand_dead_hosts_are_bounded() -> None:
    nodes = [out(f"n{number}", host=f"h{number}") for number in range(1000)]
    nodes += [out(f"many-{number}", host="many") for number in range(100)]
    drained = [out(f"drained-{number}", "draining", f"host-{number % 2}") for number in range(40)]
    names = [f"m{number:03}" for number in range(300)]
    full = replace(
        WELL, nodes=[*nodes, *drained], in_service=5000, usable=4000, keys_lost="gone",
        paused_models=names, quotas=[QUOTA._replace(id=name) for name in names],
    )  # fmt: skip
    found = find_problems(full)
    assert len(found) == MOST_PROBLEMS
    order = [list(Severity).index(problem.severity) for problem in found]
    assert order == sorted(order)
    assert found[0].id == "keys_lost"
    assert max(len(problem.nodes) for problem in found) <= MOST_NAMED
    found = find_problems(replace(full, nodes=drained))
    assert len(found) == 2 + 2 * (MOST_NAMED + 1)
    assert "292 more like these: The model m008 is paused" in [one.title for one in found]
    (resume,) = [one.commands[0] for one in found if one.nodes]
    assert resume == "llama-gateway nodes resume --host host-0 --host host-1"


@each_case("fault", ["one key flooding", "key's room used up", "group undefined"])
def test_a_caller_is_named_to_operators_alone(fault: str) -> None:
    problem = only(FAULTS[fault])
    caller = problem.as_json(may_name_callers=True)["caller"]
    assert caller in {"team-a", "group nigth (2 keys)"}
    shown = str(problem.as_json(may_name_callers=False))
    assert "team-a" not in shown
    assert "nigth" not in shown


@pytest.mark.parametrize("fault", ["one key flooding", "limits"])
def test_a_key_of_the_settings_is_to_be_changed_there_and_not_by_a_command(fault: str) -> None:
    problem = only(replace(FAULTS[fault], settings_keys={"team-a"}))
    assert "in gateway.yaml, at its entry of keys" in problem.remedy
    assert not any("keys set" in command for command in problem.commands)
    assert "team-a" not in str(problem.as_json(may_name_callers=False))


@each_case("caller", ["a", "keys", "llama-gateway", "--rpm", "NAME", "x; rm -rf /"])
def test_a_command_is_whole_whatever_the_caller_is_called_and_for_those_who_may_not_know(
    caller: str,
) -> None:
    problem = only(replace(WELL, queue=a_flood(caller)))
    assert all(caller in shlex.split(line) for line in problem.commands)
    assert problem.as_json(may_name_callers=False)["commands"] == (
        "llama-gateway keys show NAME",
        "llama-gateway keys set NAME --rpm 60",
    )


def test_a_quota_is_told_with_its_share_and_its_owner_to_operators_alone() -> None:
    problem = only(replace(NAMED, quotas=[QUOTA]))
    assert problem.severity is Severity.NOTICE
    assert problem.title == "A key has used 83% of the money of the month"
    assert "16.6 of 20 are used; the next month begins at 2026-12-01" in problem.cause
    shown = problem.as_json(may_name_callers=True)
    assert (shown["caller"], shown["caller_name"]) == ("team-a", "Team A")
    viewed = str(problem.as_json(may_name_callers=False))
    assert "team-a" not in viewed
    assert "Team A" not in viewed
    spent = only(replace(WELL, quotas=[QUOTA._replace(spent=True)]))
    assert (spent.id, spent.severity) == (problem.id, Severity.WARNING)
    assert "429" in spent.cause


DOWN = Problem(
    "down:a", "a is down", "Connection refused.", "Look at the machine.",
    ("llama-gateway nodes probe a",), ("a",),
)  # fmt: skip


class Looks:
    """Looks at the problems, a second apart."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log = ProblemLog(lambda: self.now)

    def see(self, *problems: Problem, times: int = 1) -> list[dict[str, Any]]:
        """What the log is told meanwhile."""
        with capture_logs() as told:
            for _ in range(times):
                self.now += 1
                self.log.take(problems)
        return [dict(line) for line in told]


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_problem_and_its_end_are_told_once(looks: Looks) -> None:
    (line,) = looks.see(DOWN, times=11)
    assert (line["event"], line["log_level"], line["title"]) == ("problem", "warning", "a is down")
    assert line["cause"] == "Connection refused."
    assert line["commands"] == "llama-gateway nodes probe a"
    (line,) = looks.see(times=30)
    assert (line["event"], line["id"], line["seconds"]) == ("problem is over", "down:a", 10.0)


def test_a_problem_that_comes_and_goes_is_told_once(looks: Looks) -> None:
    assert len(looks.see(DOWN)) == 1
    for _ in range(20):
        assert looks.see(times=int(OVER_SECONDS) - 1) == []
        assert looks.see(DOWN) == []


def test_one_that_gets_worse_is_told_again_and_one_that_gets_better_is_not(looks: Looks) -> None:
    worse = replace(DOWN, severity=Severity.CRITICAL)
    looks.see(DOWN)
    assert [line["severity"] for line in looks.see(worse, times=3)] == ["critical"]
    assert looks.see(DOWN, times=3) == []


OTHER = new_key("other")
KEYS = [{"id": OTHER.id, "sha256": OTHER.sha256}]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no config/ of the project here


async def problems(gateway: Running) -> dict[str, Problem]:
    return {one.id: one for one in await gateway.gateway.live.view.read_problems()}


async def follow(gateway: Running, command: str) -> Ran:
    words = shlex.split(command)[1:]
    return await asyncio.to_thread(run, *words, "--admin-url", gateway.admin_url)


async def ask(gateway: Running, key: str, **body: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    answer = await gateway.client.post(
        "/v1/chat/completions", json={**CHAT, **body}, headers=headers
    )
    return answer.status_code


async def test_a_paused_model_is_a_problem_that_its_command_ends(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as gateway:
        await follow(gateway, "llama-gateway models pause demo")
        paused = (await problems(gateway))["model_paused:demo"]
        resume, audit = paused.commands
        assert "demo" in (await follow(gateway, audit)).out
        assert (await follow(gateway, resume)).status == 0
        assert await problems(gateway) == {}


async def test_the_commands_against_a_flood_work_for_a_stored_key(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=10.0) as node,
        running_gateway(tmp_path, [node.url], {"keys": KEYS}) as gateway,
    ):
        made = await follow(gateway, "llama-gateway keys create --name alice")
        (key,) = [line.strip() for line in made.out.splitlines() if line.startswith("  lg_")]
        depths, id_ = gateway.gateway.scheduler.depths, key.split("_")[1]
        asked = [asyncio.create_task(ask(gateway, OTHER.text, max_tokens=400)) for _ in range(2)]
        await until(lambda: depths()[Priority.NORMAL] == 1)
        asked += [asyncio.create_task(ask(gateway, key)) for _ in range(12)]
        await until(lambda: depths()[Priority.NORMAL] == 13)
        flood = (await problems(gateway))["flood"]
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (flood.caller, flood.title) == (id_, "One caller floods the queue")
        show, limit = flood.commands
        assert limit == f"llama-gateway keys set {id_} --rpm 60"
        assert (await follow(gateway, show)).status == 0
        assert (await follow(gateway, limit)).status == 0
        assert "rpm 60" in (await follow(gateway, show)).out
