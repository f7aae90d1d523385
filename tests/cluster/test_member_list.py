"""The table of members, and the commands for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from sqlalchemy import Connection, insert

from gateway.cluster.tables import (
    MemberRow,
    read_members,
    read_sharers,
    register,
    remove,
    stored_members,
    write_sharers,
)
from gateway.store.schema import leadership, processes
from gateway.store.store import Store
from tests.cli.running import Ran, run
from tests.cluster.certificates import Authority
from tests.store.stores import opened


def row(name: str, process: str = "p", generation: int = 0) -> MemberRow:
    return MemberRow(name, process, generation, "10.0.0.1:8090", "1.0")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def registered(store: Store, own: MemberRow, cluster: str = "c") -> list[MemberRow]:
    return store.run_now(lambda connection: register(connection, cluster, own))


def test_the_process_that_registers_last_is_its_members(store: Store) -> None:
    assert registered(store, row("b", "p1")) == [row("b", "p1", 1)]
    assert registered(store, row("a", "p2")) == [row("a", "p2", 1), row("b", "p1", 1)]
    assert registered(store, row("b", "p3"))[1] == row("b", "p3", 2)
    # A database that has come back with an old state counts on from what is known.
    assert registered(store, row("b", "p3", 7))[1] == row("b", "p3", 7)
    registered(store, row("z"), "another cluster")
    names = [one.name for one in store.run_now(lambda one: read_members(one, "c"))]
    assert names == ["a", "b"]


def test_a_member_is_removed_by_name(store: Store) -> None:
    registered(store, row("a"))
    assert not store.run_now(lambda connection: remove(connection, "d", "a"))
    assert store.run_now(lambda connection: remove(connection, "c", "a"))
    assert not store.run_now(lambda connection: remove(connection, "c", "a"))
    assert store.run_now(lambda connection: stored_members(connection, "c")) == []
    # What is missing may be an old state of the database; this one was removed.
    assert store.run_now(lambda one: read_members(one, "c")) == [row("a", "", 1)]
    assert registered(store, row("a", "p2")) == [row("a", "p2", 2)]


def test_only_who_leads_replaces_the_lists_of_sharers(store: Store) -> None:
    def write(holder: str, epoch: int) -> bool:
        return store.run_now(lambda one: write_sharers(one, "c", holder, epoch, "[1]"))

    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[]"
    assert not write("a/p", 3)
    values = {"cluster": "c", "holder": "a/p", "epoch": 3, "counter": 0}
    store.run_now(lambda connection: connection.execute(insert(leadership).values(values)).rowcount)
    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[]"
    assert not write("a/p", 2)
    assert not write("b/p", 3)
    assert write("a/p", 3)
    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[1]"


def fill(store: Store, holder: str, process: str, seen_at: float) -> None:
    lead = {"cluster": "c", "holder": holder, "epoch": 3, "counter": 0}
    alive = {"id": process, "started_at": 1.0, "seen_at": seen_at, "host": "h", "pid": 1}

    def job(connection: Connection) -> None:
        connection.execute(insert(leadership).values(lead))
        connection.execute(insert(processes).values(alive))

    store.run_now(job)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return the path of settings whose store has the members a, which leads, and b."""
    url = f"sqlite:///{tmp_path}/gateway.db"
    with opened(url) as store:
        for name in ("a", "b"):
            registered(store, row(name, f"p{name}"))
        fill(store, "a/pa/2", "pb", time.time())
    settings = Authority(tmp_path / "certificates").settings("a")
    written = settings.model_dump(mode="json", exclude_none=True)
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"store": {"url": url}, "cluster": written}))
    return str(path)


def test_the_command_lists_members_and_removes_who_is_gone_and_no_other(
    config: str, tmp_path: Path
) -> None:
    def cluster(*arguments: str) -> Ran:
        return run("cluster", *arguments, "--config", config)

    ran = cluster("members", "--json")
    told = json.loads(ran.out)
    assert (ran.status, told["cluster"]) == (0, "c")
    listed = [(one["name"], one["leads"], one["epoch"]) for one in told["members"]]
    assert listed == [("a", True, 3), ("b", False, None)]
    assert told["members"][0]["seen_seconds"] is None
    assert told["members"][1]["seen_seconds"] < 60
    assert "10.0.0.1:8090" in cluster("members").out
    living = cluster("remove", "b")
    assert living.status == 1
    assert "end its process first" in living.err
    assert cluster("remove", "b", "--force").status == 0
    unknown = cluster("remove", "b")
    assert unknown.status == 1
    assert "has no member b, but a" in unknown.err
    assert cluster("remove", "a").status == 0
    assert "no member yet" in cluster("members").err
    Path(config).write_text("queue: {max: 1}")
    ran = cluster("members")
    assert ran.status == 2
    assert "no section `cluster`" in ran.err
