"""API keys: a public id for the look-up, and a secret of which only the SHA-256 is stored.

A key reads `lg_<id>_<secret>`. The secret is long and random, so a plain SHA-256 is enough: a slow
hash protects only secrets that can be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gateway import errors
from gateway.config.cache_privacy import CacheSpec
from gateway.request import Caller, Headers, Priority

KEY_PREFIX = "lg"

MOST_KEY_CHARACTERS = 512
"""A longer text is not a key; this limits the work of hashing it."""

MOST_KEYS = 4
"""Most different keys in one request: each costs a hash, and there are three headers for them."""

_ID_ALPHABET = string.ascii_lowercase + string.digits

_SECRET_ALPHABET = string.ascii_letters + string.digits

_SECRET_CHARACTERS = 43
"""62 ** 43 is just above 2 ** 256."""


class KeyDefinition(Protocol):
    """A key in the settings."""

    @property
    def id(self) -> str:
        """The public part."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret, 64 hexadecimal digits."""

    @property
    def name(self) -> str | None:
        """The holder's name."""

    @property
    def class_(self) -> str | None:
        """The class of requests that ask for none; None: normal."""

    @property
    def max_class(self) -> str | None:
        """The highest class of its requests; None: `class_`."""

    @property
    def models(self) -> Iterable[str] | None:
        """Public names of the models that it may use; None: all."""

    @property
    def trust_user_headers(self) -> bool:
        """Whether its holder may name end users by a header."""

    @property
    def cache(self) -> CacheSpec | None:
        """What it says of prompt caches; None: nothing."""


class ApiKey(NamedTuple):
    """A new key; `text` is shown once and stored nowhere."""

    text: str
    id: str
    sha256: str


class KeyRing:
    """The keys of one version of the settings. It never changes: a reload makes a new one."""

    __slots__ = ("_by_id", "_unknown")

    def __init__(self, specs: Iterable[KeyDefinition] = ()) -> None:
        self._by_id = {spec.id: (bytes.fromhex(spec.sha256), _caller(spec)) for spec in specs}
        # Compared with unknown ids, so that they take the same time as known ones.
        self._unknown = (secrets.token_bytes(32), None)

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, presented: str) -> Caller | None:
        """The holder of the presented key, or None; takes one hash in any case."""
        key_id, secret = _split(presented)
        digest, caller = self._by_id.get(key_id, self._unknown)
        valid = hmac.compare_digest(_digest(secret), digest)
        return caller if valid else None


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


def presented_keys(headers: Headers) -> list[str]:
    """The different keys of a request; some clients send a dummy in one header, the key in another.

    The headers are `Authorization: Bearer`, `x-api-key` and `api-key`. An empty value, which
    clients without a key often send, is not a key; other schemes of `Authorization` are ignored.
    Returns at most `MOST_KEYS` + 1.
    """
    found: list[str] = []
    for name, value in headers:
        if name not in _KEY_HEADERS:
            continue
        key = (_bearer(value) if name == b"authorization" else value.strip()).decode("latin-1")
        if key and key not in found:
            found.append(key)
            if len(found) > MOST_KEYS:
                break
    return found


def caller_from_keys(headers: Headers, key_ring: KeyRing) -> Caller | None:
    """The holder of the request's key; None if it has no key. One valid key is enough.

    Raises: errors.GatewayError (401) if no key is valid, if two belong to different callers, or if
    there are more than `MOST_KEYS`.
    """
    keys = presented_keys(headers)
    if not keys:
        return None
    if len(keys) > MOST_KEYS:
        raise errors.too_many_keys(MOST_KEYS)
    # All are looked up, so that the time does not reveal which one is valid.
    holders = {caller.id: caller for key in keys if (caller := key_ring.find(key)) is not None}
    if not holders:
        raise errors.invalid_api_key()
    if len(holders) > 1:
        raise errors.keys_of_different_callers()
    return next(iter(holders.values()))


_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _split(text: str) -> tuple[str, str]:
    if len(text) > MOST_KEY_CHARACTERS:
        return "", ""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == KEY_PREFIX else ("", "")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _caller(spec: KeyDefinition) -> Caller:
    default = _parse_class(spec, spec.class_ or Priority.NORMAL.label)
    highest = _parse_class(spec, spec.max_class) if spec.max_class else default
    models = None if spec.models is None else frozenset(spec.models)
    return Caller(
        id=spec.id,
        name=spec.name or spec.id,
        max_priority=highest,
        default_priority=default,
        models=models,
        trust_user_headers=spec.trust_user_headers,
        cache=spec.cache,
    )


def _parse_class(spec: KeyDefinition, name: str) -> Priority:
    priority = Priority.parse(name)
    if priority is None:
        raise ValueError(f"key '{spec.id}': there is no class '{name}'")
    return priority
