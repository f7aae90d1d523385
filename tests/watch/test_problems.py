from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.callers.limits import LimitStanding, UsedQuota
from gateway.cli import app
from gateway.events import EdgeLost
from gateway.schedule.model_placer import UnkeptWish
from gateway.watch.history import RecentTraffic
from gateway.watch.metrics import ClusterSample
from gateway.watch.problems import (
    MOST_NAMED,
    MOST_PROBLEMS,
    FleetCondition,
    NodeCondition,
    Problem,
    QueueCondition,
    Severity,
    StorageCondition,
    find_problems,
)
from tests.each_case import each_case

REFUSED = "connection refused"
WELL = FleetCondition(
    in_service=4,
    usable=4,
    models={"m": (4, 4)},
    store={"state": "up"},
)
PROGRAMS = {"journalctl", "df", "openssl", "llama-gateway"}


def out(name: str, state: str = "down", host: str = "epyc-a") -> NodeCondition:
    return NodeCondition(name, host, state, REFUSED)


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


def a_spill(paid: float, reserved: float, money: float | None) -> dict[str, Any]:
    return {"paid": paid, "reserved": reserved, "money": money, "window": 3600.0}


FAULTS = {
    "no leader": replace(WELL, cluster=replace(LEADING, role="limbo", leader="")),
    "alone": replace(WELL, cluster=replace(LEADING, role="alone", leader="")),
    "member lost": replace(WELL, cluster=replace(LEADING, lost=["gw-b"])),
    "files apart": replace(WELL, cluster=replace(LEADING, apart=["gw-b", "gw-c"])),
    "edge died": replace(WELL, lost_edges=[EdgeLost("edge-2", "it has ended", ("r1", "r2"))]),
    "node killed": replace(WELL, nodes=[out("a-0")], usable=3),
    "node slow": replace(
        WELL, nodes=[NodeCondition("a-0", "epyc-a", "degraded", "writes at 30 % of its usual")]
    ),
    "model swapped": replace(
        WELL,
        nodes=[
            NodeCondition("a-0", "epyc-a", "ready", "", drift=("model: wanted m, serves other",))
        ],
    ),
    "queue flood": replace(WELL, queue=QueueCondition(waiting=240, oldest_seconds=60.0)),
    "GPU budget spent": replace(WELL, spill=a_spill(0.9, 0.2, 1.0)),
    "disk full": replace(
        WELL, store={"state": "full", "error": "the disk is full", "remedy": "free some space"}
    ),
    "folder full": replace(
        WELL,
        storage=StorageCondition("the disk of the files is full; free space on it", is_full=True),
    ),
    "folder broken": replace(
        WELL, storage=StorageCondition("/srv/batches is gone; put it back", results=3)
    ),
    "key's room used up": replace(WELL, storage=StorageCondition(full_callers=["team-a"])),
    "one key flooding": replace(
        WELL, queue=QueueCondition(waiting=40, top_caller="team-a", top_waiting=38, callers=2)
    ),
    "a key's budget nearly used up": replace(WELL, quotas=[QUOTA]),
    "a group's tokens used up": replace(
        WELL,
        quotas=[UsedQuota("night", OF_GROUP, spent=True)],
    ),
    "budget of all used up": replace(
        WELL, quotas=[UsedQuota("", QUOTA.standing._replace(kind="total"), spent=False)]
    ),
    "group undefined": replace(WELL, undefined_groups={"nigth": 2}),
    "ejected": replace(WELL, nodes=[out("a-0", "ejected")], usable=3),
    "loading": replace(WELL, nodes=[out("a-0", "loading")], usable=3),
    "drained": replace(WELL, nodes=[out("a-0", "draining")]),
    "start failed": replace(
        WELL, nodes=[NodeCondition("s-0", "s", "standby", "the hook failed", start_failures=2)]
    ),
    "model out": replace(WELL, models={"m": (4, 4), "rare": (1, 0)}),
    "load failed": replace(
        WELL,
        nodes=[
            NodeCondition(
                "r1/org/m 1",
                "r",
                "",
                "exit code 1: its log says why",
                model="org/m 1",
                load_failures=2,
            )
        ],
    ),
    "load slow": replace(
        WELL, nodes=[NodeCondition("r1/m", "r", "loading", "it is loaded since 300 s", model="m")]
    ),
    "second gateway": replace(WELL, tell_slots=4, used_by_others=["a-0", "a-1"]),
    "left alone": replace(WELL, nodes=[NodeCondition("r1", "r", "ready", "", left_alone=True)]),
    "pin not kept": replace(WELL, unkept=[UnkeptWish("m", "r1", "r1/m does not fit")]),
    "too few copies": replace(WELL, unkept=[UnkeptWish("m", "", "1 are loaded, of 2")]),
    "model paused": replace(WELL, paused_models={"org/m 1"}),
    "models differ": replace(
        WELL, differing_models={"m": ("m: build of llama.cpp: 1 on a; 2 on b",)}
    ),
    "requests fail": replace(WELL, traffic=RecentTraffic(requests=20, failed=5)),
    "keys lost": replace(WELL, keys_lost="a reload took the last key away"),
    "inventory": replace(WELL, inventory_error="nodes.yaml:3: no such key 'slotz'"),
    "settings": replace(WELL, settings_error="gateway.yaml:3: no such key"),
    "certificate": replace(WELL, certificate_error="the key does not match"),
    "certificate expires": replace(WELL, certificates={"listen.tls": 2.0}),
    "ledger": replace(WELL, ledger={"dropped": 3, "error": None}),
    "audit": replace(WELL, audit_lost=2),
    "limits": replace(WELL, traffic=LIMITED),
}


def test_a_fleet_that_works_has_no_problem() -> None:
    assert find_problems(WELL) == []
    assert find_problems(FleetCondition()) == []


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
        "r1 could not load org/m 1\nExit code 1: its log says why. Failed loads in a row: 2.",
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


def test_not_all_of_many_failed_loads_are_told() -> None:
    failed = [
        NodeCondition(f"r1/{number}", "r", "", "", model=str(number), load_failures=1)
        for number in range(MOST_NAMED + 3)
    ]
    found = find_problems(replace(WELL, nodes=failed))
    assert len(found) == MOST_NAMED + 1
    assert found[-1].title.startswith("3 more like these: r1 could not load")


def test_nodes_of_one_host_are_one_problem_and_critical_if_half_the_fleet_is_out() -> None:
    both = [out("a-0"), out("a-1")]
    problem = only(replace(WELL, nodes=both, usable=2))
    assert problem.nodes == ("a-0", "a-1")
    assert problem.title == "2 nodes of epyc-a are down"
    assert problem.severity is Severity.CRITICAL
    apart = [out("a-0"), out("b-0", host="epyc-b")]
    assert len(find_problems(replace(WELL, nodes=apart, usable=2))) == 2


def test_a_fleet_without_a_working_node_says_so_first() -> None:
    nodes = [out(f"a-{number}") for number in range(4)]
    dead = replace(WELL, nodes=nodes, usable=0, models={"m": (4, 0)})
    first = find_problems(dead)[0]
    assert first.title == "No node can take work"
    assert "4 down" in first.cause


def test_the_most_severe_come_first_and_a_thousand_dead_hosts_are_bounded() -> None:
    nodes = [out(f"n{number}", host=f"h{number}") for number in range(1000)]
    nodes += [out(f"many-{number}", host="many") for number in range(100)]
    nodes.append(out("drained", "draining"))
    found = find_problems(
        replace(WELL, nodes=nodes, in_service=5000, usable=4000, keys_lost="gone")
    )
    assert len(found) == MOST_PROBLEMS
    order = [list(Severity).index(problem.severity) for problem in found]
    assert order == sorted(order)
    assert found[0].id == "keys_lost"
    assert max(len(problem.nodes) for problem in found) <= MOST_NAMED


def test_hundreds_of_paused_and_differing_models_leave_room_for_other_problems() -> None:
    names = [f"m{number:03}" for number in range(300)]
    found = find_problems(
        replace(
            WELL,
            paused_models=names,
            differing_models={name: (f"{name}: context of a slot: 1; 2",) for name in names},
        )
    )
    assert len(found) == 2 * (MOST_NAMED + 1)
    titles = [problem.title for problem in found]
    assert "292 more like these: The model m008 is paused" in titles
    assert "292 more like these: The nodes of m008 differ" in titles


def test_one_command_is_for_all_nodes_of_a_problem() -> None:
    drained = only(replace(WELL, nodes=[out("a-0", "draining"), out("a 1", "draining")]))
    assert drained.commands[0] == "llama-gateway nodes resume a-0 'a 1'"
    down = only(replace(WELL, nodes=[out("a-0"), out("a-1")], usable=2))
    assert down.commands[0] == "llama-gateway nodes probe a-0 a-1"


def test_many_nodes_are_chosen_by_their_hosts() -> None:
    drained = [out(f"a-{number}", "draining", f"epyc-{number % 2}") for number in range(40)]
    problem = only(replace(WELL, nodes=drained))
    assert problem.commands[0] == "llama-gateway nodes resume --host epyc-0 --host epyc-1"
    everywhere = [out(f"a-{number}", "draining", f"epyc-{number}") for number in range(1000)]
    problem = only(replace(WELL, nodes=everywhere))
    assert problem.commands[0].count("--host") == MOST_NAMED
    assert f"those of {MOST_NAMED} hosts" in problem.remedy
    assert problem.commands[1] == "llama-gateway nodes"


def test_the_flooding_caller_is_named_to_operators_alone() -> None:
    problem = only(FAULTS["one key flooding"])
    assert "team-a" not in problem.title + problem.cause + problem.remedy
    assert problem.as_json(may_name_callers=True)["caller"] == "team-a"
    shown = problem.as_json(may_name_callers=False)
    assert "team-a" not in str(shown)


@pytest.mark.parametrize("fault", ["one key flooding", "limits"])
def test_a_key_of_the_settings_is_to_be_changed_there_and_not_by_a_command(fault: str) -> None:
    problem = only(replace(FAULTS[fault], settings_keys={"team-a"}))
    assert "in gateway.yaml, at its entry of keys" in problem.remedy
    assert not any("keys set" in command for command in problem.commands)
    assert "team-a" not in str(problem.as_json(may_name_callers=False))


def test_a_caller_that_its_limits_refuse_is_not_to_be_given_one() -> None:
    problem = only(FAULTS["limits"])
    assert "Give" not in problem.remedy
    assert "tell its user to send less" in problem.remedy
    assert problem.commands == ("llama-gateway keys show team-a",)


@each_case("caller", ["a", "keys", "llama-gateway", "--rpm", "NAME"])
def test_a_command_is_whole_for_those_who_may_not_know_the_caller(caller: str) -> None:
    flood = QueueCondition(waiting=40, top_caller=caller, top_waiting=38, callers=2)
    shown = only(replace(WELL, queue=flood)).as_json(may_name_callers=False)
    assert shown["commands"] == (
        "llama-gateway keys show NAME",
        "llama-gateway keys set NAME --rpm 60",
    )


def test_a_caller_that_waits_much_is_not_said_to_flood_the_queue_when_its_limits_refuse_it() -> (
    None
):
    queue = QueueCondition(waiting=100, top_caller="desk", top_waiting=20, callers=9)
    traffic = LIMITED
    problem = only(replace(WELL, queue=queue, traffic=traffic))
    assert (problem.caller, problem.title) == (
        "team-a",
        "One caller sends more than its limits allow",
    )


def test_a_caller_alone_floods_nobody() -> None:
    alone = QueueCondition(waiting=40, top_caller="team-a", top_waiting=40, callers=1)
    assert find_problems(replace(WELL, queue=alone)) == []


def test_a_budget_with_something_left_is_no_problem() -> None:
    for spill in (
        a_spill(0.5, 0.2, 1.0),
        a_spill(5.0, 0.0, None),
    ):
        assert find_problems(replace(WELL, spill=spill)) == []


def test_a_hostile_name_can_not_end_the_command_of_a_remedy() -> None:
    caller = "x; rm -rf /"
    flood = QueueCondition(waiting=40, top_caller=caller, top_waiting=38, callers=2)
    problem = only(replace(WELL, queue=flood))
    assert all(caller in shlex.split(line) for line in problem.commands)


def test_a_key_that_keeps_too_much_is_named_to_operators_alone() -> None:
    problem = only(FAULTS["key's room used up"])
    assert problem.severity is Severity.NOTICE
    assert problem.as_json(may_name_callers=True)["caller"] == "team-a"
    assert "team-a" not in str(problem.as_json(may_name_callers=False))


@pytest.mark.parametrize(("used", "tell"), [(1, 1), (1, 2), (2, 5), (0, 0)])
def test_others_on_one_node_or_on_few_are_no_second_gateway(used: int, tell: int) -> None:
    names = [f"a-{number}" for number in range(used)]
    assert find_problems(replace(WELL, tell_slots=tell, used_by_others=names)) == []


def test_a_second_gateway_is_told_with_the_nodes_that_it_uses() -> None:
    names = [f"a-{number}" for number in range(20)]
    problem = only(replace(WELL, tell_slots=30, used_by_others=names))
    assert "20 of the 30 nodes" in problem.cause
    assert problem.nodes == tuple(names[:MOST_NAMED])


def test_a_change_of_the_leader_is_no_problem() -> None:
    for cluster in (LEADING, replace(LEADING, role="limbo", leader="", role_seconds=5.0)):
        assert not find_problems(replace(WELL, cluster=cluster))


def test_requests_that_broke_off_with_an_edge_are_named() -> None:
    names = tuple(f"r{number}" for number in range(MOST_NAMED + 2))
    lost = [EdgeLost("edge-1", "it has ended", ()), EdgeLost("edge-2", "silence", names)]
    problem = only(replace(WELL, lost_edges=lost))
    assert problem.title == "2 edges died in the last 10 min"
    assert problem.cause == (
        "The last one was 'edge-2' (silence). 10 requests broke off: "
        "r0, r1, r2, r3, r4, r5, r6, r7 and 2 more."
    )
    alone = only(replace(WELL, lost_edges=lost[:1]))
    assert alone.cause.endswith("0 requests broke off: none.")


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


def test_of_many_quotas_some_are_told_one_by_one() -> None:
    many = [QUOTA._replace(id=str(number)) for number in range(MOST_NAMED + 5)]
    problems = find_problems(replace(WELL, quotas=many))
    assert len({problem.id for problem in problems}) == MOST_NAMED + 1
    assert problems[-1].title.startswith("5 more like these: ")


def test_groups_that_nobody_has_defined_are_one_problem() -> None:
    groups = {f"g{number}": 1 for number in range(10)}
    problem = only(replace(WELL, undefined_groups={"night shift": 3, **groups}))
    assert problem.title.endswith(": 11")
    assert problem.caller is not None
    assert problem.caller.startswith("group night shift (3 keys), g0 (1 key)")
    assert problem.caller.endswith("and 3 more")
    assert "llama-gateway groups set 'night shift'" in problem.commands[0]
    assert "night" not in str(problem.as_json(may_name_callers=False))
