"""`llama-gateway usage`: through the gateway that runs, else from the store itself."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from pathlib import Path

import pytest
import yaml

from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.gateways import Running
from tests.tools.cli.running import Ran, run
from tests.usage.ledger_rows import a_row, add_rows
from tests.usage.metered_gateway import ALICE, VIP, chat, metered_gateway, recorded

NOBODY = "http://127.0.0.1:9"


def filled(folder: Path, count: int = 3) -> Path:
    """Settings that name a store with some requests of just now, of team-a, and no gateway."""
    settings = folder / "gateway.yaml"
    settings.write_text(
        yaml.safe_dump({"store": {"url": "sqlite:///own.db"}, "admin": {"port": 9}})
    )
    store = Store(locate_store(f"sqlite:///{folder / 'own.db'}", folder))
    store.start()
    rows = [a_row(n, ended_at=time.time() - 1, gpu_cost=2.0) for n in range(count)]
    store.run_now(lambda connection: add_rows(connection, rows))
    assert store.close(10.0)
    return settings


async def through(running: Running, *arguments: str, config: Path | None = None) -> Ran:
    """The command beside the gateway that serves here."""
    given = ("--admin-url", running.admin_url, "--config", str(config or running.settings_file))
    return await asyncio.to_thread(run, "usage", *arguments, *given)


async def test_the_running_gateway_is_asked(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE)
        await chat(running, VIP)
        await recorded(running, 2)
        told = await through(running, "--by", "key", "--json")
        assert told.status == 0
        assert f"of the gateway at {running.admin_url}" in told.err
        assert "gateway.db" in told.err
        rows = {row["key"]: row["requests"] for row in json.loads(told.out)["rows"]}
        assert rows == {"alice": 1, "vip": 1}
        table = await through(running, "--by", "key", "--csv")
        assert [row["key"] for row in csv.DictReader(io.StringIO(table.out))] == ["vip", "alice"]
        shown = await through(running, "--by", "tier,key")
        assert "TIER" in shown.out
        assert "total" in shown.out
        assert "requests were charged" in shown.out


async def test_another_store_than_the_gateways_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = filled(tmp_path / "other")
    async with metered_gateway(tmp_path) as running:
        told = await through(running, config=other)
        assert told.status == 2
        assert "own.db" in told.err
        assert "--config" in told.err
        assert told.out == ""


async def test_a_gateway_without_a_store_is_told(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        told = await through(running)
        assert told.status == 1
        assert "has no store" in told.err


def test_without_a_gateway_the_store_is_read(tmp_path: Path) -> None:
    settings = filled(tmp_path)
    told = run("usage", "--by", "key", "--since", "1d", "--config", str(settings))
    assert told.status == 0, told.err
    assert f"sqlite:///{tmp_path / 'own.db'} (no gateway answers" in told.err
    header, row, total, *money = told.out.splitlines()
    assert header.split()[:3] == ["KEY", "REQUESTS", "FAILED"]
    assert row.split()[:2] == ["team-a", "3"]
    assert total.split()[:2] == ["total", "3"]
    assert "the same requests, all on the GPU tier: 6.00" in money
    assert any("unknown (no hour of a node" in line for line in money)


def test_scripts_and_spreadsheets_get_nothing_but_the_report(tmp_path: Path) -> None:
    settings = filled(tmp_path)
    told = run("usage", "--by", "key,day", "--json", "--config", str(settings))
    report = json.loads(told.out)
    assert report["by"] == ["key", "day"]
    assert report["rows"][0]["cost"] == 1.5
    table = run("usage", "--csv", "--config", str(settings))
    assert [row["model"] for row in csv.DictReader(io.StringIO(table.out))] == ["mistral"]
    assert run("usage", "--csv", "--json", "--config", str(settings)).status == 2


@pytest.mark.parametrize("form", ["--json", "--csv", None])
def test_an_empty_report_is_told(tmp_path: Path, form: str | None) -> None:
    settings = filled(tmp_path, count=0)
    given = [] if form is None else [form]
    told = run("usage", *given, "--config", str(settings))
    assert told.status == 0
    assert "no request ended since" in told.err
    assert told.out == "" or form is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "2999-01-01"], "--since: 2999-01-01T00:00:00Z is in the future"),
        (["--since", "soon"], "--since: 'soon' is no time"),
        (["--by", "node"], "--by: 'node' is none of key"),
        (["--since", "1d", "--until", "2d"], "--until"),
        (["--limit", "0"], "--limit: must be a number from 1"),
    ],
)
def test_questions_that_make_no_sense_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    told = run("usage", *arguments, "--config", str(filled(tmp_path)))
    assert told.status == 2
    assert message in told.err
    assert told.out == ""


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    settings = filled(tmp_path)
    (tmp_path / "own.db").unlink()
    told = run("usage", "--config", str(settings))
    assert told.status == 1
    assert "no gateway has used it yet" in told.err
    assert not (tmp_path / "own.db").exists()


def test_a_gateway_that_is_named_must_run(tmp_path: Path) -> None:
    told = run("usage", "--admin-url", NOBODY, "--config", str(filled(tmp_path)))
    assert told.status == 1
    assert "no gateway answers" in told.err


def test_settings_without_a_store_are_told(tmp_path: Path) -> None:
    settings = tmp_path / "gateway.yaml"
    settings.write_text("store: {url: off}\nadmin: {port: 9}\n")
    told = run("usage", "--config", str(settings))
    assert told.status == 2
    assert "store.url: off" in told.err
