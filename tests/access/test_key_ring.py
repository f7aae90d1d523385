"""The key ring: keys of settings and store together, their changes, expiry and rotation."""

from __future__ import annotations

import hmac
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.callers import identify_caller
from gateway.access.keys import (
    AnonymousAccess,
    ApiKey,
    HeldKey,
    KeyRing,
    caller_from_keys,
    held_key,
    new_key,
)
from gateway.config.usage_limits import LimitSpec
from gateway.errors import GatewayError
from gateway.request import Caller
from tests.access.test_keys import Spec

ALICE, BOB, ALICE_NEW = new_key("alice"), new_key("bob"), new_key("alice")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def spec(key: ApiKey, *, expires: float | None = None, group: str | None = None) -> Spec:
    until = None if expires is None else datetime.fromtimestamp(expires, UTC)
    return Spec(key.id, key.sha256, key.id.title(), expires=until, group=group)


def stored(key: ApiKey, *, expires: float | None = None) -> HeldKey:
    return held_key(spec(key, expires=expires))


def admitted(ring: KeyRing, key: str | None, *, loopback: bool = False) -> Caller | int:
    """The caller, or the status of the refusal."""
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    try:
        return identify_caller(
            headers, "127.0.0.1", ring, allow_anonymous=False, loopback_listener=loopback
        )
    except GatewayError as error:
        return error.status


def test_keys_of_settings_and_store_count_together() -> None:
    ring = KeyRing([spec(ALICE)])
    ring.replace_stored([stored(BOB)])
    assert [caller.name for key in (ALICE, BOB) if (caller := ring.find(key.text))] == [
        "Alice",
        "Bob",
    ]
    assert len(ring) == 2


def test_a_key_of_the_settings_hides_a_stored_one_with_its_id() -> None:
    ring = KeyRing([spec(ALICE)])
    ring.replace_stored([stored(ALICE_NEW), stored(BOB)])
    assert ring.find(ALICE.text) is not None
    assert ring.find(ALICE_NEW.text) is None
    assert ring.hidden_ids() == {"alice"}
    ring.configure([])
    assert ring.find(ALICE_NEW.text) is not None


def test_a_caller_has_the_group_and_the_limits_of_its_key() -> None:
    limits, of_users = LimitSpec(rpm=60), LimitSpec(rpm=6)
    full = replace(spec(ALICE, group="team"), limits=limits, user_limits=of_users)
    caller = KeyRing([full]).find(ALICE.text)
    assert caller is not None
    assert (caller.group, caller.limits, caller.user_limits) == ("team", limits, of_users)


def test_every_change_expiry_and_revocation_changes_the_version() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    versions = [ring.version]
    ring.configure([spec(ALICE)])
    versions.append(ring.version)
    ring.replace_stored([stored(BOB, expires=1_010)])
    versions.append(ring.version)
    clock.now = 1_010.0
    ring.expire()
    versions.append(ring.version)
    ring.replace_stored([])
    versions.append(ring.version)
    assert len(set(versions)) == len(versions)
    ring.expire()
    assert ring.version == versions[-1]  # nothing has expired since


def test_a_key_ends_when_it_expires_and_still_counts() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    ring.replace_stored([stored(BOB, expires=1_010)])
    clock.now = 1_009.9
    ring.expire()
    assert ring.find(BOB.text) is not None
    clock.now = 1_010.0
    ring.expire()
    assert ring.find(BOB.text) is None
    # The last key has expired: nobody is admitted, on a loopback listener neither.
    assert len(ring) == 1
    assert admitted(ring, None, loopback=True) == 401
    assert admitted(ring, BOB.text, loopback=True) == 401


def test_only_the_holder_of_an_expired_key_is_told_that_it_has_expired() -> None:
    clock = Clock()
    ring = KeyRing([spec(ALICE, expires=1_010)], clock=clock)
    ring.replace_stored([stored(BOB, expires=1_010)])
    clock.now = 1_020.0
    ring.expire()
    wrong = f"lg_{ALICE.id}_{'x' * 43}"
    for text, is_told in ((ALICE.text, True), (BOB.text, True), (wrong, False), ("lg_q_x", False)):
        with pytest.raises(GatewayError) as refused:
            caller_from_keys([(b"x-api-key", text.encode())], ring)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert ("has expired" in refused.value.message) == is_told, text
    ring.configure([])
    with pytest.raises(GatewayError, match="No valid API key"):
        caller_from_keys([(b"x-api-key", ALICE.text.encode())], ring)


def test_a_key_of_the_settings_expires_too() -> None:
    clock = Clock()
    ring = KeyRing([spec(ALICE, expires=1_010)], clock=clock)
    assert ring.find(ALICE.text) is not None
    clock.now = 2_000.0
    ring.expire()
    assert ring.find(ALICE.text) is None
    ring.configure([spec(ALICE, expires=1_010)])
    assert ring.find(ALICE.text) is None


def test_a_clock_that_is_set_back_revives_no_expired_key() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    ring.replace_stored([stored(BOB, expires=1_010)])
    clock.now = 1_020.0
    ring.expire()
    clock.now = 1_000.0
    ring.expire()
    assert ring.find(BOB.text) is None


def test_after_a_rotation_the_old_secret_works_until_the_grace_is_over() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    ring.replace_stored([held_key(spec(ALICE_NEW), ALICE.sha256, 1_060.0)])
    assert ring.find(ALICE.text) == ring.find(ALICE_NEW.text) is not None
    version, clock.now = ring.version, 1_060.0
    ring.expire()
    assert ring.find(ALICE.text) is None
    assert ring.find(ALICE_NEW.text) is not None
    assert ring.version != version


def test_every_look_up_compares_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    ring = KeyRing([spec(BOB)])
    ring.replace_stored([held_key(spec(ALICE_NEW), ALICE.sha256, 1e12)])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for text in (ALICE.text, ALICE_NEW.text, BOB.text, "lg_unknown_secret", "", "lg__"):
        compared.clear()
        ring.find(text)
        assert compared == [(32, 32), (32, 32)]


def test_losing_the_last_key_of_both_locks() -> None:
    ring = KeyRing([spec(ALICE)])
    ring.replace_stored([stored(BOB)])
    ring.configure([])
    assert isinstance(admitted(ring, BOB.text), Caller)
    ring.replace_stored([])
    assert ring.access.locked
    assert admitted(ring, None, loopback=True) == 401
    ring.replace_stored([stored(BOB)])
    assert isinstance(admitted(ring, BOB.text), Caller)


def test_while_the_store_is_unknown_nobody_is_taken_for_a_stranger_nor_admitted() -> None:
    ring = KeyRing(is_complete=False)
    ring.configure([])
    assert admitted(ring, BOB.text, loopback=True) == 503
    assert admitted(ring, None, loopback=True) == 503
    assert admitted(ring, None) == 503
    ring.replace_stored([stored(BOB)])
    assert isinstance(admitted(ring, BOB.text), Caller)
    assert admitted(ring, ALICE.text) == 401


def test_while_the_store_is_unknown_keys_of_the_settings_work() -> None:
    ring = KeyRing(is_complete=False)
    ring.configure([spec(ALICE)])
    assert isinstance(admitted(ring, ALICE.text), Caller)
    assert admitted(ring, BOB.text) == 503
    assert admitted(ring, None, loopback=True) == 401


def test_a_store_without_keys_opens_a_loopback_listener_only_once_that_is_known() -> None:
    ring = KeyRing(is_complete=False)
    ring.configure([])
    ring.replace_stored([])
    assert isinstance(admitted(ring, None, loopback=True), Caller)
    assert admitted(ring, None) == 401


def test_a_predecessors_keys_lock_only_once_the_store_is_known_to_have_none() -> None:
    ring = KeyRing(is_complete=False, access=AnonymousAccess(had_keys=True))
    ring.configure([], allow_anonymous=True)
    assert admitted(ring, None, loopback=True) == 503
    ring.replace_stored([])
    assert ring.access.locked
    assert admitted(ring, None, loopback=True) == 401


KEYS = [new_key(f"key-{number}") for number in range(4)]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["settings", "store", "wait"]),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=4),
    ),
    max_size=12,
)


@given(STEPS)
def test_exactly_the_keys_of_both_that_have_not_expired_are_found(
    steps: list[tuple[str, list[tuple[int, int]]]],
) -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    settings: dict[int, float] = {}
    store: dict[int, float] = {}
    for what, chosen in steps:
        if what == "wait":
            clock.now += 10.0
            ring.expire()
        elif what == "settings":
            settings = {number: 1_000.0 + seconds for number, seconds in chosen}
            ring.configure([spec(KEYS[n], expires=end) for n, end in settings.items()])
        else:
            store = {number: 1_000.0 + seconds for number, seconds in chosen}
            ring.replace_stored([stored(KEYS[n], expires=end) for n, end in store.items()])
        both = {**store, **settings}
        found = {number for number, key in enumerate(KEYS) if ring.find(key.text)}
        assert found == {number for number, end in both.items() if end > clock.now}
        assert len(ring) == len(both)


def test_a_held_key_shows_no_digest() -> None:
    assert "digest" not in repr(stored(ALICE))


def test_keys_that_the_settings_lose_before_the_store_answers_are_lost() -> None:
    ring = KeyRing(is_complete=False)
    ring.configure([spec(ALICE)])
    ring.configure([])
    assert admitted(ring, None, loopback=True) == 503
    ring.replace_stored([])
    assert admitted(ring, None, loopback=True) == 401
    assert ring.lost is not None
