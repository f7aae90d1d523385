"""Earlier texts of the two configuration files: they are kept, compared, and put back.

A text is kept when a gateway takes it into force and it differs from the last one that was kept:
whole, with its secrets, in a file that only its owner can read. The files lie in a folder beside
the configuration file, or in the state folder where that can't be written. Commands and a running
gateway read the same folders, and need nothing of each other.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

from gateway.config.errors import ConfigError
from gateway.config.yaml_file import read_text
from gateway.system import replace_file

FileKind = Literal["gateway", "nodes"]  # the settings, and the inventory
MOST_VERSIONS = 50  # of one file
# Bytes of all versions of one file; the newest one is kept in any case.
MOST_BYTES = 16 << 20
MOST_FOUND = 1000  # files of a folder that are looked at: others may have put more there
# Lines between the first and the last that differ, beyond which they are not compared one by one.
MOST_COMPARED = 4000
MOST_SHOWN = 5000  # lines of a difference
LONGEST_LINE = 2000  # characters of a line of a difference
CONTEXT = 3  # lines around what differs
_FILE = "%Y%m%dT%H%M%SZ.yaml"
_ANSIBLE = re.compile(r"\A(.*\n){0,4}#.*(managed by ansible|ansible managed)", re.IGNORECASE)


class VersionError(Exception):
    """No version has this name; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Version:
    """One text that was in force."""

    name: str  # such as gateway-20261130T081500Z
    at: datetime  # when it was taken into force
    path: Path
    size: int  # bytes

    def read(self) -> str:
        """The text. Raises: ConfigError."""
        return read_text(self.path)


@dataclass(frozen=True, slots=True)
class FileHistory:
    """The versions of one file. They wait for the disk: call them in a thread."""

    kind: FileKind
    file: Path
    folders: tuple[Path, ...]
    """Where versions may be: beside the file, then in state folders."""

    @classmethod
    def of(cls, kind: FileKind, file: Path, state_folders: Iterable[Path]) -> Self:
        """The history of this file, as it is named: a link has one, wherever it leads."""
        file = Path(os.path.abspath(file))  # noqa: PTH100 - links in it are not followed
        digest = sha256(str(file).encode()).hexdigest()[:12]
        elsewhere = (one / "history" / f"{file.name}-{digest}" for one in state_folders)
        return cls(kind, file, (file.with_name(f".{file.name}.history"), *elsewhere))

    def versions(self) -> list[Version]:
        """All versions that can be read, the oldest first."""
        found = []
        for folder in self.folders:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry, _ in zip(entries, range(MOST_FOUND), strict=False):
                    with contextlib.suppress(ValueError):  # Another file.
                        at = datetime.strptime(entry.name, _FILE).replace(tzinfo=UTC)
                        if os.access(entry.path, os.R_OK):
                            found.append(self._version(at, Path(entry), entry.stat().st_size))
        return sorted(found, key=lambda one: one.at)

    def _version(self, at: datetime, path: Path, size: int) -> Version:
        return Version(f"{self.kind}-{path.stem}", at, path, size)

    def keep(self, text: str, now: float) -> Version | None:
        """Keep this text, unless it is the newest version's; returns what was kept.

        Raises: OSError, if no folder can be written.
        """
        known = self.versions()
        at = datetime.fromtimestamp(int(now), UTC)
        if known:
            with contextlib.suppress(ConfigError):
                if known[-1].read() == text:
                    return None
            # They are in order, though the clock was set back.
            at = max(at, known[-1].at + timedelta(seconds=1))
        folder, content = self._folder(), text.encode()
        path = folder / at.strftime(_FILE)
        replace_file(path, content, mode=0o600)
        if os.geteuid() == 0:  # The gateway whose folder it is must be able to read it.
            os.chown(path, folder.stat().st_uid, folder.stat().st_gid)
        kept = self._version(at, path, len(content))
        _drop_oldest([*known, kept])
        return kept

    def on_disk(self) -> str | None:
        """The file's text; None: there is no file, or none that is a text."""
        with contextlib.suppress(ConfigError):
            return read_text(self.file)
        return None

    def managed(self) -> str | None:
        """Why it is not put back, with the remedy: Ansible writes the file. None: people do."""
        if not _ANSIBLE.match(self.on_disk() or ""):
            return None
        return (
            "Ansible writes it, as its first lines say: change the variables of the playbook, and "
            "run it"
        )

    def put_back(self, text: str, now: float) -> Version | None:
        """Make this the file's text, at once and for every reader; a link stays one.

        Owner, mode and attributes of the file stay as they are. The text that was there is kept
        first, and returned, if it was not in force. Raises: OSError.
        """
        before = self.on_disk()
        kept = None if before is None else self.keep(before, now)
        target = Path(os.path.realpath(self.file))
        known = self.versions()
        # Of a file that is gone, the versions know who could read it.
        like = target if target.exists() else known[-1].path if known else None
        replace_file(target, text.encode(), mode=0o600, like=like)
        return kept

    def describe(self, in_force: str | None = None) -> dict[str, Any]:
        """The file and its versions, the newest first, as JSON values without any text.

        `in_force`: the text that a gateway has in force; None: unknown.
        """
        on_disk, rows = self.on_disk(), list[dict[str, Any]]()
        lines, folder = Counter[str](), None
        for one in self.versions():
            with contextlib.suppress(ConfigError):
                text, folder, before = one.read(), str(one.path.parent), lines
                lines = Counter(text.split("\n"))
                rows.append(
                    {
                        "name": one.name,
                        "at": one.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
                        "bytes": one.size,
                        "lines": lines.total(),
                        "added": (lines - before).total(),
                        "removed": (before - lines).total(),
                        "in_force": None if in_force is None else text == in_force,
                        "on_disk": text == on_disk,
                    }
                )
        return {
            "kind": self.kind,
            "file": str(self.file),
            "folder": folder,
            "managed": self.managed(),
            "on_disk": on_disk is not None,
            "versions": rows[::-1],
        }

    def _folder(self) -> Path:
        """The folder for new versions: one that is there already, else the first that can be made.

        Raises: OSError.
        """
        for folder in self.folders:
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(0o700)
                return folder
        raise PermissionError(f"{' and '.join(map(str, self.folders))} can't be made")


def _drop_oldest(versions: Sequence[Version]) -> None:
    """Remove the oldest versions beyond the bounds, but for the newest one."""
    left, size = len(versions), sum(one.size for one in versions)
    for one in versions[:-1]:
        if left <= MOST_VERSIONS and size <= MOST_BYTES:
            break
        with contextlib.suppress(OSError):
            one.path.unlink()
        left, size = left - 1, size - one.size


def find_version(histories: Iterable[FileHistory], name: str) -> tuple[FileHistory, Version]:
    """The version of this name, and its history; `gateway` or `nodes` is the newest one.

    Raises: VersionError.
    """
    latest = []
    for history in histories:
        known = history.versions()
        for one in known[-1:] if name == history.kind else known:
            if name in {one.name, history.kind}:
                return history, one
        latest += [one.name for one in known[:-4:-1]]
    raise VersionError(
        f"there is no version {name[:64]!r}; the latest are {', '.join(latest) or 'none'}"
    )


def difference(before: str, after: str, *, with_secrets: bool = False) -> dict[str, Any]:
    """The lines that differ, in order. What may be secret is masked, unless `with_secrets`.

    `lines` are as `diff -u` has them, of at most so many (`cut`: there are more); `added` and
    `removed` count them all. Lines are compared before they are masked: a secret that has changed
    shows as two masked lines.
    """
    old, new = before.split("\n"), after.split("\n")
    same = _common(old, new)
    same_end = _common(old[same:][::-1], new[same:][::-1])
    first, end = max(0, same - CONTEXT), max(0, same_end - CONTEXT)
    old, new = old[first : len(old) - end], new[first : len(new) - end]
    groups: Iterable[list[tuple[str, int, int, int, int]]]
    groups = difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(CONTEXT)
    if max(len(old), len(new)) > MOST_COMPARED:
        groups = [[("replace", 0, len(old), 0, len(new))]]
    lines: list[str] = []
    for group in groups:
        (_, a, _, b, _), (_, _, a_end, _, b_end) = group[0], group[-1]
        lines.append(f"@@ -{a + first + 1},{a_end - a} +{b + first + 1},{b_end - b} @@")
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in old[a1:a2]]
            else:
                lines += [f"-{line}" for line in old[a1:a2]]
                lines += [f"+{line}" for line in new[b1:b2]]
    signs = Counter(line[0] for line in lines)
    shown = [one if len(one) < LONGEST_LINE else f"{one[:LONGEST_LINE]}…" for one in lines]
    shown = shown[:MOST_SHOWN]
    return {
        "lines": shown if with_secrets else [_masked(line) for line in shown],
        "added": signs["+"],
        "removed": signs["-"],
        "cut": len(lines) > MOST_SHOWN,
    }


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


# What may be secret in a line, whatever its form: the file need not be valid, and secrets stand in
# comments too. Rather too much is masked than too little.
_SECRETS = (
    # The password in a URL, and all behind its host: paths of webhooks are secret.
    (re.compile(r"(://[^/\s:@\"']*:)[^@\s]+@"), r"\1********@"),
    (re.compile(r"(https?://[^/\s\"'?#]+/)[^\s\"',}\]]+"), r"\1********"),
    # A value of a key that is named for one, and an argument of a command.
    (
        re.compile(
            r"(?i)((?:secret|password|passwd|passphrase|token|api_?key|authorization|sha256)"
            r"[\"']?\s*[:=,\s]\s*)(?!\$\{)[^\s,}\]][^,}\]]*"
        ),
        r"\1********",
    ),
    # Digests, keys and tokens by their looks.
    (
        re.compile(
            r"(?<![A-Za-z0-9+_=])(?=[A-Za-z+_=]*\d)(?=[0-9+_=]*[A-Za-z])[A-Za-z0-9+_=]{24,}"
        ),
        "********",
    ),
)


def _masked(line: str) -> str:
    for pattern, instead in _SECRETS:
        line = pattern.sub(instead, line)
    return line
