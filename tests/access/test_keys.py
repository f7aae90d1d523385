from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access import keys
from gateway.access.keys import KeyRing, caller_from_keys, hash_key, new_key, presented_keys
from gateway.config.cache_privacy import CacheSpec
from gateway.config.usage_limits import LimitSpec
from gateway.errors import GatewayError
from gateway.request import Caller, Priority


@dataclass(frozen=True)
class Spec:
    id: str
    sha256: str
    name: str | None = None
    class_: str | None = None
    max_class: str | None = None
    models: tuple[str, ...] | None = None
    trust_user_headers: bool = False
    group: str | None = None
    limits: LimitSpec | None = None
    user_limits: LimitSpec | None = None
    expires: datetime | None = None
    cache: CacheSpec | None = None


def test_a_key_finds_its_holder() -> None:
    key = new_key()
    ring = KeyRing([Spec(key.id, key.sha256, "Team A", None, "premium", ("mistral-7b",))])
    caller = ring.find(key.text)
    assert caller is not None
    assert caller.id == key.id
    assert caller.name == "Team A"
    assert caller.max_priority is Priority.PREMIUM
    assert caller.may_use("mistral-7b")
    assert not caller.may_use("phi-4-mini")
    assert not caller.anonymous


def test_the_settings_contain_only_the_sha256_of_the_secret() -> None:
    key = new_key("team-a")
    prefix, key_id, secret = key.text.split("_")
    assert (prefix, key_id) == ("lg", "team-a")
    assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.upper(),
        lambda text: text.replace("lg_", "sk_"),
        lambda text: text.replace("lg_", ""),
        lambda text: text.replace("lg_team", "lg_other"),
        lambda text: " " + text,
        lambda text: text.rsplit("_", 1)[0],
        lambda text: text.rsplit("_", 1)[0] + "_",
        lambda text: "",
        lambda text: "lg__",
        lambda text: text + "x" * 100_000,
        lambda text: text + "\udc80",
    ],
)
def test_a_key_that_differs_in_anything_finds_nobody(change: Callable[[str], str]) -> None:
    key = new_key("team")
    assert KeyRing([Spec(key.id, key.sha256)]).find(change(key.text)) is None


def test_any_presented_key_costs_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = hashlib.sha256

    def counting(data: bytes) -> object:
        hashed.append(len(data))
        return real(data)

    key = new_key()
    ring = KeyRing([Spec(key.id, key.sha256)])
    monkeypatch.setattr(hashlib, "sha256", counting)
    for text in (key.text, "lg_unknown_" + "x" * 43, "sk-something", "", "x" * 60_000):
        hashed.clear()
        ring.find(text)
        assert len(hashed) == 1
        assert hashed[0] <= keys.MOST_KEY_CHARACTERS


def test_a_secret_may_contain_an_underscore() -> None:
    key = hash_key("lg_mine_some_secret_of_my_own")
    assert key.id == "mine"
    caller = KeyRing([Spec(key.id, key.sha256)]).find(key.text)
    assert caller is not None
    assert caller.name == "mine"


@pytest.mark.parametrize("text", ["", "secret", "sk-secret", "lg_secret", "lg__secret", "lg_id_"])
def test_a_text_that_is_not_a_key_can_not_be_hashed(text: str) -> None:
    with pytest.raises(ValueError, match="lg_<id>_<secret>"):
        hash_key(text)


def test_new_keys_are_different_long_and_alphanumeric() -> None:
    made = [new_key() for _ in range(200)]
    assert len({key.id for key in made}) == 200
    assert len({key.text for key in made}) == 200
    for key in made:
        assert key.id[0].isalpha()
        secret = key.text.split("_")[2]
        assert len(secret) == 43
        assert secret.isalnum()
        assert secret.isascii()


@pytest.mark.parametrize("key_id", ["", "with_underscore"])
def test_an_id_with_an_underscore_is_refused(key_id: str) -> None:
    with pytest.raises(ValueError, match="underscore"):
        new_key(key_id)


def test_an_empty_key_ring_finds_nobody() -> None:
    assert not KeyRing()
    assert KeyRing().find(new_key().text) is None


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([(b"authorization", b"Bearer lg_a_b")], ["lg_a_b"]),
        ([(b"authorization", b"bearer   lg_a_b ")], ["lg_a_b"]),
        ([(b"x-api-key", b"lg_a_b")], ["lg_a_b"]),
        ([(b"api-key", b" lg_a_b")], ["lg_a_b"]),
        (
            [(b"api-key", b"c"), (b"x-api-key", b"b"), (b"authorization", b"Bearer a")],
            ["c", "b", "a"],
        ),
        ([(b"api-key", b"same"), (b"authorization", b"Bearer same")], ["same"]),
        ([(b"x-api-key", b"a"), (b"x-api-key", b"b")], ["a", "b"]),
        ([(b"authorization", b"Basic dTpw"), (b"x-api-key", b"b")], ["b"]),
        ([(b"authorization", b"Bearer "), (b"x-api-key", b"b")], ["b"]),
        ([(b"authorization", b"Bearer")], []),
        ([(b"authorization", b"Basic dTpw")], []),
        ([(b"x-api-key", b"")], []),
        ([(b"authorization", b"Bearer \xff\xfe")], ["\xff\xfe"]),
        ([], []),
    ],
)
def test_keys_are_read_from_three_headers_each_once(
    headers: list[tuple[bytes, bytes]], found: list[str]
) -> None:
    assert presented_keys(headers) == found


TEAM, OTHER = new_key("team"), new_key("other")
RING = KeyRing([Spec(TEAM.id, TEAM.sha256), Spec(OTHER.id, OTHER.sha256)])
FIELDS = {"authorization": "Bearer {}", "x-api-key": "{}", "api-key": "{}"}


def sent(*keys: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), FIELDS[name].format(key).encode()) for name, key in keys]


@pytest.mark.parametrize("good", FIELDS)
@pytest.mark.parametrize("dummy", ["none", "sk-proj-1234", "lg_team_wrong", "lg_nobody_x"])
def test_one_valid_key_is_enough_besides_a_dummy(good: str, dummy: str) -> None:
    others = [(name, dummy + name) for name in FIELDS if name != good]
    for fields in ([(good, TEAM.text), *others], [*others, (good, TEAM.text)]):
        found = caller_from_keys(sent(*fields), RING)
        assert found is not None
        assert found.id == "team"


def test_the_same_key_in_every_header_is_one_key() -> None:
    found = caller_from_keys(sent(*((name, TEAM.text) for name in FIELDS)), RING)
    assert found is not None
    assert found.id == "team"


@pytest.mark.parametrize(
    "keys",
    [
        [("authorization", TEAM.text), ("x-api-key", OTHER.text)],
        [("api-key", OTHER.text), ("x-api-key", TEAM.text)],
        [("x-api-key", TEAM.text), ("x-api-key", OTHER.text)],
        [("authorization", "dummy"), ("x-api-key", OTHER.text), ("api-key", TEAM.text)],
    ],
)
def test_valid_keys_of_two_callers_are_refused_with_the_remedy(keys: list[tuple[str, str]]) -> None:
    with pytest.raises(GatewayError, match=r"different callers.*Send one of them") as caught:
        caller_from_keys(sent(*keys), RING)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_an_invalid_key_is_refused_and_no_key_is_anonymous() -> None:
    with pytest.raises(GatewayError) as caught:
        caller_from_keys(sent(("authorization", "a"), ("x-api-key", "lg_team_wrong")), RING)
    assert caught.value.status == 401
    assert caller_from_keys([(b"authorization", b"Bearer "), (b"x-api-key", b"")], RING) is None


def test_too_many_keys_are_refused_without_hashing() -> None:
    hashed: list[str] = []

    class CountingRing(KeyRing):
        def find(self, text: str) -> Caller | None:
            hashed.append(text)
            return super().find(text)

    ring = CountingRing([Spec(TEAM.id, TEAM.sha256)])
    with pytest.raises(GatewayError, match=f"More than {keys.MOST_KEYS}") as caught:
        caller_from_keys(
            sent(("authorization", TEAM.text), *(("x-api-key", str(i)) for i in range(999))), ring
        )
    assert (caught.value.status, hashed) == (401, [])
    fields = [("x-api-key", TEAM.text), *(("api-key", str(i)) for i in range(keys.MOST_KEYS - 1))]
    assert caller_from_keys(sent(*fields), ring) is not None
    assert len(hashed) == keys.MOST_KEYS


@given(st.text())
def test_no_text_breaks_the_key_ring(text: str) -> None:
    key = new_key("team")
    assert KeyRing([Spec(key.id, key.sha256)]).find(text) is None
