"""`llama-gateway nodes` for groups of nodes: by host, by label, all but some."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.tools.cli.nodes import models_left_without
from tests.tools.cli.admin_api import AdminApi, admin_api, node
from tests.tools.cli.running import LIMIT, Ran, read_until, run


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AdminApi]:
    """Two hosts of two nodes each, in two racks; all serve one model."""
    monkeypatch.chdir(tmp_path)
    with admin_api() as api:
        for name, host, rack in (
            ("a0", "epyc-a", "a"),
            ("a1", "epyc-a", "b"),
            ("b0", "epyc-b", "b"),
            ("b1", "epyc-b", "b"),
        ):
            api.add(name, host=host, labels={"rack": rack, "numa": name[1]})
        yield api


def run_nodes(api: AdminApi, *arguments: str) -> Ran:
    return run("nodes", *arguments, "--admin-url", api.url)


def posted(api: AdminApi) -> list[str]:
    return [one.removeprefix("POST /admin/nodes/") for one in api.requests if "POST" in one]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--host", "epyc-a"), ["a0", "a1"]),
        (("--host", "epyc-a", "--host", "epyc-b", "--all-but", "b1"), ["a0", "a1", "b0"]),
        (("--label", "rack=b"), ["a1", "b0", "b1"]),
        (("--label", "rack=b", "--label", "numa=1"), ["a1", "b1"]),
        (("--label", "rack=b", "--host", "epyc-b"), ["b0", "b1"]),
        (("--all-but", "a0", "--all-but", "b0"), ["a1", "b1"]),
        (("b0", "a0"), ["a0", "b0"]),
    ],
)
def test_a_group_is_drained_and_resumed(
    api: AdminApi, arguments: tuple[str, ...], names: list[str]
) -> None:
    ran = run_nodes(api, "drain", *arguments)
    assert (ran.status, ran.err) == (0, "")
    assert posted(api) == [f"{name}/drain" for name in names]
    head, *_ = ran.out.splitlines()
    assert head.startswith("NAME"), "what it touches comes first"
    for name in names:
        assert f"{name}: draining (drained by an operator)" in ran.out
    api.requests.clear()
    assert run_nodes(api, "resume", *arguments).status == 0
    assert posted(api) == [f"{name}/resume" for name in names]


def test_a_dry_run_shows_the_nodes_and_touches_none(api: AdminApi) -> None:
    ran = run_nodes(api, "drain", "--label", "rack=a", "--dry-run")
    assert ran.status == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ["NAME", "a0"]
    assert posted(api) == []
    ran = run_nodes(api, "drain", "a0", "--dry-run", "--json")
    assert json.loads(ran.out) == {"nodes": [api.nodes["a0"]]}
    assert posted(api) == []


def test_the_list_can_be_narrowed(api: AdminApi) -> None:
    ran = run_nodes(api, "list", "--host", "epyc-b")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["NAME", "b0", "b1"]


def test_all_nodes_of_a_model_are_not_drained_without_yes(api: AdminApi) -> None:
    api.add("b1", host="epyc-b", labels={"rack": "b"}, models=["only-here", "mistral-7b"])
    api.add("a0", host="epyc-a", labels={"rack": "a"}, state="down")
    ran = run_nodes(api, "drain", "--label", "rack=b")
    assert ran.status == 1
    assert "no other node serves mistral-7b, only-here" in ran.err
    assert "--yes" in ran.err
    assert posted(api) == []
    assert run_nodes(api, "drain", "--label", "rack=b", "--yes").status == 0
    assert len(posted(api)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1)])
def test_on_a_terminal_it_asks(api: AdminApi, answer: str, status: int) -> None:
    ours, theirs = pty.openpty()
    command = ["nodes", "drain", "a0", "a1", "b0", "b1", "--admin-url", api.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *command],
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
    )
    os.close(theirs)
    try:
        assert b"no other node serves mistral-7b" in read_until(ours, b"all the same?")
        assert posted(api) == []
        os.write(ours, f"{answer}\n".encode())
        read_until(ours)
        assert process.wait(LIMIT) == status
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    assert bool(posted(api)) is (status == 0)


def test_a_failure_stops_no_other_and_is_told(api: AdminApi) -> None:
    api.refused = {"a1"}
    ran = run_nodes(api, "drain", "--all-but", "b1")
    assert ran.status == 1
    assert "a0: draining" in ran.out
    assert "b0: draining" in ran.out
    assert "1 of 3 nodes failed: a1: the gateway" in ran.err
    ran = run_nodes(api, "resume", "--all-but", "b1", "--json")
    assert ran.status == 1
    answer = json.loads(ran.out)
    assert [one["name"] for one in answer["nodes"]] == ["a0", "b0"]
    (failed,) = answer["failed"]
    assert failed["name"] == "a1"
    assert "It broke." in failed["error"]


def test_waiting_follows_every_drain(api: AdminApi) -> None:
    for name in api.nodes:
        api.nodes[name]["in_flight"] = 3
    ran = run_nodes(api, "drain", "--host", "epyc-a", "--wait")
    assert ran.status == 0
    assert [api.nodes[name]["in_flight"] for name in ("a0", "a1", "b0")] == [0, 0, 3]


def test_a_probe_of_a_group_fails_for_those_that_do_not_answer(api: AdminApi) -> None:
    api.nodes["b1"]["state"] = "down"
    ran = run_nodes(api, "probe", "--host", "epyc-b")
    assert ran.status == 1
    assert "1 of 2 nodes failed: b1: it does not answer" in ran.err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("drain",), 2, "--host, --label or --all-but"),
        (("drain", "a0", "--host", "epyc-a"), 2, "name the nodes, or choose"),
        (("drain", "--label", "rack"), 2, "must be like rack=b"),
        (("drain", "--host", "epyc-c"), 1, "no node fits"),
        (("drain", "--all-but", "typo"), 1, "there is no node 'typo'"),
        (("drain", "a0", "typo"), 1, "there is no node 'typo'"),
        (("list", "a0"), 2, "takes no node's name"),
    ],
)
def test_a_wrong_choice_is_an_error_and_touches_nothing(
    api: AdminApi, arguments: tuple[str, ...], status: int, words: str
) -> None:
    ran = run_nodes(api, *arguments)
    assert ran.status == status
    assert words in ran.err
    assert posted(api) == []


def test_a_model_that_is_down_anyway_is_not_lost() -> None:
    nodes = [
        node("a", models=["m"], state="down"),
        node("b", models=["n"]),
        node("c", models=["n"], state="ejected"),
    ]
    assert models_left_without(nodes[:1], nodes) == []
    assert models_left_without(nodes[1:2], nodes) == ["n"], "an ejected node serves nothing now"
