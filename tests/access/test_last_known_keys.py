"""The file of the last known keys, while it can't be written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from gateway.access.key_sync import LONGEST_PAUSE, LastKnownKeys
from gateway.access.keys import ApiKey, new_key
from gateway.access.stored_keys import StoredKey, revoke_key
from gateway.config.listeners import KeySpec
from gateway.startup import keys_file
from gateway.store.database import StoreLocation, locate_store
from tests.access.test_key_sync import another_process, becomes, damage, gateway_of, store_keys
from tests.gateways import until

pytestmark = pytest.mark.usefixtures("hurried")

ALICE, BOB = new_key("alice"), new_key("bob")


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def known(location: StoreLocation, path: Path) -> set[str] | None:
    """The ids that a start without the store would know."""
    found = LastKnownKeys(location, path).load()
    return None if found is None else {one.id for one in found.keys}


def test_a_write_that_fails_is_repeated_with_growing_pauses(
    location: StoreLocation, tmp_path: Path
) -> None:
    clock, path = Clock(), tmp_path / "keys.json"
    saved = LastKnownKeys(location, path, clock=clock)
    saved.save([key(ALICE)])
    assert (saved.error, saved.is_due()) == (None, False)
    pauses = []
    with unwritable(path), structlog.testing.capture_logs() as logs:
        saved.save([key(ALICE), key(BOB)])
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
    saved.save([key(ALICE), key(BOB)])
    now = {
        "revoked": [key(ALICE)],
        "rotated": [key(ALICE), key(ApiKey("", BOB.id, ALICE.sha256))],
        "limited": [key(ALICE), key(BOB, models=["small"])],
    }[change]
    with unwritable(path):
        saved.save(now)
        assert saved.error is not None
        assert "refuses all stored keys" in saved.error
        assert known(location, path) is None
    saved.save_again()
    assert known(location, path) == {one.spec.id for one in now}
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"]


def test_a_file_that_can_not_be_set_aside_is_told_by_its_name(
    location: StoreLocation, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    saved = LastKnownKeys(location, path)
    saved.save([key(ALICE)])
    (tmp_path / "keys.json.bad" / "full").mkdir(parents=True)
    with unwritable(path):
        saved.save([])
    assert saved.error is not None
    assert f"{path} still has keys that were revoked or changed: remove it" in saved.error


async def test_a_gateway_writes_the_file_as_soon_as_it_can(tmp_path: Path) -> None:
    store = tmp_path / "gateway.db"
    url = f"sqlite:///{store}"
    store_keys(url, key(ALICE).spec, key(BOB).spec)
    async with gateway_of(tmp_path, url) as (running, connection):
        file = keys_file(running.gateway.options)
        sync = running.gateway.key_sync
        await until(file.exists)
        with unwritable(file):
            with another_process(url) as other:
                await other.run(lambda c: revoke_key(c, "bob", time.time()))
            await becomes(connection, BOB, 401)
            await until(lambda: sync.unsaved is not None)
        await until(lambda: sync.unsaved is None)
        assert BOB.sha256 not in file.read_text()
    with unwritable(file):
        async with gateway_of(tmp_path, url) as (running, connection):
            assert await connection.status(ALICE) == 200
            with another_process(url) as other:
                await other.run(lambda c: revoke_key(c, "alice", time.time()))
            await becomes(connection, ALICE, 401)
            await until(lambda: not file.exists())
            async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin:
                status = (await admin.get("/admin/status")).json()
            assert "refuses all stored keys" in status["keys_unsaved"]
        damage(store)
        async with gateway_of(tmp_path, url) as (_, connection):
            assert await connection.status(ALICE) == 503
