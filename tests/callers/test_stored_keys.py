"""Keys in a real store: SQLite's file, and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, update

from gateway.callers import stored_keys
from gateway.callers.key_desk import KeyDesk, checked_specs, expiry
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.standings import Standings
from gateway.callers.stored_keys import (
    KeysRefused,
    KeySync,
    StoredKey,
    add_keys,
    change_key,
    find_key,
    keys_revision,
    put_group,
    read_groups,
    read_keys,
    revoke_key,
    rotate_key,
    with_groups,
)
from gateway.config.keys import CacheSpec, GroupSpec, KeySpec, LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.schema import keys as keys_table
from gateway.store.store import Store
from tests.each_case import each_case

T = TypeVar("T")

NOW = 1_800_000_000.0

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
    caller = ring.find(ALICE.text)
    assert caller is not None
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
    before = do(store, keys_revision)
    do(store, *CHANGES[change])
    after = do(store, keys_revision)
    assert after > before > 0
    keys = do(store, read_keys, ())
    do(store, *CHANGES[change])
    assert do(store, keys_revision) == after
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
    before = do(store, keys_revision)
    with pytest.raises(KeysRefused) as caught:
        add(store, BOBS, second)
    assert caught.value.status == 409
    assert [problem.index for problem in caught.value.problems] == [1]
    assert do(store, keys_revision) == before
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
    first = do(store, keys_revision)
    do(store, stored_keys.raise_revision, NOW - 1000)
    assert do(store, keys_revision) == first + 1  # never back, though the clock was
    do(store, stored_keys.raise_revision, NOW + 1)
    assert do(store, keys_revision) == int((NOW + 1) * 1000)


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


def no_models(_: Sequence[KeySpec]) -> Sequence[str]:
    return ()


def a_desk(store: Store, **settings: Any) -> KeyDesk:
    chosen = Settings.model_validate(settings)
    return KeyDesk(chosen, Standings.alone(chosen, store), no_models)


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
