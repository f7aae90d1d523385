"""Keys in a real store, SQLite's file and PostgreSQL; the key ring follows it, and outlasts it."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, update

from gateway.app.startup import Options, check_startup, keys_file
from gateway.callers import stored_keys
from gateway.callers.key_desk import KeyDesk, checked_specs, expiry
from gateway.callers.keys import ApiKey, KeyRing, new_key
from gateway.callers.standings import Standings
from gateway.callers.stored_keys import (
    MOST_UNCHANGED,
    POLL_SECONDS,
    KeysRefused,
    KeySync,
    LastKnownKeys,
    StoredKey,
    add_keys,
    change_key,
    count_stored_keys,
    find_key,
    put_group,
    read_groups,
    read_keys,
    revision_of,
    revoke_key,
    rotate_key,
    with_groups,
)
from gateway.config.keys import CacheSpec, GroupSpec, KeySpec, LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.database import StoreLocation, locate_store, never_had_keys
from gateway.store.schema import keys as keys_table
from gateway.store.store import LOOK_SECONDS, Store
from tests.beside import beside
from tests.callers.build import NOW, FlakyStore
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now

pytestmark = pytest.mark.usefixtures("hurried")

T = TypeVar("T")

ALICE, BOB, OTHER = new_key("alice-1"), new_key("bob-1"), new_key("other")


def do(store: Store, job: Callable[..., T], *values: Any) -> T:
    return store.run_now(lambda connection: job(connection, *values))


def add(store: Store, *specs: KeySpec) -> None:
    do(store, add_keys, specs, NOW)


def spec(name: str = "alice", **fields: Any) -> KeySpec:
    return KeySpec(**{"id": ALICE.id, "sha256": ALICE.sha256, "name": name, **fields})


BOBS = KeySpec(id=BOB.id, sha256=BOB.sha256, name="bob")

FULL = spec(
    class_="premium",
    max_class="urgent",
    models=("mistral-7b", "phi-4-mini"),
    group="team",
    trust_user_headers=True,
    limits=LimitSpec(rpm=60, budget="20/month"),
    user_limits=LimitSpec(rpm=6),
    cache=CacheSpec(),
    expires=datetime.fromtimestamp(NOW + 90 * 86400, UTC),
)


def test_a_key_comes_back_as_it_was_stored(store: Store) -> None:
    add(store, FULL)
    [found] = do(store, read_keys)
    assert found == StoredKey(FULL, NOW)
    ring = KeyRing(clock=lambda: NOW)
    ring.replace_stored([found.held()])
    caller = known(ring.find(ALICE.text))
    assert (caller.name, caller.group, caller.limits) == ("alice", "team", FULL.limits)


CHANGES: dict[str, tuple[Any, ...]] = {
    "create": (add_keys, [BOBS], NOW),
    "change": (change_key, "alice", spec("alice", group="x"), NOW),
    "rotate": (rotate_key, "alice", OTHER.sha256, 60.0, NOW),
    "revoke": (revoke_key, "alice", NOW),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_made_twice_raises_the_revision_once(store: Store, change: str) -> None:
    add(store, FULL)
    before = do(store, revision_of)
    do(store, *CHANGES[change])
    after = do(store, revision_of)
    assert after > before > 0
    keys = do(store, read_keys, ())
    do(store, *CHANGES[change])
    assert do(store, revision_of) == after
    assert do(store, read_keys, ()) == keys


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(spec("alice", id="other"), id="the name of another"),
        pytest.param(spec("carol", sha256=BOB.sha256), id="the id of another"),
        pytest.param(spec("alice-1", id="other"), id="a name that is an id"),
        pytest.param(spec("carol", id="alice"), id="an id that is a name"),
    ],
)
def test_names_and_ids_of_stored_keys_are_unique_together_and_a_refusal_changes_nothing(
    store: Store, second: KeySpec
) -> None:
    add(store, spec())
    before = do(store, revision_of)
    with pytest.raises(KeysRefused) as caught:
        add(store, BOBS, second)
    assert caught.value.status == 409
    assert [problem.index for problem in caught.value.problems] == [1]
    assert do(store, revision_of) == before
    assert len(do(store, read_keys)) == 1
    add(store, BOBS)
    with pytest.raises(KeysRefused):
        do(store, change_key, "bob", spec("alice"), NOW)


def test_a_revoked_keys_name_can_be_used_again_but_not_its_id(store: Store) -> None:
    add(store, spec())
    assert do(store, revoke_key, "alice", NOW + 5).revoked_at == NOW + 5
    assert do(store, read_keys) == []
    with pytest.raises(KeysRefused, match="a revoked key has the id"):
        add(store, spec())
    again = spec(id="alice-2")
    add(store, again)
    assert do(store, find_key, "alice").spec == again
    every = do(store, read_keys, ())
    assert {key.spec.id: key.revoked_at for key in every} == {"alice-1": NOW + 5, "alice-2": None}


def test_a_rotation_keeps_the_old_secret_for_the_grace(store: Store) -> None:
    add(store, FULL)
    rotated = do(store, rotate_key, "alice", OTHER.sha256, 3600.0, NOW)
    assert (rotated.spec.sha256, rotated.previous_sha256) == (OTHER.sha256, ALICE.sha256)
    assert rotated.previous_until == NOW + 3600
    assert rotated.spec.limits == FULL.limits
    at_once = do(store, rotate_key, "alice", BOB.sha256, 0.0, NOW)
    assert (at_once.previous_sha256, at_once.previous_until) == (None, None)
    assert do(store, read_keys) == [at_once]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ((rotate_key, "alice", OTHER.sha256, 1.0, NOW), "key_revoked"),
        ((change_key, "alice", spec(), NOW), "key_revoked"),
        ((rotate_key, "bob", OTHER.sha256, 1.0, NOW), "key_expired"),
    ],
    ids=["rotate", "change", "rotate an expired one"],
)
def test_a_key_that_ended_is_not_revived(store: Store, change: Any, code: str) -> None:
    past = BOBS.model_copy(update={"expires": datetime.fromtimestamp(NOW - 1, UTC)})
    add(store, spec(), past)
    do(store, revoke_key, "alice", NOW)
    with pytest.raises(GatewayError) as caught:
        do(store, *change)
    assert (caught.value.status, caught.value.code) == (409, code)


def test_a_key_that_a_later_version_wrote_has_no_rights(store: Store) -> None:
    add(store, spec(), BOBS)
    odd = update(keys_table).where(keys_table.c.name == "alice")
    do(store, Connection.execute, odd.values(limits=json.dumps({"fortnightly": 3})))
    assert [key.spec.name for key in do(store, read_keys)] == ["bob"]


def test_the_revision_of_a_store_from_a_backup_is_another(store: Store) -> None:
    add(store, spec())
    first = do(store, revision_of)
    do(store, stored_keys.raise_revision, NOW - 1000)
    assert do(store, revision_of) == first + 1  # never back, though the clock was
    do(store, stored_keys.raise_revision, NOW + 1)
    assert do(store, revision_of) == int((NOW + 1) * 1000)


def test_thousands_of_keys_are_imported_at_once_and_their_number_is_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [spec(f"name {n}", id=f"id-{n}") for n in range(12_000)]
    store.run_now(lambda connection: add_keys(connection, many, NOW), seconds=60)
    assert len(do(store, read_keys)) == len(many)
    monkeypatch.setattr(stored_keys, "MOST_STORED_KEYS", len(many))
    with pytest.raises(KeysRefused, match="at most 12000 keys"):
        add(store, spec("c", id="c"))


def entry(**fields: object) -> dict[str, object]:
    return {"id": ALICE.id, "sha256": ALICE.sha256, **fields}


@each_case(
    ("fields", "said"),
    [
        ({"limits": {"rpm": 0}}, "limits.rpm"),
        ({"sha256": ALICE.text}, "sha256"),
        ({"expires": ALICE.text}, "expires"),
        ({"name": "bob"}, "key 1 of the list is called 'bob' already"),
        ({"class": "premium", "max_class": "batch"}, "max_class"),
        ({"colour": "red"}, "colour"),
        ({"group": "nobody"}, "there is no group 'nobody' (there are team"),
        ({"name": " alice"}, "white space"),
        ({"name": "a\nb"}, "printable"),
        ({"expires": "2020-01-01"}, "is over"),
        ({"expires": "soon"}, "expires: must be a duration such as 90d"),
    ],
)
def test_a_bad_entry_is_refused_with_its_field(fields: dict[str, object], said: str) -> None:
    with pytest.raises(KeysRefused) as caught:
        checked_specs([entry(name="bob", id="b"), entry(**fields)], (), ("team",), NOW)
    assert caught.value.status == 400
    assert said in caught.value.message
    # A secret that was pasted as a hash is not repeated.
    assert ALICE.text.split("_")[2] not in caught.value.message


def test_an_expiry_may_be_a_duration_or_a_time_and_nothing_else() -> None:
    for text, seconds in (("90d", 90 * 86400.0), ("1h30m", 5400.0), ("250ms", 0.25)):
        assert expiry(text, NOW).timestamp() == pytest.approx(NOW + seconds, abs=1e-3)
    assert expiry("2027-01-31", NOW) == datetime(2027, 1, 31, tzinfo=UTC)
    assert expiry("2027-01-31T18:00:00+01:00", NOW) == datetime(2027, 1, 31, 17, tzinfo=UTC)
    for text in ("", "later", "90", "90x", "-5d", "9" * 30 + "d", "d", "T"):
        with pytest.raises(ValueError, match="must be a duration"):
            expiry(text, NOW)


def a_desk(store: Store, **settings: Any) -> KeyDesk:
    chosen = Settings.model_validate(settings)
    return KeyDesk(chosen, Standings.alone(chosen, store), lambda _: ())


async def refused(work: Any) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await work
    return raised.value


async def test_groups_of_the_settings_come_before_those_of_the_store(store: Store) -> None:
    own = {"night": {"limits": {"rpm": 1}}}
    store.run_now(lambda c: put_group(c, "night", GroupSpec(), NOW))
    store.run_now(lambda c: put_group(c, "day", GroupSpec(), NOW))
    desk = a_desk(store, groups=own)
    found = await desk.list_groups()
    assert {one["name"]: one["origin"] for one in found["groups"]} == {
        "night": "settings", "day": "store",
    }  # fmt: skip
    assert "both define the group 'night'" in found["warnings"][0]
    for work in (desk.put_group("night", {}), desk.remove_group("night")):
        assert (await refused(work)).code == "group_of_settings"
    settings = with_groups(desk.settings, store.run_now(read_groups))
    assert settings.groups["night"].limits is not None
    assert settings.groups.keys() == {"night", "day"}


async def test_where_the_settings_have_groups_a_key_may_be_of_these_or_of_stored_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "MOST_STORED_GROUPS", 1)
    desk = a_desk(store, groups={"day": {}})
    for _ in range(2):
        await desk.put_group("night", {})
    for group in ("day", "night"):
        assert (await desk.create({"name": group, "group": group}))["warnings"] == []
    error = await refused(desk.create({"name": "c", "group": "nigth"}))
    assert (error.status, error.param) == (400, "group")
    assert "day, night" in error.message
    assert (await refused(desk.put_group("c", {}))).code == "too_many_groups"
    for name in ("a b", "x" * 65):
        assert (await refused(desk.put_group(name, {}))).status == 400
    error = await refused(desk.put_group("night", {"limits": {"rpm": 0}}))
    assert (error.status, "limits.rpm" in error.message) == (400, True)


async def test_a_key_is_called_by_its_last_name_though_revoked(store: Store) -> None:
    desk, ring = a_desk(store), KeyRing()
    sync = KeySync(store, ring, None)
    made = await desk.create({"name": "alice"})
    await desk.change("alice", {"name": "Alice B."})
    await desk.revoke("Alice B.")
    await sync.refresh()
    assert ring.name_of(made["id"]) == "Alice B."
    assert ring.caller(made["id"]) is None
    assert ring.name_of("anonymous:10.0.0.1") is None


# The key ring follows its store; and what holds while the store can not be reached.


def named(key: ApiKey, **fields: Any) -> KeySpec:
    """Its name is its id."""
    return KeySpec(id=key.id, sha256=key.sha256, name=key.id, **fields)


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'gateway.db'}"


def store_keys(url: str, *specs: KeySpec) -> None:
    with opened(url) as store:
        store.run_now(lambda connection: add_keys(connection, specs, time.time()))


async def revoke(url: str, name: str) -> None:
    with opened(url) as store:
        await store.run(lambda connection: revoke_key(connection, name, time.time()))


@asynccontextmanager
async def gateway_of(folder: Path, url: str) -> AsyncIterator[Running]:
    settings = {"store": {"url": url}}
    async with EmulatedNode() as node, running_gateway(folder, [node.url], settings) as running:
        yield running


async def status(running: Running, key: ApiKey | str) -> int:
    """The status of a chat; the client keeps its connection."""
    return (await running.chat(key, max_tokens=1)).status_code


async def becomes(running: Running, key: ApiKey | str, wanted: int) -> None:
    async with asyncio.timeout(30):
        while await status(running, key) != wanted:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def test_a_kept_connection_follows_the_stored_keys(store_url: str, tmp_path: Path) -> None:
    """The first one ends anonymous access, and the end of the last one locks."""
    assert POLL_SECONDS + LOOK_SECONDS < 1, "within a second"
    rotated = new_key(ALICE.id)
    async with gateway_of(tmp_path, store_url) as running:
        assert await status(running, "") == 200
        with opened(store_url) as store:
            await store.run(lambda c: add_keys(c, [named(ALICE)], time.time()))
            await becomes(running, "", 401)
            assert await status(running, ALICE) == 200
            await store.run(lambda c: rotate_key(c, ALICE.id, rotated.sha256, 60.0, time.time()))
            await becomes(running, rotated, 200)
            assert await status(running, ALICE) == 200
            await store.run(lambda c: revoke_key(c, ALICE.id, time.time()))
            await becomes(running, rotated, 401)
        for key in (ALICE, ""):
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
    async with beside(sync.run()):
        assert await reads(MOST_UNCHANGED - 2) == 0
        assert await reads(MOST_UNCHANGED) == 1, "now and then, whatever the store says"
        ends = datetime.fromtimestamp(NOW + now() + 100.0, UTC)
        add_keys(connection, [named(ALICE), named(BOB, expires=ends)], NOW)
        store.more_changes += 1
        assert await reads(2) == 1
        assert ring.find(BOB.text) is not None
        store.is_away, store.more_changes = True, 2
        assert await reads(100) > 90
        store.is_away, store.seconds = False, 1000.0
        assert await reads(110) == 1
        assert ring.find(ALICE.text) is not None
        assert ring.find(BOB.text) is None


def damage(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_bytes(b"this is no database\n" * 500)


async def test_a_start_without_the_store_knows_the_callers_of_before(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    url = f"sqlite:///{path}"
    ends = datetime.now(UTC) + timedelta(seconds=1)
    expiring = new_key("expiring")
    store_keys(url, named(ALICE), named(expiring, expires=ends))
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
        assert await status(running, "") == 401
        await becomes(running, expiring, 401)
        # The store comes back, with another key.
        path.unlink()
        path.write_bytes(kept)
        await until(lambda: running.gateway.key_sync.problem is None)
        store_keys(url, named(BOB))
        await becomes(running, BOB, 200)


async def test_without_store_and_memory_nobody_is_admitted_nor_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    damage(path)
    async with gateway_of(tmp_path, f"sqlite:///{path}") as running:
        assert {await status(running, key) for key in (ALICE, "")} == {503}
        path.unlink()
        store_keys(f"sqlite:///{path}", named(ALICE))
        await until(lambda: running.gateway.key_sync.problem is None)
        assert await status(running, ALICE) == 200
        assert await status(running, "") == 401
        assert await status(running, BOB) == 401


async def test_a_store_with_a_key_even_a_revoked_one_had_keys(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path)
    assert never_had_keys(location)
    store_keys(str(location.shown))
    assert never_had_keys(location)
    store_keys(str(location.shown), named(ALICE))
    await revoke(str(location.shown), ALICE.id)
    assert not never_had_keys(location)


@pytest.mark.parametrize("sign", ["table", "log", "link", "folder", "memory"])
async def test_a_sign_of_keys_keeps_strangers_out(sign: str, public: Options) -> None:
    path = public.inventory_file.with_name("gateway.db")
    location = locate_store(f"sqlite:///{path}", path.parent)
    assert await asyncio.to_thread(count_stored_keys, location, keys_file(public)) == 0
    if sign == "table":
        with closing(sqlite3.connect(path)) as made:
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
    store_keys(f"sqlite:///{path}", named(ALICE), named(BOB))
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


def stored(key: ApiKey, **fields: Any) -> StoredKey:
    return StoredKey(named(key, **fields), 1.0)


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


def kept_ids(location: StoreLocation, path: Path) -> set[str] | None:
    found = LastKnownKeys(location, path).load()
    return None if found is None else {one.id for one in found.held}


@pytest.mark.parametrize("change", ["revoked", "rotated", "limited"])
def test_a_start_without_the_store_lets_no_key_in_that_is_known_to_have_changed(
    change: str, location: StoreLocation, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    saved = LastKnownKeys(location, path)
    saved.save([stored(ALICE), stored(BOB)], {"night": GroupSpec()})
    assert known(LastKnownKeys(location, path).load()).groups.keys() == {"night"}
    now = {
        "revoked": [stored(ALICE)],
        "rotated": [stored(ALICE), stored(ApiKey("", BOB.id, ALICE.sha256))],
        "limited": [stored(ALICE), stored(BOB, models=["small"])],
    }[change]
    with unwritable(path):
        saved.save(now, {})
        assert saved.error is not None
        assert "refuses all stored keys" in saved.error
        assert kept_ids(location, path) is None
    saved.save_again()
    assert kept_ids(location, path) == {one.spec.id for one in now}
    other = locate_store("postgresql://gateway@127.0.0.1:1/other", tmp_path)
    assert kept_ids(other, path) is None
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"]


async def test_that_the_file_can_not_be_written_is_told_until_it_can(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    store_keys(url, named(ALICE), named(BOB))
    async with gateway_of(tmp_path, url) as running:
        file, sync = keys_file(running.gateway.options), running.gateway.key_sync
        await until(file.exists)
        with unwritable(file):
            await revoke(url, BOB.id)
            await becomes(running, BOB, 401)
            await until(lambda: sync.unsaved is not None)
            assert not file.exists()
            status = (await running.admin.get("/admin/status")).json()
            assert "refuses all stored keys" in status["keys_unsaved"]
        await until(lambda: sync.unsaved is None)
        assert ALICE.sha256 in file.read_text()
        assert BOB.sha256 not in file.read_text()
