"""`llama-gateway audit`: while a gateway runs, and without one."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.observe.audit import AuditTrail
from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.tools.cli.running import Ran, run

NOW = 1_700_000_000.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def filled(folder: Path, count: int = 0) -> Path:
    """Settings of a gateway that does not run, and whose store has an audit log."""
    config = folder / "gateway.yaml"
    config.write_text(
        yaml.safe_dump({"store": {"url": "sqlite:///audit.db"}, "admin": {"port": free_port()}})
    )
    store = Store(locate_store(f"sqlite:///{folder}/audit.db", folder))
    store.start()
    try:
        times = iter(range(count + 10))
        trail = AuditTrail(lambda: NOW + next(times), store)
        trail.record("alice", "operator", "drain", "epyc-a", details={"deadline": "60"})
        trail.record("bob", "viewer", "drain", "epyc-b", "role_required", refused=True)
        trail.record("root", "admin", "keys.revoke", "carol")
        await trail.flush()
    finally:
        store.close(60.0)
    return config


def shown(*arguments: str) -> list[dict[str, Any]]:
    ran = run("audit", *arguments, "--json")
    assert ran.status == 0, ran.err
    entries: list[dict[str, Any]] = json.loads(ran.out)["entries"]
    return entries


async def test_without_a_gateway_the_store_is_read_the_latest_first(tmp_path: Path) -> None:
    config = await filled(tmp_path)
    ran = await asyncio.to_thread(run, "audit", "--config", str(config))
    assert "audit.db (no gateway answers" in ran.err
    head, newest, refused, oldest = ran.out.splitlines()
    assert head.split() == ["TIME", "ACTOR", "ROLE", "ACTION", "TARGET", "OUTCOME", "DETAILS"]
    assert newest.split()[1:] == ["root", "admin", "keys.revoke", "carol", "done", "-"]
    assert refused.split()[1:6] == ["bob", "viewer", "drain", "epyc-b", "role_required"]
    assert oldest.split()[6:] == ["deadline", "60"]


async def test_entries_are_chosen_by_time_action_and_target(tmp_path: Path) -> None:
    config = ("--config", str(await filled(tmp_path)))

    async def targets(*arguments: str) -> list[str]:
        return [one["target"] for one in await asyncio.to_thread(shown, *config, *arguments)]

    assert await targets("--action", "keys") == ["carol"]
    assert await targets("--action", "drain") == ["epyc-b", "epyc-a"]
    assert await targets("--target", "epyc-a") == ["epyc-a"]
    assert await targets("--limit", "1") == ["carol"]
    assert await targets("--until", "2023-11-13") == []
    assert await targets("--since", "2023-11-14", "--until", "2023-11-14T22:13:21") == ["epyc-a"]
    ran = await asyncio.to_thread(run, "audit", *config, "--limit", "2")
    assert "there are more than 2: --limit, or --until 2023-11-14T" in ran.err
    ran = await asyncio.to_thread(run, "audit", *config, "--action", "stop")
    assert (ran.status, ran.out) == (0, "")
    assert "no such entry" in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--since", "soon"), "--since: 'soon' is no time"),
        (("--since", "2999-01-01"), "is in the future"),
        (("--until", "x"), "--until"),
        (("--limit", "0"), "--limit"),
    ],
)
async def test_questions_that_make_no_sense_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    config = await filled(tmp_path)
    ran = await asyncio.to_thread(run, "audit", "--config", str(config), *flags)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


async def through(running: Running, *arguments: str) -> Ran:
    settings = ("--config", str(running.settings_file), "--admin-url", running.admin_url)
    return await asyncio.to_thread(run, "audit", *arguments, *settings)


@pytest.mark.parametrize("url", ["sqlite:///gateway.db", "off"])
async def test_the_running_gateway_is_asked_page_by_page(url: str, tmp_path: Path) -> None:
    settings = {"store": {"url": url}}
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], settings) as running,
    ):
        for number in range(990):
            running.gateway.audit.record("alice", "operator", "drain", f"node-{number}")
        ran = await through(running, "--limit", "2000", "--action", "drain", "--json")
        assert "of the gateway at" in ran.err
        targets = [one["target"] for one in json.loads(ran.out)["entries"]]
        assert targets == [f"node-{number}" for number in reversed(range(990))]
        for number in range(990, 1500):
            running.gateway.audit.record("alice", "operator", "drain", f"node-{number}")
            if number % 500 == 0:
                await running.gateway.audit.flush()
        ran = await through(running, "--limit", "2000", "--json")
        found = json.loads(ran.out)["entries"]
        ids = [one["id"] for one in found]
        assert ids == sorted(set(ids), reverse=True)
        # Without a store the last 1,000 are kept.
        assert len(found) == 1000 if url == "off" else len(found) > 1500
        table = (await through(running, "--target", "node-1499")).out
        assert [line.split()[4] for line in table.splitlines()] == ["TARGET", "node-1499"]
