"""The key ring follows its store; and what holds while the store can't be reached."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog
from sqlalchemy import Connection, text

from gateway.app.startup import Options, check_startup, keys_file
from gateway.callers.keys import ApiKey, KeyRing, new_key
from gateway.callers.stored_keys import (
    LONGEST_PAUSE,
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
from gateway.config.keys import KeySpec
from gateway.store.database import StoreLocation, locate_store, never_had_keys
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import keys as keys_table
from gateway.store.store import LOOK_SECONDS, Store
from tests.callers.build import NOW
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.nodes.build import Clock
from tests.small_disk import run_on_small_disk
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now

pytestmark = pytest.mark.usefixtures("hurried")

ALICE, BOB = new_key("alice"), new_key("bob")

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})


def spec(key: ApiKey, **fields: Any) -> KeySpec:
    return KeySpec(id=key.id, sha256=key.sha256, name=key.id, **fields)


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'gateway.db'}"


def store_keys(url: str, *specs: KeySpec) -> None:
    with opened(url) as store:
        store.run_now(lambda connection: add_keys(connection, specs, time.time()))


async def revoke(url: str, name: str) -> None:
    """Revoke a key as another process does."""
    with opened(url) as store:
        await store.run(lambda connection: revoke_key(connection, name, time.time()))


class KeptConnection:
    """One connection of a client, used again and again; a refusal ends it, and it is made anew."""

    def __init__(self, url: str) -> None:
        self._client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    async def status(self, key: ApiKey | None) -> int:
        return await asyncio.to_thread(self._status, key)

    def _status(self, key: ApiKey | None) -> int:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key.text}"
        self._client.request("POST", "/v1/chat/completions", CHAT, headers)
        response = self._client.getresponse()
        response.read()
        if response.status == 200:
            assert self._client.sock is not None, "the connection was not kept"
        return response.status

    def close(self) -> None:
        self._client.close()


@contextlib.asynccontextmanager
async def gateway_of(folder: Path, url: str) -> AsyncIterator[tuple[Running, KeptConnection]]:
    settings = {"store": {"url": url}}
    async with EmulatedNode() as node, running_gateway(folder, [node.url], settings) as running:
        connection = KeptConnection(running.url)
        try:
            yield running, connection
        finally:
            connection.close()


async def becomes(connection: KeptConnection, key: ApiKey | None, status: int) -> None:
    """Wait until a request with the key gets this status."""
    async with asyncio.timeout(30):
        while await connection.status(key) != status:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def test_a_kept_connection_follows_the_changes_of_the_stored_keys(
    store_url: str, tmp_path: Path
) -> None:
    """The first one ends anonymous access, and the end of the last one locks."""
    assert POLL_SECONDS + LOOK_SECONDS < 1, "within a second"
    rotated = new_key("alice")
    async with gateway_of(tmp_path, store_url) as (running, connection):
        assert await connection.status(None) == 200
        with opened(store_url) as store:
            await store.run(lambda c: add_keys(c, [spec(ALICE)], time.time()))
            await becomes(connection, None, 401)
            assert await connection.status(ALICE) == 200
            await store.run(lambda c: rotate_key(c, "alice", rotated.sha256, 60.0, time.time()))
            await becomes(connection, rotated, 200)
            assert await connection.status(ALICE) == 200
            await store.run(lambda c: revoke_key(c, "alice", time.time()))
            await becomes(connection, rotated, 401)
        for key in (ALICE, None):
            assert await connection.status(key) == 401
        assert running.gateway.key_ring.lost is not None
        assert running.gateway.key_ring.access.had_keys  # what a successor is told


@in_virtual_time
async def test_keys_are_read_again_only_when_the_store_may_have_changed(
    tmp_path: Path, connection: Connection
) -> None:
    """And at each poll while it is away, with pauses that do not grow. Keys end meanwhile."""
    asked: list[float] = []
    never = asyncio.Event()

    class CountedStore(Store):
        is_away = hangs = False

        async def wait_opened(self, seconds: float) -> bool:
            return seconds > 0

        async def run(self, job: Any, **_: Any) -> Any:
            asked.append(now())
            if self.hangs:
                await never.wait()
            if self.is_away:
                raise StoreUnavailable("gone", "wait")
            return job(connection)

    async def reads(polls: float) -> int:
        before = len(asked)
        await asyncio.sleep(polls * POLL_SECONDS)
        return len(asked) - before

    store = CountedStore(locate_store(url_in(tmp_path), tmp_path))
    ring = KeyRing(is_complete=False, clock=lambda: NOW + now())
    sync = KeySync(store, ring, None, poll_seconds=POLL_SECONDS)
    await sync.start()
    work = asyncio.create_task(sync.run())
    assert await reads(MOST_UNCHANGED - 2) == 0
    assert await reads(MOST_UNCHANGED) == 1, "now and then, whatever the store says"
    ends = datetime.fromtimestamp(NOW + now() + 100.0, UTC)
    add_keys(connection, [spec(ALICE), spec(BOB, expires=ends)], NOW)
    store.changes += 1
    assert await reads(2) == 1
    assert ring.find(BOB.text) is not None
    store.is_away, store.changes = True, store.changes + 1
    assert await reads(100) > 90
    store.hangs = True
    assert await reads(110) == 1
    assert ring.find(ALICE.text) is not None
    assert ring.find(BOB.text) is None
    work.cancel()
    await asyncio.wait([work])
    pauses = [after - before for before, after in itertools.pairwise(asked[-90:-1])]
    assert max(pauses) == pytest.approx(min(pauses))


async def test_a_row_that_is_no_key_costs_the_others_nothing(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    store_keys(url, spec(ALICE), spec(BOB))
    with opened(url) as store:
        broken = keys_table.update().where(keys_table.c.id == BOB.id)
        values = {"previous_sha256": "no hash", "previous_until": time.time() + 60}
        store.run_now(lambda connection: connection.execute(broken.values(**values)))
        sync = KeySync(store, KeyRing(is_complete=False), None)
        await sync.start()
        assert sync.problem is None
        assert sync.key_ring.find(ALICE.text) is not None
        assert sync.key_ring.find(BOB.text) is None


async def test_keys_expire_while_the_rows_cant_be_understood(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    brief = new_key("brief")
    store_keys(url, spec(ALICE), spec(brief, expires=datetime.now(UTC) + timedelta(seconds=0.5)))
    with opened(url) as store:
        sync = KeySync(store, KeyRing(is_complete=False), None, poll_seconds=0.05)
        await sync.start()
        work = asyncio.create_task(sync.run())
        store.run_now(lambda c: c.execute(text("ALTER TABLE revisions RENAME TO other")))
        await until(lambda: sync.problem is not None)
        await until(lambda: sync.key_ring.find(brief.text) is None)
        assert sync.key_ring.find(ALICE.text) is not None
        store.run_now(lambda c: c.execute(text("ALTER TABLE other RENAME TO revisions")))
        await until(lambda: sync.problem is None)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work


# The store can't be reached.


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
    async with gateway_of(tmp_path, url) as (running, connection):
        assert await connection.status(ALICE) == 200
        file = keys_file(running.gateway.options)
        await until(file.exists)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert ALICE.text.split("_")[2] not in file.read_text()
    kept = path.read_bytes()
    damage(path)
    async with gateway_of(tmp_path, url) as (running, connection):
        assert running.gateway.key_sync.problem is not None
        assert await connection.status(ALICE) == 200
        assert await connection.status(BOB) == 401
        assert await connection.status(None) == 401
        await becomes(connection, expiring, 401)
        # The store comes back, with another key.
        path.unlink()
        path.write_bytes(kept)
        await until(lambda: running.gateway.key_sync.problem is None)
        store_keys(url, spec(BOB))
        await becomes(connection, BOB, 200)


async def test_without_store_and_memory_nobody_is_admitted_nor_called_a_stranger(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gateway.db"
    damage(path)
    async with gateway_of(tmp_path, f"sqlite:///{path}") as (running, connection):
        assert {await connection.status(key) for key in (ALICE, None)} == {503}
        path.unlink()
        store_keys(f"sqlite:///{path}", spec(ALICE))
        await until(lambda: running.gateway.key_sync.problem is None)
        assert await connection.status(ALICE) == 200
        assert await connection.status(None) == 401
        assert await connection.status(BOB) == 401


async def test_a_gateway_that_never_had_keys_serves_on_without_its_store(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, url_in(tmp_path)) as (running, _):
        await until(keys_file(running.gateway.options).exists)
    damage(tmp_path / "gateway.db")
    async with gateway_of(tmp_path, url_in(tmp_path)) as (_, connection):
        assert await connection.status(None) == 200


async def test_a_store_that_could_not_be_made_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        # What a full disk leaves of a store that was being made: a file without a table.
        other.execute("CREATE TABLE one (a)")
        other.execute("DROP TABLE one")
        other.execute("BEGIN EXCLUSIVE")
        async with gateway_of(tmp_path, f"sqlite:///{path}") as (running, connection):
            assert running.gateway.key_sync.problem is not None
            assert await connection.status(None) == 200
            log = tmp_path / "gateway.log"
            await until(lambda: "no key was ever stored" in log.read_text())
            other.close()
            # It can be made after all, and gets a key.
            await until(lambda: running.gateway.key_sync.problem is None)
            store_keys(f"sqlite:///{path}", spec(ALICE))
            await becomes(connection, None, 401)
            assert await connection.status(ALICE) == 200


ON_A_DISK_WITHOUT_ROOM = """
import asyncio, subprocess, sys
from pathlib import Path
from tests.callers.test_key_sync import KeptConnection
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.store.stores import names, opened

async def main(state, folder, kind):
    if kind == "full":
        (state / "ballast").write_bytes(bytes(65536))
    elif kind == "read-only later":
        with opened(f"sqlite:///{state}/gateway.db") as store:
            store.run_now(names)
        subprocess.run(["mount", "-o", "remount,ro", state], check=True)
    async with EmulatedNode() as node, running_gateway(
        folder, [node.url], state_dir=state
    ) as running:
        assert running.gateway.key_sync.problem is not None
        connection = KeptConnection(running.url)
        print(await connection.status(None), end="")
        connection.close()

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [("full", "64k"), ("nearly full", "64k"), ("read-only", "1m,ro"), ("read-only later", "1m")],
)
async def test_a_state_folder_without_room_keeps_nobody_out(
    kind: str, size: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    arguments = (ON_A_DISK_WITHOUT_ROOM, size, state, tmp_path, Path(kind))
    assert await asyncio.to_thread(run_on_small_disk, *arguments) == "200"


def test_a_store_with_a_key_even_a_revoked_one_had_keys(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path)
    assert never_had_keys(location)
    with opened(str(location.shown)) as store:
        store.run_now(lambda _: None)
    assert never_had_keys(location)
    with opened(str(location.shown)) as store:
        store.run_now(lambda connection: add_keys(connection, [spec(ALICE)], time.time()))
        store.run_now(lambda connection: revoke_key(connection, ALICE.id, time.time()))
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


# Before a gateway starts.


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


def test_a_public_address_needs_a_key_or_a_store_that_may_have_some(
    public: Options, tmp_path: Path
) -> None:
    assert problems(public) == ["listen.host"]
    assert not (tmp_path / "gateway.db").exists()  # a check makes no store
    url = url_in(tmp_path)
    store_keys(url, spec(ALICE))
    assert problems(public) == []
    asyncio.run(revoke(url, "alice"))
    assert problems(public) == ["listen.host"]
    damage(tmp_path / "gateway.db")
    assert problems(public) == []


async def test_the_count_before_a_start_is_the_last_known_one_without_the_store(
    public: Options, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.db"
    location = locate_store(f"sqlite:///{path}", tmp_path)
    store_keys(f"sqlite:///{path}", spec(ALICE), spec(BOB))
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
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 9}', "x" * 100])
async def test_a_damaged_memory_is_set_aside(content: str, public: Options, tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    damage(path)
    file = keys_file(public)
    file.parent.mkdir()
    file.write_text(content)
    location = locate_store(f"sqlite:///{path}", tmp_path)
    assert await asyncio.to_thread(count_stored_keys, location, file) is None


# The file of the last known keys, while it can't be written.


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
    """The ids that a start without the store would know."""
    found = LastKnownKeys(location, path).load()
    return None if found is None else {one.id for one in found.held}


def test_a_write_that_fails_is_repeated_with_growing_pauses(
    location: StoreLocation, tmp_path: Path
) -> None:
    clock, path = Clock(0.0), tmp_path / "keys.json"
    saved = LastKnownKeys(location, path, clock=clock)
    saved.save([key(ALICE)], {})
    assert (saved.error, saved.is_due()) == (None, False)
    pauses = []
    with unwritable(path), structlog.testing.capture_logs() as logs:
        saved.save([key(ALICE), key(BOB)], {})
        for _ in range(10):
            before = clock.now
            assert not saved.is_due()
            while not saved.is_due():
                clock.now += 0.5
            pauses.append(clock.now - before)
            saved.save_again()
        assert saved.error is not None
        assert "could not be saved" in saved.error
        assert len(logs) == 1
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE
    # No key was taken away, so the old file still holds.
    assert known(location, path) == {"alice"}
    clock.now += LONGEST_PAUSE
    saved.save_again()
    assert not saved.error
    assert not saved.is_due()
    assert known(location, path) == {"alice", "bob"}


@pytest.mark.parametrize("change", ["revoked", "rotated", "limited"])
def test_a_start_without_the_store_lets_no_key_in_that_is_known_to_have_changed(
    change: str, location: StoreLocation, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    saved = LastKnownKeys(location, path)
    saved.save([key(ALICE), key(BOB)], {})
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


def test_a_file_that_can_not_be_set_aside_is_told_by_its_name(
    location: StoreLocation, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    saved = LastKnownKeys(location, path)
    saved.save([key(ALICE)], {})
    (tmp_path / "keys.json.bad" / "full").mkdir(parents=True)
    with unwritable(path):
        saved.save([], {})
    assert saved.error is not None
    assert f"{path} still has keys that were revoked or changed: remove it" in saved.error


async def test_a_gateway_tells_that_it_can_not_write_the_file_and_does_as_soon_as_it_can(
    tmp_path: Path,
) -> None:
    url = url_in(tmp_path)
    store_keys(url, key(ALICE).spec, key(BOB).spec)
    async with gateway_of(tmp_path, url) as (running, connection):
        file, sync = keys_file(running.gateway.options), running.gateway.key_sync
        await until(file.exists)
        with unwritable(file):
            await revoke(url, "bob")
            await becomes(connection, BOB, 401)
            await until(lambda: sync.unsaved is not None)
            assert not file.exists()
            status = (await running.admin.get("/admin/status")).json()
            assert "refuses all stored keys" in status["keys_unsaved"]
        await until(lambda: sync.unsaved is None)
        assert ALICE.sha256 in file.read_text()
        assert BOB.sha256 not in file.read_text()
