"""Keys of both listeners: a public id for the look-up, and a secret of which only a hash is stored.

A key reads `lg_<id>_<secret>`. The secret is long and random, so a plain SHA-256 is enough: a slow
hash protects only secrets that can be guessed. The admin listener's `admin.key_file` may hold any
text; its role is `admin`.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import hmac
import secrets
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import structlog

from gateway import errors
from gateway.terms import Caller, Headers, Priority

if TYPE_CHECKING:
    from gateway.config.keys import KeySpec
    from gateway.config.listeners import AdminKeySpec

KEY_PREFIX = "lg"
MOST_KEY_CHARACTERS = 512  # a longer text is not a key; this limits the work of hashing it
# Most different keys in one request: each costs a hash, and there are three headers for them.
MOST_KEYS = 4
_ID_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_ALPHABET = string.ascii_letters + string.digits
_SECRET_CHARACTERS = 43  # 62 ** 43 is just above 2 ** 256


class ApiKey(NamedTuple):
    """A new key; `text` is shown once and stored nowhere."""

    text: str
    id: str
    sha256: str


KEYS_LOST = (
    "the last API key is gone, from settings and store: every request is answered with 401; add a "
    "key ('llama-gateway keys create' makes one), or restart to serve without any"
)

# Compared where there is no digest, so that every comparison takes the same time.
_NO_DIGEST = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key as the ring looks it up; `held_key` makes it."""

    id: str
    caller: Caller
    digest: bytes = field(repr=False)
    expires_at: float | None = None  # Unix time; None: never
    previous: bytes = field(default=_NO_DIGEST, repr=False)
    """The digest of the secret before the last rotation, while that one still works."""
    previous_until: float | None = None
    """Unix time at which the previous secret ends; None: there is none."""


def held_key(
    spec: KeySpec, previous_sha256: str | None = None, previous_until: float | None = None
) -> HeldKey:
    """The key as the ring looks it up. Takes microseconds: make thousands in a thread."""
    kept = previous_sha256 is not None and previous_until is not None
    default = Priority[(spec.class_ or "normal").upper()]
    caller = Caller(
        id=spec.id,
        name=spec.name or spec.id,
        max_priority=Priority[spec.max_class.upper()] if spec.max_class else default,
        default_priority=default,
        models=None if spec.models is None else frozenset(spec.models),
        trust_user_headers=spec.trust_user_headers,
        group=spec.group,
        limits=spec.limits,
        user_limits=spec.user_limits,
        cache=spec.cache,
    )
    return HeldKey(
        spec.id,
        caller,
        bytes.fromhex(spec.sha256),
        None if spec.expires is None else spec.expires.timestamp(),
        bytes.fromhex(previous_sha256) if kept and previous_sha256 else _NO_DIGEST,
        previous_until if kept else None,
    )


@dataclass(frozen=True, slots=True)
class AnonymousAccess:
    """Whether callers without a key are admitted, over all reloads of a process.

    Losing the keys must not admit them: the keys may be gone by mistake.
    """

    had_keys: bool = False  # there have been keys at some time, a predecessor's included
    allowed: bool = False
    """`allow_anonymous` admits callers without a key, and did when there last were keys."""
    locked: bool = False
    """There were keys and there are none: nobody is admitted until there are, or a restart."""

    def with_settings(self, *, keys: int, allow_anonymous: bool) -> AnonymousAccess:
        """The access under the next settings."""
        keyed = self.had_keys or keys > 0
        anonymous = allow_anonymous and (keys > 0 or not keyed or self.allowed)
        return AnonymousAccess(keyed, anonymous, locked=keyed and not keys and not anonymous)


INITIAL_ACCESS = AnonymousAccess()  # the access before the first settings


class KeyRing:
    """The keys of the settings and of the store together, for the life of the process.

    Where both have a key of one id, that of the settings counts. `version` changes with every
    change, expiry and revocation: what was concluded under another version must be asked again.
    """

    def __init__(
        self,
        specs: Collection[KeySpec] = (),
        *,
        access: AnonymousAccess = INITIAL_ACCESS,
        is_complete: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = 0
        self.access = self._last_known_access = access
        """Whether callers without a key are admitted; before the first settings, a predecessor's.
        While the store's keys are unknown it is provisional, and the last known one is kept."""
        self.is_complete = is_complete
        """Whether the store's keys are known; until then nobody can tell a wrong key from one that
        the store has, nor whether a key is needed."""
        self._clock = clock
        self._allow_anonymous = False
        self._settings: Mapping[str, HeldKey] = {}
        self._stored: Mapping[str, HeldKey] = {}
        self._revoked_names: Mapping[str, str] = {}
        self._by_id: dict[str, HeldKey] = {}  # those that have not expired
        self._expired: dict[str, HeldKey] = {}  # the others
        self._deadlines: list[tuple[float, str]] = []
        """A heap: when a key or its previous secret ends, and its id."""
        nobody = Caller("", "", Priority.BATCH)
        # Compared with unknown ids, so that they take the same time as known ones.
        self._unknown = HeldKey("", nobody, secrets.token_bytes(32))
        self._count = 0
        if specs:
            self.configure(specs)

    def __len__(self) -> int:
        """Keys that are not revoked. Expired ones count: without them nobody is admitted either."""
        return self._count

    @property
    def lost(self) -> str | None:
        """Why everybody is refused, with the remedy: the keys are gone; None: they are not."""
        return KEYS_LOST if self.is_complete and self.access.locked else None

    def configure(self, specs: Iterable[KeySpec], *, allow_anonymous: bool = False) -> None:
        """Take the keys of these settings in place of those before."""
        self._settings = {spec.id: held_key(spec) for spec in specs}
        self._allow_anonymous = allow_anonymous
        self._change()

    def replace_stored(
        self, keys: Iterable[HeldKey], revoked_names: Mapping[str, str] | None = None
    ) -> None:
        """Take the keys of the store, those that are not revoked, in place of those before.

        `revoked_names`: the names of those that are, by their ids.
        """
        self._revoked_names = revoked_names or {}
        self._stored = {key.id: key for key in keys}
        self.is_complete = True
        self._change()

    def held(self) -> Mapping[str, HeldKey]:
        """All keys by their ids, expired ones too."""
        return {**self._stored, **self._settings}

    def follow(
        self, keys: Iterable[HeldKey], *, access: AnonymousAccess, is_complete: bool
    ) -> None:
        """Hold what the ring of another process holds, and admit whom that one admits."""
        self._stored = {key.id: key for key in keys}
        self.access, self.is_complete = access, is_complete
        self._take_in()
        self.version += 1

    def callers(self) -> Iterator[Caller]:
        """The holders of all keys that have not expired."""
        return (key.caller for key in self._by_id.values())

    def expire(self) -> None:
        """Drop the keys and the previous secrets whose time is over. Call it twice a second."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key_id = heapq.heappop(self._deadlines)
            if (key := self._by_id.get(key_id)) is None:
                continue
            self.version += 1
            if key.expires_at is not None and key.expires_at <= now:
                self._expired[key_id] = self._by_id.pop(key_id)
            else:
                self._by_id[key_id] = replace(key, previous=_NO_DIGEST, previous_until=None)

    def find(self, presented: str) -> Caller | None:
        """The holder of the presented key, or None; takes one hash in any case."""
        return self._find(presented, self._by_id)

    def has_expired(self, presented: str) -> bool:
        """Whether the presented key was valid once; takes one hash in any case."""
        return self._find(presented, self._expired) is not None

    def _find(self, presented: str, by_id: Mapping[str, HeldKey]) -> Caller | None:
        key_id, secret = _split(presented)
        known = by_id.get(key_id, self._unknown)
        digest = _digest(secret)
        # Both are compared in any case, so that the time does not tell which one is right.
        valid = hmac.compare_digest(digest, known.digest) | hmac.compare_digest(
            digest, known.previous
        )
        return known.caller if valid and known is not self._unknown else None

    def caller(self, key_id: str) -> Caller | None:
        """The holder of the key with this id; None: it is unknown, revoked or expired."""
        known = self._by_id.get(key_id)
        return None if known is None else known.caller

    def name_of(self, key_id: str) -> str | None:
        """The name of the key with this id, also of an expired or revoked one; None: unknown."""
        known = self._by_id.get(key_id) or self._expired.get(key_id)
        return self._revoked_names.get(key_id) if known is None else known.caller.name

    def ids_of(self, word: str) -> list[str]:
        """The ids of the keys that have this name, or the word itself as an id."""
        if self.name_of(word) is not None:
            return [word]
        held = (*self._by_id.items(), *self._expired.items())
        names = [*((id_, key.caller.name) for id_, key in held), *self._revoked_names.items()]
        return [id_ for id_, name in names if name == word] or [word]

    def _change(self) -> None:
        self._take_in()
        self.version += 1
        self.access = self._last_known_access.with_settings(
            keys=len(self), allow_anonymous=self._allow_anonymous
        )
        # With any key it is known, whatever the store has besides.
        if self.is_complete or len(self):
            self._last_known_access = self.access

    def _take_in(self) -> None:
        """Look up both kinds of keys by their ids from now on."""
        self._by_id, self._expired = {**self._stored, **self._settings}, {}
        self._count = len(self._by_id)
        self._deadlines = [
            (deadline, key.id)
            for key in self._by_id.values()
            for deadline in (key.expires_at, key.previous_until)
            if deadline is not None
        ]
        heapq.heapify(self._deadlines)
        self.expire()


def new_key(id: str | None = None) -> ApiKey:  # noqa: A002 - the word the settings use
    """A new random key; `id` must not contain an underscore.

    Raises: ValueError.
    """
    if id is None:
        # A letter first: YAML reads 1234e567 as a number.
        first = secrets.choice(string.ascii_lowercase)
        id = first + "".join(secrets.choice(_ID_ALPHABET) for _ in range(7))  # noqa: A001
    if not id or "_" in id:
        raise ValueError("a key's id is not empty and has no underscore")
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(_SECRET_CHARACTERS))
    return ApiKey(f"{KEY_PREFIX}_{id}_{secret}", id, _digest(secret).hex())


def hash_key(text: str) -> ApiKey:
    """The parts of an existing key.

    Raises: ValueError if it does not read `lg_<id>_<secret>`.
    """
    key_id, secret = _split(text)
    if not key_id or not secret:
        raise ValueError(f"a key reads {KEY_PREFIX}_<id>_<secret>")
    return ApiKey(text, key_id, _digest(secret).hex())


def without_secret(text: str) -> str:
    """The text as it may be shown and logged: some give a whole key where its name is asked for."""
    key_id, secret = _split(text)
    return f"{KEY_PREFIX}_{key_id}_…" if secret else text


def presented_keys(headers: Headers) -> list[str]:
    """The different keys of a request; some clients send a dummy in one header, the key in another.

    The headers are `Authorization: Bearer`, `x-api-key` and `api-key`. An empty value, which
    clients without a key often send, is not a key; other schemes of `Authorization` are ignored.
    Returns at most `MOST_KEYS` + 1.
    """
    found: list[str] = []
    for name, given in headers:
        if name not in _KEY_HEADERS:
            continue
        value = given.strip()
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            value = value.strip() if scheme.lower() == b"bearer" else b""
        key = value.decode("latin-1")
        if key and key not in found:
            found.append(key)
            if len(found) > MOST_KEYS:
                break
    return found


def caller_from_keys(headers: Headers, key_ring: KeyRing) -> Caller | None:
    """The holder of the request's key; None if it has no key. One valid key is enough.

    Raises: errors.GatewayError (401) if no key is valid, if two belong to different callers, or if
    there are more than `MOST_KEYS`; 503 if the store's keys are not known yet.
    """
    keys = presented_keys(headers)
    if not keys:
        return None
    if len(keys) > MOST_KEYS:
        raise errors.too_many_keys(MOST_KEYS)
    # All are looked up, so that the time does not reveal which one is valid.
    holders = {caller.id: caller for key in keys if (caller := key_ring.find(key)) is not None}
    if not holders:
        if any(key_ring.has_expired(key) for key in keys):
            raise errors.expired_api_key()
        raise errors.invalid_api_key() if key_ring.is_complete else errors.keys_unknown()
    if len(holders) > 1:
        raise errors.keys_of_different_callers()
    return next(iter(holders.values()))


_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})


def _split(text: str) -> tuple[str, str]:
    if len(text) > MOST_KEY_CHARACTERS:
        return "", ""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == KEY_PREFIX else ("", "")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


# Keys of the admin listener.


log = structlog.get_logger()
MOST_ADMIN_KEY_CHARACTERS = 4096  # a longer text is not a key; this limits the work of hashing it


class AdminRole(enum.IntEnum):
    """What a holder of an admin key may do; each role includes the lower ones."""

    VIEWER = 1  # status, nodes, metrics, dashboard
    OPERATOR = 2  # also requests, usage and chat; drain, resume, probe, cancel and reload
    ADMIN = 3  # also keys, configuration and the audit log

    @property
    def label(self) -> str:
        """Its name in the settings."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class AdminIdentity:
    """Who uses the admin listener, for roles and for the audit log."""

    name: str
    role: AdminRole


# A caller of a loopback listener that has no admin key.
LOCAL_ADMIN = AdminIdentity("local", AdminRole.ADMIN)
KEY_FILE_NAME = "key_file"  # the name of who holds the key of `admin.key_file`


# What an operator is told where `AdminKeys.lost`.
ADMIN_KEYS_LOST = (
    "the settings have lost their last admin key: the admin listener answers every request with "
    "401; add a key to admin.keys, or restart to serve it without any"
)


class AdminKeys:
    """The admin keys in force; a reload replaces them.

    Once there has been a key, one is always needed: if a reload takes the last one away, by mistake
    perhaps, nobody is admitted until there is one again, or a restart.
    """

    def __init__(
        self,
        specs: Iterable[AdminKeySpec] = (),
        file_key: str | None = None,
        *,
        had_keys: bool = False,
    ) -> None:
        """`had_keys`: a predecessor of this process had some."""
        self._by_id: dict[str, tuple[bytes, AdminIdentity]] = {}
        self._file_digest: bytes | None = None
        self.needed = had_keys  # whether callers need a key
        # Compared where there is no such key, so that this takes the same time.
        self._unknown = secrets.token_bytes(32)
        self.configure(specs, file_key)

    def configure(self, specs: Iterable[AdminKeySpec], file_key: str | None) -> None:
        """Put these keys in force in place of all others."""
        self._by_id = {
            spec.id: (
                bytes.fromhex(spec.sha256),
                AdminIdentity(spec.id, AdminRole[spec.role.upper()]),
            )
            for spec in specs
        }
        self._file_digest = None if file_key is None else _text_digest(file_key)
        self.needed = self.needed or bool(self._by_id) or file_key is not None
        if self.lost:
            log.warning("locked", why=ADMIN_KEYS_LOST)

    @property
    def lost(self) -> bool:
        """Whether there were keys and there are none, so that nobody is admitted."""
        return self.needed and not self._by_id and self._file_digest is None

    def find(self, presented: str) -> AdminIdentity | None:
        """The holder of the presented key, or None; takes the same time in any case."""
        if len(presented) > MOST_ADMIN_KEY_CHARACTERS:
            presented = ""
        try:
            key = hash_key(presented)
            key_id, digest = key.id, bytes.fromhex(key.sha256)
        except ValueError:
            key_id, digest = "", _text_digest(presented)
        wanted, identity = self._by_id.get(key_id, (self._unknown, LOCAL_ADMIN))
        is_known = hmac.compare_digest(digest, wanted)
        is_file_key = hmac.compare_digest(
            _text_digest(presented), self._file_digest or self._unknown
        )
        if is_known:
            return identity
        return AdminIdentity(KEY_FILE_NAME, AdminRole.ADMIN) if is_file_key else None


def _text_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
