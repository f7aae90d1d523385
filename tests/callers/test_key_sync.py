"""The key ring follows its store; and what holds while the store can't be reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from gateway.app.startup import Options, check_startup, keys_file
from gateway.callers.keys import ApiKey, KeyRing, new_key
from gateway.callers.stored_keys import (
    MOST_UNCHANGED,
    POLL_SECONDS,
    KeySync,
    LastKnownKeys,
    StoredKey,
    add_keys,
    count_stored_keys,
    revoke_key,
    rotate_key,
)
from gateway.config.keys import GroupSpec, KeySpec
from gateway.store.database import StoreLocation, locate_store, never_had_keys
from gateway.store.store import LOOK_SECONDS
from tests.callers.build import NOW, FlakyStore
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now

pytestmark = pytest.mark.usefixtures("hurried")

ALICE, BOB = new_key("alice"), new_key("bob")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def spec(key: ApiKey, **fields: Any) -> KeySpec:
    return KeySpec(id=key.id, sha256=key.sha256, name=key.id, **fields)


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'gateway.db'}"


def store_keys(url: str, *specs: KeySpec) -> None:
    with opened(url) as store:
        store.run_now(lambda connection: add_keys(connection, specs, time.time()))


async def revoke(url: str, name: str) -> None:
    with opened(url) as store:
        await store.run(lambda connection: revoke_key(connection, name, time.time()))


@contextlib.asynccontextmanager
async def gateway_of(folder: Path, url: str) -> AsyncIterator[Running]:
    settings = {"store": {"url": url}}
    async with EmulatedNode() as node, running_gateway(folder, [node.url], settings) as running:
        yield running


async def status(running: Running, key: ApiKey | None) -> int:
    """The status of a chat; the client keeps its connection."""
    headers = {} if key is None else {"authorization": f"Bearer {key.text}"}
    answer = await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)
    return answer.status_code


async def becomes(running: Running, key: ApiKey | None, wanted: int) -> None:
    async with asyncio.timeout(30):
        while await status(running, key) != wanted:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def test_a_kept_connection_follows_the_stored_keys(store_url: str, tmp_path: Path) -> None:
    """The first one ends anonymous access, and the end of the last one locks."""
    assert POLL_SECONDS + LOOK_SECONDS < 1, "within a second"
    rotated = new_key("alice")
    async with gateway_of(tmp_path, store_url) as running:
        assert await status(running, None) == 200
        with opened(store_url) as store:
            await store.run(lambda c: add_keys(c, [spec(ALICE)], time.time()))
            await becomes(running, None, 401)
            assert await status(running, ALICE) == 200
            await store.run(lambda c: rotate_key(c, "alice", rotated.sha256, 60.0, time.time()))
            await becomes(running, rotated, 200)
            assert await status(running, ALICE) == 200
            await store.run(lambda c: revoke_key(c, "alice", time.time()))
            await becomes(running, rotated, 401)
        for key in (ALICE, None):
            assert await status(running, key) == 401
        assert running.gateway.key_ring.lost is not None
        assert running.gateway.key_ring.access.had_keys  # what a successor is told


@in_virtual_time
async def test_keys_are_read_again_only_after_changes(
    connection: Connection, tmp_path: Path
) -> None:
    """And at each poll while it is away, with pauses that do not grow. Keys end meanwhile."""
    store: Any = FlakyStore(connection, location=locate_store(url_in(tmp_path), tmp_path))
    ring = KeyRing(is_complete=False, clock=lambda: NOW + now())

    async def reads(polls: float) -> int:
        before = len(store.asked)
        await asyncio.sleep(polls * POLL_SECONDS)
        return len(store.asked) - before

    sync = KeySync(store, ring, None, poll_seconds=POLL_SECONDS)
    await sync.start()
    work = asyncio.create_task(sync.run())
    assert await reads(MOST_UNCHANGED - 2) == 0
    assert await reads(MOST_UNCHANGED) == 1, "now and then, whatever the store says"
    ends = datetime.fromtimestamp(NOW + now() + 100.0, UTC)
    add_keys(connection, [spec(ALICE), spec(BOB, expires=ends)], NOW)
    store.more_changes += 1
    assert await reads(2) == 1
    assert ring.find(BOB.text) is not None
    store.is_away, store.more_changes = True, 2
    assert await reads(100) > 90
    store.is_away, store.seconds = False, 1000.0
    assert await reads(110) == 1
    assert ring.find(ALICE.text) is not None
    assert ring.find(BOB.text) is None
    work.cancel()
    await asyncio.wait([work])


def damage(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_bytes(b"this is no database\n" * 500)


async def test_a_start_without_the_store_knows_the_callers_of_before(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    url = f"sqlite:///{path}"
    ends = datetime.now(UTC) + timedelta(seconds=1)
    expiring = new_key("expiring")
    store_keys(url, spec(ALICE), spec(expiring, expires=ends))
    async with gateway_of(tmp_path, url) as running:
        assert await status(running, ALICE) == 200
        file = keys_file(running.gateway.options)
        await until(file.exists)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert ALICE.text.split("_")[2] not in file.read_text()
    kept = path.read_bytes()
    damage(path)
    async with gateway_of(tmp_path, url) as running:
        assert running.gateway.key_sync.problem is not None
        assert await status(running, ALICE) == 200
        assert await status(running, BOB) == 401
        assert await status(running, None) == 401
        await becomes(running, expiring, 401)
        # The store comes back, with another key.
        path.unlink()
        path.write_bytes(kept)
        await until(lambda: running.gateway.key_sync.problem is None)
        store_keys(url, spec(BOB))
        await becomes(running, BOB, 200)


async def test_without_store_and_memory_nobody_is_admitted_nor_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    damage(path)
    async with gateway_of(tmp_path, f"sqlite:///{path}") as running:
        assert {await status(running, key) for key in (ALICE, None)} == {503}
        path.unlink()
        store_keys(f"sqlite:///{path}", spec(ALICE))
        await until(lambda: running.gateway.key_sync.problem is None)
        assert await status(running, ALICE) == 200
        assert await status(running, None) == 401
        assert await status(running, BOB) == 401


async def test_a_store_with_a_key_even_a_revoked_one_had_keys(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path)
    assert never_had_keys(location)
    store_keys(str(location.shown))
    assert never_had_keys(location)
    store_keys(str(location.shown), spec(ALICE))
    await revoke(str(location.shown), ALICE.id)
    assert not never_had_keys(location)


@pytest.mark.parametrize("sign", ["table", "log", "link", "folder", "memory"])
async def test_a_sign_of_keys_keeps_strangers_out(sign: str, public: Options) -> None:
    path = public.inventory_file.with_name("gateway.db")
    location = locate_store(f"sqlite:///{path}", path.parent)
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == 0
    if sign == "table":
        with contextlib.closing(sqlite3.connect(path)) as made:
            made.execute("CREATE TABLE one (a)")
    elif sign == "log":
        path.touch()
        path.with_name("gateway.db-wal").write_bytes(b"pages")
    elif sign == "link":
        path.symlink_to("not-mounted")
    elif sign == "folder":
        path.mkdir()
    else:
        keys_file(public).parent.mkdir()
        keys_file(public).write_text("half a fi")
    assert never_had_keys(location) is (sign == "memory")
    # Nobody knows whether there are keys, but for a database of somebody else's, which is opened.
    known = 0 if sign in {"table", "log"} else None
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == known


@pytest.fixture
def public(tmp_path: Path) -> Options:
    """Return the options of a gateway on a public address, without keys in its settings."""
    (tmp_path / "nodes.yaml").write_text("nodes: [{name: a, url: 'http://127.0.0.1:9'}]\n")
    (tmp_path / "gateway.yaml").write_text("store: {url: sqlite:///gateway.db}\n")
    return Options(
        inventory_file=tmp_path / "nodes.yaml",
        settings_file=tmp_path / "gateway.yaml",
        host="0.0.0.0",
        state_dir=tmp_path / "state",
    )


def problems(options: Options) -> list[str]:
    return [problem.key for problem in check_startup(options).start_problems]


async def test_without_the_store_the_last_known_count_holds(
    public: Options, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.db"
    location = locate_store(f"sqlite:///{path}", tmp_path)
    # A public address needs a key, or a store that may have some; a check makes no store.
    assert problems(public) == ["listen.host"]
    assert not path.exists()
    store_keys(f"sqlite:///{path}", spec(ALICE), spec(BOB))
    assert problems(public) == []
    assert count_stored_keys(location, keys_file(public)) == 2
    with opened(f"sqlite:///{path}") as store:
        sync = KeySync(store, KeyRing(is_complete=False), keys_file(public))
        await sync.start()
        assert len(sync.key_ring) == 2
    damage(path)
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == 2
    path.unlink()
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == 2
    keys_file(public).unlink()
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == 0
    damage(path)
    for content in (None, "", "{}", "[1]", '{"version": 9}', "x" * 100):
        if content is not None:
            keys_file(public).write_text(content)
        assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) is None


def key(made: ApiKey, **fields: Any) -> StoredKey:
    return StoredKey(KeySpec(id=made.id, sha256=made.sha256, name=made.id, **fields), 1.0)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """A folder in the place of the file that a write begins with: root can't write, either."""
    blocked = path.with_name(f"{path.name}.{os.getpid()}.new")
    blocked.mkdir()
    try:
        yield
    finally:
        blocked.rmdir()


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    # It is never opened: its keys are not here.
    return locate_store("postgresql://gateway@127.0.0.1:1/gateway", tmp_path)


def known(location: StoreLocation, path: Path) -> set[str] | None:
    found = LastKnownKeys(location, path).load()
    return None if found is None else {one.id for one in found.held}


@pytest.mark.parametrize("change", ["revoked", "rotated", "limited"])
def test_a_start_without_the_store_lets_no_key_in_that_is_known_to_have_changed(
    change: str, location: StoreLocation, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    saved = LastKnownKeys(location, path)
    saved.save([key(ALICE), key(BOB)], {"night": GroupSpec()})
    last = LastKnownKeys(location, path).load()
    assert last is not None
    assert last.groups.keys() == {"night"}
    now = {
        "revoked": [key(ALICE)],
        "rotated": [key(ALICE), key(ApiKey("", BOB.id, ALICE.sha256))],
        "limited": [key(ALICE), key(BOB, models=["small"])],
    }[change]
    with unwritable(path):
        saved.save(now, {})
        assert saved.error is not None
        assert "refuses all stored keys" in saved.error
        assert known(location, path) is None
    saved.save_again()
    assert known(location, path) == {one.spec.id for one in now}
    other = locate_store("postgresql://gateway@127.0.0.1:1/other", tmp_path)
    assert known(other, path) is None
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"]


async def test_that_the_file_can_not_be_written_is_told_until_it_can(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    store_keys(url, key(ALICE).spec, key(BOB).spec)
    async with gateway_of(tmp_path, url) as running:
        file, sync = keys_file(running.gateway.options), running.gateway.key_sync
        await until(file.exists)
        with unwritable(file):
            await revoke(url, "bob")
            await becomes(running, BOB, 401)
            await until(lambda: sync.unsaved is not None)
            assert not file.exists()
            status = (await running.admin.get("/admin/status")).json()
            assert "refuses all stored keys" in status["keys_unsaved"]
        await until(lambda: sync.unsaved is None)
        assert ALICE.sha256 in file.read_text()
        assert BOB.sha256 not in file.read_text()
