"""`llama-gateway usage`, `audit` and `requests`: through a running gateway, else from its store."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.callers.keys import new_key
from gateway.store.database import locate_store
from gateway.store.store import Store
from gateway.watch.audit import AuditTrail
from tests.callers.ledger_rows import a_row, add_rows
from tests.callers.metered_gateway import ALICE, VIP, chat, metered_gateway, recorded
from tests.cli.running import output, refusal, run, run_beside
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

THEN = 1_700_000_000.0
"""The time of the first entry of the audit log."""


def settings_of(folder: Path, url: str = "sqlite:///own.db") -> Path:
    """Settings of a gateway that does not run."""
    settings = folder / "gateway.yaml"
    settings.write_text(yaml.safe_dump({"store": {"url": url}, "admin": {"port": 9}}))
    return settings


def filled(folder: Path, *rows: dict[str, Any], count: int = 3) -> Path:
    """Settings whose store has these requests, or some of just now, of team-a, and an audit log."""
    store = Store(locate_store(f"sqlite:///{folder / 'own.db'}", folder))
    store.start()
    usual = [a_row(n, ended_at=time.time() - 1, gpu_cost=2.0) for n in range(0 if rows else count)]
    store.run_now(lambda connection: add_rows(connection, [*rows, *usual]))
    times = iter(range(10))
    trail = AuditTrail(lambda: THEN + next(times), store)
    trail.record("alice", "operator", "drain", "epyc-a", details={"deadline": "60"})
    trail.record("bob", "viewer", "drain", "epyc-b", "role_required", refused=True)
    trail.record("root", "admin", "keys.revoke", "carol")
    asyncio.run(trail.flush())
    assert store.close(10.0)
    return settings_of(folder)


async def test_the_running_gateway_is_asked(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE)
        await chat(running, VIP)
        await recorded(running, 2)
        told = await run_beside(running, "usage", "--by", "key", "--json")
        assert told.status == 0
        assert f"of the gateway at {running.admin_url}" in told.err
        assert "gateway.db" in told.err
        rows = {row["key"]: row["requests"] for row in json.loads(told.out)["rows"]}
        assert rows == {"alice": 1, "vip": 1}
        table = await run_beside(running, "usage", "--by", "key", "--csv")
        assert [row["key"] for row in csv.DictReader(io.StringIO(table.out))] == ["vip", "alice"]
        shown = await run_beside(running, "usage", "--by", "tier,key")
        assert ("TIER" in shown.out, "requests were charged" in shown.out) == (True, True)
        told = await run_beside(running, "requests")
        header, latest, first = told.out.splitlines()
        assert header.split()[:5] == ["ENDED", "SECONDS", "WAIT", "TTFT", "OUTCOME"]
        assert ("vip" in latest, "Alice" in first) == (True, True)
        found = json.loads((await run_beside(running, "requests", "--key", "Alice", "--json")).out)
        assert ([one["key"] for one in found["requests"]], found["complete"]) == (["alice"], True)


async def test_another_store_than_the_gateways_and_none_at_all_are_told(tmp_path: Path) -> None:
    for name in ("own", "none"):
        (tmp_path / name).mkdir()
    other = settings_of(tmp_path / "own")
    async with metered_gateway(tmp_path) as running:
        told = await asyncio.to_thread(
            run, "usage", "--admin-url", running.admin_url, "--config", str(other)
        )
        assert (told.status, told.out) == (2, "")
        assert "own.db" in told.err
        assert "--config" in told.err
    async with metered_gateway(tmp_path / "none", store={"url": "off"}) as running:
        told = await run_beside(running, "usage")
        assert (told.status, "has no store" in told.err) == (1, True)


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    told = run("usage", "--config", str(settings_of(tmp_path)))
    assert (told.status, "no gateway has used it yet" in told.err) == (1, True)
    assert not (tmp_path / "own.db").exists()
    assert "store.url: off" in refusal("usage", "--config", str(settings_of(tmp_path, "off")))


def test_without_a_gateway_the_store_is_read(tmp_path: Path) -> None:
    settings = filled(tmp_path)
    told = run("usage", "--by", "key", "--since", "1d", "--config", str(settings))
    assert told.status == 0, told.err
    assert f"sqlite:///{tmp_path / 'own.db'} (no gateway answers" in told.err
    header, row, total, *money = told.out.splitlines()
    assert header.split()[:4] == ["KEY", "NAME", "REQUESTS", "FAILED"]
    assert row.split()[:3] == ["team-a", "-", "3"]
    assert total.split()[:3] == ["total", "-", "3"]
    assert "the same requests, all on the GPU tier: 6.00" in money
    report = json.loads(output("usage", "--by", "key,day", "--json", "--config", str(settings)))
    assert (report["by"], report["rows"][0]["cost"]) == (["key", "day"], 1.5)
    empty = run("usage", "--until", "1h", "--config", str(settings))
    assert (empty.status, empty.out, "no request ended since" in empty.err) == (0, "", True)


@each_case(
    ("words", "message"),
    [
        ("usage --since 2999-01-01", "--since: 2999-01-01T00:00:00Z is in the future"),
        ("usage --by node", "--by: 'node' is none of key"),
        ("usage --since 1d --until 2d", "--until"),
        ("usage --csv --json", "--csv"),
        ("audit --until x", "--until"),
        ("requests --since soon", "--since: 'soon' is no time"),
        ("requests --failed --outcome ok", "one of the two"),
        ("requests --node=", "--node: must be 1 to 256 printable characters"),
    ],
)
def test_questions_that_make_no_sense_are_refused(tmp_path: Path, words: str, message: str) -> None:
    assert message in refusal(*words.split(), "--config", str(settings_of(tmp_path)))


def test_the_audit_log_is_read_and_chosen_by_time_action_and_target(tmp_path: Path) -> None:
    config = ("--config", str(filled(tmp_path)))
    head, newest, refused, oldest = run("audit", *config).out.splitlines()
    assert head.split() == ["TIME", "ACTOR", "ROLE", "ACTION", "TARGET", "OUTCOME", "DETAILS"]
    assert newest.split()[1:] == ["root", "admin", "keys.revoke", "carol", "done", "-"]
    assert refused.split()[1:6] == ["bob", "viewer", "drain", "epyc-b", "role_required"]
    assert oldest.split()[6:] == ["deadline", "60"]
    for arguments, targets in (
        (("--action", "keys"), ["carol"]),
        (("--action", "drain"), ["epyc-b", "epyc-a"]),
        (("--target", "epyc-a"), ["epyc-a"]),
        (("--limit", "1"), ["carol"]),
        (("--until", "2023-11-13"), []),
        (("--since", "2023-11-14", "--until", "2023-11-14T22:13:21"), ["epyc-a"]),
    ):
        ran = run("audit", *config, *arguments, "--json")
        assert [one["target"] for one in json.loads(ran.out)["entries"]] == targets
    ran = run("audit", *config, "--limit", "2")
    assert "there are more than 2: --limit, or --until 2023-11-14T" in ran.err
    ran = run("audit", *config, "--action", "stop")
    assert (ran.status, ran.out, "no such entry" in ran.err) == (0, "", True)


@pytest.mark.parametrize("url", ["sqlite:///gateway.db", "off"])
async def test_the_running_gateway_is_asked_page_by_page(url: str, tmp_path: Path) -> None:
    settings = {"store": {"url": url}}
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url], settings) as running:
        for number in range(990):
            running.gateway.audit.record("alice", "operator", "drain", f"node-{number}")
        ran = await run_beside(running, "audit", "--limit", "2000", "--action", "drain", "--json")
        assert "of the gateway at" in ran.err
        targets = [one["target"] for one in json.loads(ran.out)["entries"]]
        assert targets == [f"node-{number}" for number in reversed(range(990))]
        for number in range(990, 1500):
            running.gateway.audit.record("alice", "operator", "drain", f"node-{number}")
            if number % 500 == 0:
                await running.gateway.audit.flush()
        ran = await run_beside(running, "audit", "--limit", "2000", "--json")
        found = json.loads(ran.out)["entries"]
        ids = [one["id"] for one in found]
        assert ids == sorted(set(ids), reverse=True)
        # Without a store the last 1,000 are kept.
        assert len(found) == 1000 if url == "off" else len(found) > 1500
        table = (await run_beside(running, "audit", "--target", "node-1499")).out
        assert [line.split()[4] for line in table.splitlines()] == ["TARGET", "node-1499"]


def test_without_a_gateway_requests_are_read_from_the_store(tmp_path: Path) -> None:
    now = time.time()
    settings = filled(
        tmp_path,
        a_row(1, ended_at=now - 1, key="web", wait_seconds=None, stream=True),
        a_row(2, ended_at=now - 2, started_at=now - 42, wait_seconds=30.0, ttft_seconds=35.25),
        a_row(3, ended_at=now - 3, status=503, outcome="queue_timeout", node=None),
        *(a_row(n, ended_at=now - n, key="many") for n in range(10, 1300)),
    )
    spec = {"id": "web", "sha256": new_key("web").sha256, "name": "Web shop"}
    settings.write_text(settings.read_text() + yaml.safe_dump({"keys": [spec]}))
    config = ("--config", str(settings))
    told = run("requests", "--limit", "3", *config)
    assert told.status == 0, told.err
    assert "no gateway answers" in told.err
    assert "there are more than 3" in told.err
    _, first, second, third = (line.split() for line in told.out.splitlines())
    assert first[1:6] == ["1.0", "-", "-", "ok", "Web"], "what is unknown is no 0"
    assert second[1:6] == ["40.0", "30.0", "35.2", "ok", "team-a"]
    assert third[1:6] == ["1.0", "0.0", "-", "503", "queue_timeout"]

    def ids(*arguments: str) -> list[str]:
        told = json.loads(output("requests", *arguments, "--json", *config))
        return [row["id"] for row in told["requests"]]

    assert ids("--slow", "--limit", "1") == ["r2"]
    assert ids("--slower-than", "30") == ["r2"]
    assert ids("--failed") == ids("--outcome", "queue_timeout") == ["r3"]
    assert ids("--key", "Web shop") == ids("--key", "web") == ["r1"]
    assert ids("--node", "elsewhere") == []
    everything = ids("--limit", "5000", "--key", "many")
    assert everything == [f"r{n}" for n in range(10, 1300)], "more than one page has"
    told = run("requests", "--model", "nobody", *config)
    assert (told.status, told.out, "no such request ended since" in told.err) == (0, "", True)
