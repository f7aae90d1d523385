"""Keys in a real store: SQLite's file, and PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, update

from gateway.callers import stored_keys
from gateway.callers.key_desk import checked_specs, expiry
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.stored_keys import (
    KeysRefused,
    StoredKey,
    add_keys,
    change_key,
    find_key,
    keys_revision,
    read_keys,
    revoke_key,
    rotate_key,
)
from gateway.config.keys import CacheSpec, KeySpec, LimitSpec
from gateway.errors import GatewayError
from gateway.store.schema import keys as keys_table
from gateway.store.store import Store
from tests.each_case import each_case
from tests.store.stores import opened

T = TypeVar("T")

NOW = 1_800_000_000.0

ALICE, BOB, OTHER = new_key("alice-1"), new_key("bob-1"), new_key("other")

Job = Callable[[Connection], T]


def do(store: Store, job: Callable[..., T], *values: Any) -> T:
    """Have the store do a job with these values."""
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


def test_a_key_is_found_by_its_name_and_by_its_id(store: Store) -> None:
    add(store, FULL, BOBS)
    for name in ("alice", ALICE.id):
        assert do(store, find_key, name).spec == FULL
    with pytest.raises(GatewayError) as caught:
        do(store, find_key, "carol")
    assert (caught.value.status, caught.value.code) == (404, "key_not_found")


CHANGES: dict[str, tuple[Any, ...]] = {
    "create": (add_keys, [BOBS], NOW),
    "change": (change_key, "alice", spec("alice", group="x"), NOW),
    "rotate": (rotate_key, "alice", OTHER.sha256, 60.0, NOW),
    "revoke": (revoke_key, "alice", NOW),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_the_revision_once_though_it_is_made_twice(
    store: Store, change: str
) -> None:
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
    ("second", "said"),
    [
        (spec("alice", id="other"), "the key alice-1 is called 'alice' already"),
        (spec("carol", sha256=BOB.sha256), "another key has the id 'alice-1' already"),
        (spec("alice-1", id="other"), "the key alice-1 is called 'alice' already"),
        (spec("carol", id="alice"), "the key alice-1 is called 'alice' already"),
    ],
    ids=["name", "id", "name like an id", "id like a name"],
)
def test_names_and_ids_of_stored_keys_are_unique_together_and_a_refusal_changes_nothing(
    store: Store, second: KeySpec, said: str
) -> None:
    add(store, spec())
    before = do(store, keys_revision)
    with pytest.raises(KeysRefused) as caught:
        add(store, BOBS, second)
    assert caught.value.status == 409
    assert said in caught.value.message
    assert do(store, keys_revision) == before
    assert len(do(store, read_keys)) == 1


def test_every_key_of_an_import_that_clashes_is_named(store: Store) -> None:
    add(store, spec(), BOBS)
    wanted = [spec("a", id="a"), spec("alice", id="b"), spec("c", id="c"), spec("bob", id="d")]
    with pytest.raises(KeysRefused) as caught:
        do(store, add_keys, wanted, NOW)
    assert [problem.index for problem in caught.value.problems] == [1, 3]


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


def test_a_key_can_not_take_anothers_name(store: Store) -> None:
    add(store, spec(), BOBS)
    with pytest.raises(KeysRefused) as caught:
        do(store, change_key, "bob", spec("alice"), NOW)
    assert caught.value.status == 409
    changed = do(store, change_key, "bob", spec("robert", group="g"), NOW)
    assert (changed.spec.id, changed.spec.sha256) == (BOB.id, BOB.sha256)
    assert (changed.spec.name, changed.spec.group) == ("robert", "g")


def test_a_key_that_a_later_version_wrote_has_no_rights(store: Store) -> None:
    add(store, spec(), BOBS)

    def spoil(connection: Connection) -> None:
        odd = json.dumps({"fortnightly": 3})
        connection.execute(
            update(keys_table).where(keys_table.c.name == "alice").values(limits=odd)
        )

    do(store, spoil)
    assert [key.spec.name for key in do(store, read_keys)] == ["bob"]


def test_the_revision_of_a_store_from_a_backup_is_another(store: Store) -> None:
    add(store, spec())
    first = do(store, keys_revision)
    do(store, stored_keys.raise_revision, NOW - 1000)
    assert do(store, keys_revision) == first + 1  # never back, though the clock was
    do(store, stored_keys.raise_revision, NOW + 1)
    assert do(store, keys_revision) == int((NOW + 1) * 1000)


def test_a_store_holds_a_bounded_number_of_keys(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "MOST_STORED_KEYS", 2)
    add(store, spec(), BOBS)
    with pytest.raises(KeysRefused, match="at most 2 keys"):
        add(store, spec("c", id="c"))


def test_thousands_of_keys_are_imported_at_once(store: Store) -> None:
    many = [spec(f"name {n}", id=f"id-{n}") for n in range(12_000)]
    store.run_now(lambda connection: add_keys(connection, many, NOW), seconds=60)
    assert len(do(store, read_keys)) == len(many)


def test_the_file_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    with opened(f"sqlite:///{path}") as store:
        add(store, FULL)
    secret = ALICE.text.split("_")[2]
    assert secret.encode() not in path.read_bytes()
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT sha256 FROM keys").fetchall() == [(ALICE.sha256,)]


# What somebody wants, checked before the store is asked.


def checked(*entries: object, settings: tuple[KeySpec, ...] = ()) -> list[KeySpec]:
    return checked_specs(entries, settings, ("team",), NOW)


def entry(**fields: object) -> dict[str, object]:
    return {"id": ALICE.id, "sha256": ALICE.sha256, **fields}


def test_a_key_without_a_name_is_called_by_its_id() -> None:
    assert checked(entry())[0].name == ALICE.id


@each_case(
    ("fields", "said"),
    [
        ({"limits": {"rpm": 0}}, "limits.rpm"),
        ({"limits": {"budget": "0/month"}}, "limits.budget"),
        ({"id": "a_b"}, "id"),
        ({"sha256": "lg_alice_secret"}, "sha256"),
        ({"class": "vip"}, "class"),
        ({"class": "premium", "max_class": "batch"}, "max_class"),
        ({"colour": "red"}, "colour"),
        ({"group": "nobody"}, "there is no group 'nobody' (there are team"),
        ({"name": " alice"}, "white space"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "x" * 300}, "name"),
        ({"expires": "2020-01-01"}, "is over"),
        ({"expires": "0d"}, "is over"),
        ({"expires": "soon"}, "expires: must be a duration such as 90d"),
        ({"expires": 5}, "expires"),
    ],
)
def test_a_bad_entry_is_refused_with_its_field(fields: dict[str, object], said: str) -> None:
    with pytest.raises(KeysRefused) as caught:
        checked(entry(**fields))
    assert caught.value.status == 400
    assert said in caught.value.message


def test_no_refusal_repeats_a_secret_that_was_pasted_as_a_hash() -> None:
    with pytest.raises(KeysRefused) as caught:
        checked(entry(sha256=ALICE.text, expires=ALICE.text))
    assert ALICE.text.split("_")[2] not in caught.value.message


@each_case("value", [None, 5, "text", [], ["id"]])
def test_an_entry_that_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(KeysRefused):
        checked(value)


@each_case("clash", [{"name": "team a"}, {"id": "team-a"}, {"name": "team-a"}])
def test_a_key_of_the_settings_keeps_its_name_and_id(clash: dict[str, str]) -> None:
    own = KeySpec(id="team-a", sha256=BOB.sha256, name="team a")
    with pytest.raises(KeysRefused, match="a key of the settings is called"):
        checked(entry(**clash), settings=(own,))


def test_two_keys_of_one_name_in_a_list_are_refused() -> None:
    with pytest.raises(KeysRefused, match="key 1 of the list is called 'alice' already"):
        checked(entry(name="alice"), entry(id="b", name="alice"))


def test_an_expiry_may_be_a_duration_or_a_time_and_nothing_else() -> None:
    for text, seconds in (("90d", 90 * 86400.0), ("12h", 43200.0), ("1h30m", 5400.0)):
        assert expiry(text, NOW).timestamp() == NOW + seconds
    assert expiry("250ms", NOW).timestamp() == pytest.approx(NOW + 0.25, abs=1e-3)
    assert expiry("2027-01-31", NOW) == datetime(2027, 1, 31, tzinfo=UTC)
    assert expiry("2027-01-31T18:00:00+01:00", NOW) == datetime(2027, 1, 31, 17, tzinfo=UTC)
    for text in ("", "later", "90", "90x", "-5d", "9" * 30 + "d", "d", "T"):
        with pytest.raises(ValueError, match="must be a duration"):
            expiry(text, NOW)
