"""Who a caller is: by its key, by its address, and by what it says of itself."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers import keys
from gateway.callers.callers import (
    MOST_FORWARDED_HOPS,
    MOST_IDENTITY_BYTES,
    IdentityHeaders,
    IPNetwork,
    client_address,
    effective_priority,
    identify_caller,
    is_local,
    is_loopback,
    is_proxied,
    owner_of_stored,
    priority_header,
)
from gateway.callers.keys import (
    KEY_FILE_NAME,
    MOST_ADMIN_KEY_CHARACTERS,
    AdminIdentity,
    AdminKeys,
    AdminRole,
    AnonymousAccess,
    ApiKey,
    HeldKey,
    KeyRing,
    caller_from_keys,
    hash_key,
    held_key,
    new_key,
    presented_keys,
)
from gateway.config.keys import KeySpec
from gateway.config.listeners import AdminKeySpec
from gateway.errors import GatewayError
from gateway.terms import Caller, Headers, Priority
from tests.each_case import each_case
from tests.known import known
from tests.nodes.build import Clock


def spec(key: ApiKey, *, expires: float | None = None, **fields: Any) -> KeySpec:
    until = None if expires is None else datetime.fromtimestamp(expires, UTC)
    fields = {"name": key.id.title(), "expires": until, **fields}
    return KeySpec.model_construct(id=key.id, sha256=key.sha256, **fields)


def stored(key: ApiKey, *, expires: float | None = None) -> HeldKey:
    return held_key(spec(key, expires=expires))


TEAM, OTHER, ALICE, BOB = [new_key(name) for name in ("team", "other", "alice", "bob")]
ALICE_NEW = new_key("alice")
RING = KeyRing([spec(TEAM, max_class="premium"), spec(OTHER)])
WITH_KEY: Headers = [(b"authorization", b"Bearer " + TEAM.text.encode())]
WRONG_KEY: Headers = [(b"x-api-key", b"lg_team_wrong")]
PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def caller(
    headers: Headers,
    ring: KeyRing,
    *,
    allow_anonymous: bool = False,
    loopback: bool = False,
    address: str = "192.0.2.7",
    proxies: Sequence[IPNetwork] = (),
) -> Caller:
    return identify_caller(
        headers,
        address,
        ring,
        allow_anonymous=allow_anonymous,
        loopback_listener=loopback,
        trusted_proxies=proxies,
    )


def test_a_key_finds_its_holder() -> None:
    key = hash_key("lg_mine_some_secret_of_my_own")  # A secret may contain an underscore.
    fields: dict[str, Any] = {"max_class": "premium", "models": ("mistral-7b",)}
    caller = known(KeyRing([spec(key, name="Team A", **fields)]).find(key.text))
    assert (caller.id, caller.name) == ("mine", "Team A")
    assert caller.max_priority is Priority.PREMIUM
    assert caller.may_use("mistral-7b")
    assert not caller.may_use("phi-4-mini")
    assert not caller.anonymous


def test_new_keys_are_different_long_and_alphanumeric_and_are_kept_as_a_sha256() -> None:
    made = [new_key() for _ in range(200)]
    assert len({key.id for key in made}) == len({key.text for key in made}) == 200
    for key in made:
        prefix, key_id, secret = key.text.split("_")
        assert (prefix, key_id) == ("lg", key.id)
        assert key.id[0].isalpha()
        assert len(secret) == 43
        assert secret.isalnum()
        assert secret.isascii()
        assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()


@each_case(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text.upper(),
        lambda text: text.replace("lg_", "sk_"),
        lambda text: text.replace("lg_team", "lg_other"),
        lambda text: " " + text,
        lambda text: text.rsplit("_", 1)[0] + "_",
        lambda _: "",
        lambda text: text + "x" * 100_000,
        lambda text: text + "\udc80",
    ],
)
def test_a_key_that_differs_in_anything_finds_nobody(change: Callable[[str], str]) -> None:
    assert RING.find(change(TEAM.text)) is None


@each_case(
    ("headers", "found"),
    [
        ([(b"authorization", b"Bearer lg_a_b")], ["lg_a_b"]),
        ([(b"authorization", b"bearer   lg_a_b ")], ["lg_a_b"]),
        ([(b"api-key", b" lg_a_b")], ["lg_a_b"]),
        (
            [(b"api-key", b"c"), (b"x-api-key", b"b"), (b"authorization", b"Bearer a")],
            ["c", "b", "a"],
        ),
        ([(b"api-key", b"same"), (b"authorization", b"Bearer same")], ["same"]),
        ([(b"x-api-key", b"a"), (b"x-api-key", b"b")], ["a", "b"]),
        ([(b"authorization", b"Basic dTpw"), (b"x-api-key", b"b")], ["b"]),
        ([(b"authorization", b"Bearer "), (b"x-api-key", b"b")], ["b"]),
        ([(b"x-api-key", b"")], []),
        ([(b"authorization", b"Bearer \xff\xfe")], ["\xff\xfe"]),
        ([], []),
    ],
)
def test_keys_are_read_from_three_headers(
    headers: list[tuple[bytes, bytes]], found: list[str]
) -> None:
    assert presented_keys(headers) == found


FIELDS = {"authorization": "Bearer {}", "x-api-key": "{}", "api-key": "{}"}


def sent(*keys: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), FIELDS[name].format(key).encode()) for name, key in keys]


@each_case("good", FIELDS)
@each_case("dummy", ["none", "sk-proj-1234", "lg_team_wrong", "lg_nobody_x"])
def test_one_valid_key_is_enough_besides_a_dummy(good: str, dummy: str) -> None:
    others = [(name, dummy + name) for name in FIELDS if name != good]
    for fields in ([(good, TEAM.text), *others], [*others, (good, TEAM.text)]):
        assert known(caller_from_keys(sent(*fields), RING)).id == "team"


@each_case(
    "keys",
    [
        [("authorization", TEAM.text), ("x-api-key", OTHER.text)],
        [("x-api-key", TEAM.text), ("x-api-key", OTHER.text)],
        [("authorization", "dummy"), ("x-api-key", OTHER.text), ("api-key", TEAM.text)],
    ],
)
def test_valid_keys_of_two_callers_are_refused_with_the_remedy(keys: list[tuple[str, str]]) -> None:
    with pytest.raises(GatewayError, match=r"different callers.*Send one of them") as caught:
        caller_from_keys(sent(*keys), RING)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_too_many_keys_are_refused_without_hashing() -> None:
    hashed: list[str] = []

    class CountingRing(KeyRing):
        def find(self, text: str) -> Caller | None:
            hashed.append(text)
            return super().find(text)

    ring = CountingRing([spec(TEAM)])
    with pytest.raises(GatewayError, match=f"More than {keys.MOST_KEYS}") as caught:
        caller_from_keys(
            sent(("authorization", TEAM.text), *(("x-api-key", str(i)) for i in range(999))), ring
        )
    assert (caught.value.status, hashed) == (401, [])
    fields = [("x-api-key", TEAM.text), *(("api-key", str(i)) for i in range(keys.MOST_KEYS - 1))]
    assert caller_from_keys(sent(*fields), ring) is not None
    assert len(hashed) == keys.MOST_KEYS


def admitted(ring: KeyRing, key: str | None, *, loopback: bool = False) -> Caller | int:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    try:
        return caller(headers, ring, loopback=loopback)
    except GatewayError as error:
        return error.status


def test_a_rotated_secret_works_until_its_grace_is_over() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    ring.replace_stored([held_key(spec(ALICE_NEW), ALICE.sha256, 1_010.0)])
    for seconds, works in ((9.0, True), (1.0, False), (1.0, False)):
        version = ring.version
        clock.now += seconds
        ring.expire()
        assert (ring.find(ALICE.text) is not None) == works
        assert ring.find(ALICE_NEW.text) is not None
        assert (ring.version != version) == (clock.now == 1_010.0)  # nothing else has expired


def test_a_key_ends_when_it_expires_for_good_and_still_counts() -> None:
    clock = Clock()
    ring = KeyRing(clock=clock)
    ring.replace_stored([stored(BOB, expires=1_010)])
    # A clock that is set back revives no expired key.
    for clock.now, is_known in ((1_009.9, True), (1_010.0, False), (1_000.0, False)):
        ring.expire()
        assert (ring.find(BOB.text) is not None) == is_known
    # The last key has expired: nobody is admitted, on a loopback listener neither.
    assert len(ring) == 1
    assert admitted(ring, None, loopback=True) == 401
    # Only its holder is told that it has expired.
    for text, is_told in ((BOB.text, True), (f"lg_{BOB.id}_{'x' * 43}", False), ("lg_q_x", False)):
        with pytest.raises(GatewayError) as refused:
            caller_from_keys([(b"x-api-key", text.encode())], ring)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert ("has expired" in refused.value.message) == is_told, text


def test_every_look_up_compares_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    ring = KeyRing([spec(BOB)])
    ring.replace_stored([held_key(spec(ALICE_NEW), ALICE.sha256, 1e12)])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for text in (ALICE.text, BOB.text, "lg_unknown_secret", "", "lg__"):
        compared.clear()
        ring.find(text)
        assert compared == [(32, 32), (32, 32)]


def test_while_the_store_is_unknown_keys_of_the_settings_work_and_nobody_is_a_stranger() -> None:
    ring = KeyRing(is_complete=False)
    ring.configure([])
    for key, loopback in ((BOB.text, True), (None, True), (None, False)):
        assert admitted(ring, key, loopback=loopback) == 503
    ring.configure([spec(ALICE)])
    assert isinstance(admitted(ring, ALICE.text), Caller)
    assert admitted(ring, BOB.text) == 503
    assert admitted(ring, None, loopback=True) == 401
    ring.replace_stored([stored(BOB)])
    assert isinstance(admitted(ring, BOB.text), Caller)
    assert admitted(ring, OTHER.text) == 401
    # One without any opens a loopback listener, once that is known.
    ring = KeyRing(is_complete=False)
    ring.configure([])
    ring.replace_stored([])
    assert isinstance(admitted(ring, None, loopback=True), Caller)
    assert admitted(ring, None) == 401


@pytest.mark.parametrize("of", ["predecessor", "settings"])
def test_lost_keys_lock_only_once_the_store_is_known_to_have_none(of: str) -> None:
    had_keys = of == "predecessor"
    ring = KeyRing(is_complete=False, access=AnonymousAccess(had_keys=had_keys))
    ring.configure([] if had_keys else [spec(ALICE)])
    ring.configure([], allow_anonymous=had_keys)
    assert admitted(ring, None, loopback=True) == 503
    ring.replace_stored([])
    assert ring.access.locked
    assert admitted(ring, None, loopback=True) == 401
    assert had_keys or ring.lost is not None


def test_a_key_of_the_settings_hides_a_stored_one_with_its_id() -> None:
    ring = KeyRing([spec(ALICE)])
    ring.replace_stored([stored(ALICE_NEW), stored(BOB)])
    assert ring.find(ALICE.text) is not None
    assert ring.find(ALICE_NEW.text) is None
    ring.configure([])
    assert ring.find(ALICE_NEW.text) is not None


KEYS = [new_key(f"key-{number}") for number in range(4)]
chosen_keys = st.dictionaries(st.integers(0, 3), st.integers(1_000, 1_040))


@given(st.lists(st.tuples(st.sampled_from(["settings", "store", "wait"]), chosen_keys)))
def test_exactly_the_keys_of_both_are_found(steps: list[tuple[str, dict[int, int]]]) -> None:
    """And the version changes with them."""
    clock = Clock()
    ring = KeyRing(clock=clock)
    settings: dict[int, int] = {}
    store: dict[int, int] = {}
    before = set[int]()
    for what, chosen in steps:
        version = ring.version
        if what == "wait":
            clock.now += 10.0
            ring.expire()
        elif what == "settings":
            settings = chosen
            ring.configure([spec(KEYS[n], expires=end) for n, end in settings.items()])
        else:
            store = chosen
            ring.replace_stored([stored(KEYS[n], expires=end) for n, end in store.items()])
        both = {**store, **settings}
        found = {number for number, key in enumerate(KEYS) if ring.find(key.text)}
        assert found == {number for number, end in both.items() if end > clock.now}
        assert len(ring) == len(both)
        assert found == before or ring.version != version
        before = found


WATCHER, KEEPER, OWNER = new_key("watcher"), new_key("keeper"), new_key("owner")
SPECS = [
    AdminKeySpec.model_validate({"id": key.id, "sha256": key.sha256, "role": role})
    for key, role in ((WATCHER, "viewer"), (KEEPER, "operator"), (OWNER, "admin"))
]


def test_the_key_of_the_file_is_any_text_and_gives_the_highest_role() -> None:
    for text in ("plain words", "lg_watcher_x", "café", "k" * MOST_ADMIN_KEY_CHARACTERS):
        keys = AdminKeys(SPECS, text)
        assert keys.find(text) == AdminIdentity(KEY_FILE_NAME, AdminRole.ADMIN)
        assert keys.find(WATCHER.text) == AdminIdentity("watcher", AdminRole.VIEWER)
        assert keys.find(KEEPER.text) == AdminIdentity("keeper", AdminRole.OPERATOR)
        assert keys.find(OWNER.text) == AdminIdentity("owner", AdminRole.ADMIN)


@each_case(
    "presented",
    [
        "",
        "lg_watcher_",
        f"lg_keeper_{WATCHER.text.rpartition('_')[2]}",
        WATCHER.text[:-1],
        WATCHER.sha256,
        "k" * (MOST_ADMIN_KEY_CHARACTERS + 1),
        "\udcff",
    ],
)
def test_any_other_text_is_nobodys(presented: str) -> None:
    assert AdminKeys(SPECS, "the key").find(presented) is None
    assert AdminKeys(SPECS).find(presented) is None
    assert AdminKeys().find(presented) is None
    long = "k" * (MOST_ADMIN_KEY_CHARACTERS + 1)
    assert AdminKeys((), long).find(long) is None


def test_an_admin_key_is_needed_once_there_was_one_and_without_it_nobody_is_admitted() -> None:
    keys = AdminKeys()
    assert (keys.needed, keys.lost) == (False, False)
    keys.configure(SPECS[:1], None)
    assert (keys.needed, keys.lost) == (True, False)
    keys.configure((), None)
    assert (keys.needed, keys.lost) == (True, True)
    assert keys.find(WATCHER.text) is None
    successor = AdminKeys(had_keys=True)
    assert (successor.needed, successor.lost) == (True, True)


# Callers without a key, behind proxies, and of a class.


@each_case("loopback", [True, False])
def test_if_there_are_keys_one_is_needed_or_anonymous_callers_are_allowed(loopback: bool) -> None:
    for headers, allow_anonymous in (([], False), (WRONG_KEY, False), (WRONG_KEY, True)):
        with pytest.raises(GatewayError) as caught:
            caller(headers, RING, loopback=loopback, allow_anonymous=allow_anonymous)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    found = caller(WITH_KEY, RING, loopback=loopback)
    assert (found.id, found.max_priority) == ("team", Priority.PREMIUM)
    found = caller([], RING, allow_anonymous=True)
    assert found.anonymous
    assert (found.id, found.max_priority) == ("anonymous:192.0.2.7", Priority.NORMAL)
    assert not found.trust_user_headers


def test_without_keys_a_local_caller_gets_every_class_and_one_behind_a_proxy_does_not() -> None:
    local = caller([], KeyRing(), loopback=True)
    assert (local.max_priority, local.trust_user_headers) == (Priority.URGENT, True)
    behind = caller([(b"x-forwarded-for", b"127.0.0.1")], KeyRing(), loopback=True)
    trusted = caller([], KeyRing(), loopback=True, allow_anonymous=True, proxies=PROXIES)
    for found in (behind, trusted):
        assert found.id == "anonymous:192.0.2.7"
        assert (found.max_priority, found.trust_user_headers) == (Priority.NORMAL, False)
    with pytest.raises(GatewayError) as caught:
        caller([], KeyRing(), loopback=True, proxies=PROXIES)
    assert caught.value.status == 401


@each_case(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", [b"198.51.100.1"], "192.0.2.7"),  # the peer is not a trusted proxy
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),  # the left one is claimed
        ("10.0.0.1", [b"203.0.113.9", b"198.51.100.1, 10.9.9.9"], "198.51.100.1"),
        ("10.0.0.1", [b"10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", [b"198.51.100.1, unknown"], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [b""], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1:4711"], "198.51.100.1"),
        ("10.0.0.1", [b"[2001:DB8:0::1]:4711"], "2001:db8::1"),
        ("10.0.0.1", [b"2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", [b"::ffff:198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"2001:db8::1%" + b"x" * 1000], "2001:db8::1"),
        ("::ffff:10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("fd00::1", [b"198.51.100.1, fd00::2"], "198.51.100.1"),
        ("2001:db8::5", [b"198.51.100.1"], "2001:db8::5"),
        (None, [b"198.51.100.1"], "local"),
        # Only the last entries of a long list are read.
        ("10.0.0.1", [b"198.51.100.1" + b",10.0.0.2" * MOST_FORWARDED_HOPS], "10.0.0.2"),
    ],
)
def test_the_address_is_the_rightmost_that_is_no_trusted_proxy(
    peer: str | None, forwarded: list[bytes], address: str
) -> None:
    headers = [(b"x-forwarded-for", value) for value in forwarded]
    assert client_address(headers, peer, PROXIES) == address


@given(st.binary(max_size=200))
def test_no_x_forwarded_for_is_an_error(value: bytes) -> None:
    assert client_address([(b"x-forwarded-for", value)], "10.0.0.1", PROXIES)


@each_case(
    ("header", "body", "tier", "best", "priority"),
    [
        (None, None, None, Priority.URGENT, Priority.NORMAL),
        (b"urgent", "batch", "flex", Priority.URGENT, Priority.URGENT),
        (b" Premium ", None, None, Priority.URGENT, Priority.PREMIUM),
        (None, "batch", "priority", Priority.URGENT, Priority.BATCH),
        (None, None, "priority", Priority.URGENT, Priority.PREMIUM),
        (None, None, "flex", Priority.URGENT, Priority.BATCH),
        (None, None, "auto", Priority.URGENT, Priority.NORMAL),
        (None, "vip", None, Priority.URGENT, Priority.NORMAL),  # not one of our classes
        (None, "", "priority", Priority.URGENT, Priority.PREMIUM),
        # The caller's highest class is a cap without an error.
        (b"urgent", None, None, Priority.NORMAL, Priority.NORMAL),
        (b"urgent", None, None, Priority.PREMIUM, Priority.PREMIUM),
        (b"batch", None, None, Priority.PREMIUM, Priority.BATCH),
        (b"normal", None, None, Priority.BATCH, Priority.BATCH),
    ],
)
def test_the_class_comes_from_the_header_then_the_body_then_the_tier_up_to_a_cap(
    header: bytes | None, body: str | None, tier: str | None, best: Priority, priority: Priority
) -> None:
    headers = [] if header is None else [(b"x-priority", header)]
    holder = Caller(id="x", name="x", max_priority=best)
    assert effective_priority(priority_header(headers), body, tier, holder) is priority


@each_case("header", [b"high", b"", b"\xff" * 5000])
def test_an_unknown_class_is_400_and_names_the_known_ones(header: bytes) -> None:
    holder = Caller(id="x", name="x", max_priority=Priority.URGENT)
    with pytest.raises(GatewayError) as caught:
        effective_priority(priority_header([(b"x-priority", header)]), "normal", None, holder)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert caught.value.param == "X-Priority"
    assert "urgent, premium, normal, batch" in caught.value.message
    assert len(caught.value.message) < 300


@each_case(
    ("owner", "ring", "allow_anonymous", "found"),
    [
        ("team", RING, False, "team"),
        ("gone", RING, True, 401),
        ("gone", KeyRing(is_complete=False), False, 503),
        ("anonymous:127.0.0.1", KeyRing(), False, "anonymous:127.0.0.1"),
        ("anonymous:127.0.0.1", RING, False, 401),
        ("anonymous:127.0.0.1", RING, True, "anonymous:127.0.0.1"),
        ("anonymous:127.0.0.1", KeyRing(is_complete=False), False, 503),
    ],
)
def test_the_owner_of_a_stored_request_is_the_holder_of_its_key_as_it_is_now(
    owner: str, ring: KeyRing, allow_anonymous: bool, found: int | str
) -> None:
    try:
        got: int | str = owner_of_stored(owner, ring, allow_anonymous=allow_anonymous).id
    except GatewayError as error:
        got = error.status
    assert got == found


NAMING = IdentityHeaders.of(["X-OpenWebUI-User-Id", "X-User-Id"], ["X-OpenWebUI-Chat-Id"])
CHAT = Caller("chat", "Chat", Priority.NORMAL, trust_user_headers=True)


def test_a_trusted_caller_may_name_its_users_and_others_may_not() -> None:
    anna = [(b"a", b"b"), (b"x-openwebui-user-id", b"anna")]
    assert NAMING.fairness_key(anna, CHAT) == "chat/anna"
    assert NAMING.fairness_key([], CHAT) == "chat"
    assert NAMING.fairness_key([(b"x-openwebui-user-id", b"")], CHAT) == "chat"
    assert NAMING.fairness_key(anna, Caller("team", "Team", Priority.NORMAL)) == "team"
    # The first header of the list is preferred, and a long name is cut.
    both = [(b"x-user-id", b"second"), (b"x-openwebui-user-id", b"first")]
    for headers in (both, both[::-1]):
        assert NAMING.fairness_key(headers, CHAT) == "chat/first"
    long = NAMING.fairness_key([(b"x-user-id", b"\xff" * 5000)], CHAT)
    assert len(long) == len("chat/") + MOST_IDENTITY_BYTES
    # Sessions of one name differ by it.
    headers = [(b"x-openwebui-chat-id", b"1")]
    assert NAMING.session_key(headers, "team") != NAMING.session_key(headers, "chat/anna")
    assert NAMING.session_key([], "team") is None


def test_an_anonymous_client_is_its_ipv4_address_or_its_ipv6_64() -> None:
    for address, network in (
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
        ("not:an:address", "not:an:address"),
    ):
        found = caller([], KeyRing(), allow_anonymous=True, address=address)
        assert found.id == f"anonymous:{network}"


def test_only_loopback_hosts_are_reached_from_this_machine_alone() -> None:
    loopback = (
        "127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1",
    )  # fmt: skip
    assert [host for host in loopback if not is_loopback(host)] == []
    others = (
        "0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org",
        "127.0.0.1.example.org",
    )  # fmt: skip
    assert [host for host in others if is_loopback(host)] == []


PROXIED = [
    "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto",
    "x-forwarded-port", "x-forwarded-server", "x-forwarded-prefix", "x-forwarded", "x-real-ip",
    "true-client-ip", "client-ip", "x-client-ip",
    "x-cluster-client-ip", "cf-connecting-ip", "cf-ray", "cf-access-jwt-assertion", "cdn-loop",
    "fastly-client-ip", "fly-client-ip", "x-envoy-external-address", "x-azure-clientip",
    "x-original-forwarded-for", "x-amzn-trace-id", "tailscale-user-login", "x-scheme",
]  # fmt: skip
DIRECT = [
    "accept", "authorization", "content-type", "forwarded-by-me", "host", "origin", "referer",
    "traceparent", "user-agent", "via-ferrata", "x-api-key", "x-priority", "x-request-id",
    "x-openwebui-user-id", "x-stainless-timeout", "x-real",
]  # fmt: skip


@each_case("name", PROXIED)
@each_case("value", [b"", b"127.0.0.1", b"\xff" * 9000])
def test_a_request_with_a_proxys_header_is_never_local(name: str, value: bytes) -> None:
    headers = [(b"host", b"gateway"), (name.encode(), value)]
    assert is_proxied(headers)
    assert not is_local(headers, loopback_listener=True, trusted_proxies=())


@each_case("name", DIRECT)
def test_a_request_with_usual_client_headers_is_local(name: str) -> None:
    assert is_local([(name.encode(), b"1")], loopback_listener=True, trusted_proxies=())
