"""Keys of the admin listener, and the roles that they give.

They have the form of API keys, `lg_<id>_<secret>`, and are stored likewise, as the SHA-256 of the
secret. The key of `admin.key_file` may be any text; its role is `admin`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import structlog

from gateway.access.keys import hash_key

log = structlog.get_logger()

MOST_ADMIN_KEY_CHARACTERS = 4096
"""A longer text is not a key; this limits the work of hashing it."""


class AdminRole(enum.IntEnum):
    """What a holder of an admin key may do; each role includes the lower ones."""

    VIEWER = 1
    """Status, nodes, metrics, dashboard."""
    OPERATOR = 2
    """Also requests, usage and chat; drain, resume, probe, cancel and reload."""
    ADMIN = 3
    """Also keys, configuration and the audit log."""

    @property
    def label(self) -> str:
        """Its name in the settings."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class AdminIdentity:
    """Who uses the admin listener, for roles and for the audit log."""

    name: str
    role: AdminRole


LOCAL_ADMIN = AdminIdentity("local", AdminRole.ADMIN)
"""A caller of a loopback listener that has no admin key."""

KEY_FILE_NAME = "key_file"
"""The name of who holds the key of `admin.key_file`."""


ADMIN_KEYS_LOST = (
    "the settings have lost their last admin key: the admin listener answers every request with "
    "401; add a key to admin.keys, or restart to serve it without any"
)
"""What an operator is told where `AdminKeys.lost`."""


class AdminKeyDefinition(Protocol):
    """An admin key in the settings."""

    @property
    def id(self) -> str:
        """The public part."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret, 64 hexadecimal digits."""

    @property
    def role(self) -> str:
        """The name of its role."""


class AdminKeys:
    """The admin keys in force; a reload replaces them.

    Once there has been a key, one is always needed: if a reload takes the last one away, by mistake
    perhaps, nobody is admitted until there is one again, or a restart.
    """

    def __init__(
        self,
        specs: Iterable[AdminKeyDefinition] = (),
        file_key: str | None = None,
        *,
        had_keys: bool = False,
    ) -> None:
        """`had_keys`: a predecessor of this process had some."""
        self._by_id: dict[str, tuple[bytes, AdminIdentity]] = {}
        self._file_digest: bytes | None = None
        self._needed = had_keys
        # Compared where there is no such key, so that this takes the same time.
        self._unknown = secrets.token_bytes(32)
        self.configure(specs, file_key)

    def configure(self, specs: Iterable[AdminKeyDefinition], file_key: str | None) -> None:
        """Put these keys in force in place of all others."""
        self._by_id = {
            spec.id: (
                bytes.fromhex(spec.sha256),
                AdminIdentity(spec.id, AdminRole[spec.role.upper()]),
            )
            for spec in specs
        }
        self._file_digest = None if file_key is None else _digest(file_key)
        self._needed = self._needed or bool(self._by_id) or file_key is not None
        if self.lost:
            log.warning("locked", why=ADMIN_KEYS_LOST)

    @property
    def needed(self) -> bool:
        """Whether callers need a key."""
        return self._needed

    @property
    def lost(self) -> bool:
        """Whether there were keys and there are none, so that nobody is admitted."""
        return self._needed and not self._by_id and self._file_digest is None

    def find(self, presented: str) -> AdminIdentity | None:
        """The holder of the presented key, or None; takes the same time in any case."""
        if len(presented) > MOST_ADMIN_KEY_CHARACTERS:
            presented = ""
        try:
            key = hash_key(presented)
            key_id, digest = key.id, bytes.fromhex(key.sha256)
        except ValueError:
            key_id, digest = "", _digest(presented)
        wanted, identity = self._by_id.get(key_id, (self._unknown, LOCAL_ADMIN))
        is_known = hmac.compare_digest(digest, wanted)
        is_file_key = hmac.compare_digest(_digest(presented), self._file_digest or self._unknown)
        if is_known:
            return identity
        return AdminIdentity(KEY_FILE_NAME, AdminRole.ADMIN) if is_file_key else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
