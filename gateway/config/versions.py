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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from gateway.config.errors import ConfigError
from gateway.config.yaml_file import read_text
from gateway.system import replace_file

FileKind = Literal["gateway", "nodes"]  # the settings, and the inventory
MOST_VERSIONS = 50  # of one file
# Bytes of all versions of one file; the newest one is kept in any case.
MOST_BYTES = 16 << 20
MOST_FOUND = 1000  # files of a folder that are looked at: others may have put more there
FOLDER_MODE, FILE_MODE = 0o700, 0o600
# Lines between the first and the last that differ, beyond which they are not compared one by one.
MOST_COMPARED = 4000
MOST_SHOWN = 5000  # lines of a difference
LONGEST_LINE = 2000  # characters of a line of a difference
CONTEXT = 3  # lines around what differs
_TIME = "%Y%m%dT%H%M%SZ"
_FILE = re.compile(r"\d{8}T\d{6}Z\.yaml")
_NAME = re.compile(r"(gateway|nodes)(-[0-9TZ]{0,16})?")


class VersionError(Exception):
    """No version has this name, or several may be meant; the message says which there are."""


class FileManaged(Exception):  # noqa: N818 - the file is not wrong
    """Something else writes the file; the message says what, with the remedy."""


@dataclass(frozen=True, slots=True)
class Version:
    """One text that was in force."""

    name: str  # such as gateway-20261130T081500Z
    at: float  # when it was taken into force, Unix time
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
    """Where versions may be: beside the file, then in the state folder."""

    @classmethod
    def of(cls, kind: FileKind, file: Path, state_folders: Iterable[Path]) -> Self:
        """The history of this file, as it is named: a link has one, wherever it leads."""
        file = Path(os.path.abspath(file))  # noqa: PTH100 - links in it are not followed
        digest = sha256(str(file).encode()).hexdigest()[:12]
        elsewhere = (one / "history" / f"{file.name}-{digest}" for one in state_folders)
        return cls(kind, file, (file.with_name(f".{file.name}.history"), *elsewhere))

    def versions(self) -> list[Version]:
        """All versions that can be read, the oldest first."""
        found = {}
        for folder in reversed(self.folders):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry, _ in zip(entries, range(MOST_FOUND), strict=False):
                    if _FILE.fullmatch(entry.name) and os.access(entry.path, os.R_OK):
                        word = entry.name.removesuffix(".yaml")
                        with contextlib.suppress(ValueError):
                            at = datetime.strptime(word, _TIME).replace(tzinfo=UTC).timestamp()
                            size = entry.stat().st_size
                            found[word] = Version(f"{self.kind}-{word}", at, Path(entry), size)
        return [found[word] for word in sorted(found)]

    def closed(self) -> list[Path]:
        """The folders that this user may not read, of those that may have versions."""
        found = []
        for folder in self.folders:
            try:
                os.scandir(folder).close()
            except PermissionError:
                found.append(folder)
            except OSError:
                continue
        return found

    def keep(self, text: str, now: float) -> Version | None:
        """Keep this text, unless it is the newest version's; returns what was kept.

        Raises: OSError, if no folder can be written.
        """
        known = self.versions()
        if known:
            with contextlib.suppress(ConfigError):
                if known[-1].read() == text:
                    return None
        folder = self._folder()
        # By names of whole seconds they are in order, though the clock was set back.
        at = max(int(now), int(known[-1].at) + 1) if known else int(now)
        word = datetime.fromtimestamp(at, UTC).strftime(_TIME)
        content, path = text.encode(), folder / f"{word}.yaml"
        replace_file(path, content, mode=FILE_MODE)
        if os.geteuid() == 0:  # The gateway whose folder it is must be able to read it.
            owner = folder.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
        kept = Version(f"{self.kind}-{word}", float(at), path, len(content))
        _drop_oldest([*known, kept])
        return kept

    def find(self, name: str) -> Version:
        """The version of this name, or of a beginning that no other one has.

        The kind alone is the newest version. Raises: VersionError.
        """
        known = self.versions()
        if not known:
            raise VersionError(f"no version of {self.file} was kept yet")
        found = known[-1:] if name == self.kind else [one for one in known if one.name == name]
        found = found or [one for one in known if one.name.startswith(name)]
        if len(found) != 1:
            fault = "several versions begin with" if found else "there is no version"
            last = ", ".join(one.name for one in known[:-4:-1])
            raise VersionError(f"{fault} {name[:64]!r}; the latest of {len(known)} are {last}")
        return found[0]

    def on_disk(self) -> str | None:
        """The file's text; None: there is no file, or none that is a text."""
        try:
            return read_text(self.file)
        except ConfigError:
            return None

    def managed_by(self) -> str | None:
        """What else writes the file, with the remedy; None: people do."""
        head = "\n".join((self.on_disk() or "").splitlines()[:_HEADER_LINES])
        if _ANSIBLE.search(head):
            return (
                "Ansible writes it, as its first lines say: change the variables of the "
                "playbook, and run it"
            )
        with contextlib.suppress(OSError):
            if "..data" in self.file.readlink().parts:
                return "it comes from a ConfigMap of Kubernetes: change that, and apply it"
        return None

    def put_back(self, text: str, now: float) -> Version | None:
        """Make this the file's text, at once and for every reader; a link stays one.

        Owner, mode and attributes of the file stay as they are. The text that was there is kept
        first, and returned, if it was not in force. Raises: FileManaged, OSError.
        """
        if managed := self.managed_by():
            raise FileManaged(f"{self.file} was not changed: {managed}")
        before = self.on_disk()
        kept = None if before is None else self.keep(before, now)
        target = Path(os.path.realpath(self.file))
        known = self.versions()
        # Of a file that is gone, the versions know who could read it.
        like = target if target.exists() else known[-1].path if known else None
        replace_file(target, text.encode(), mode=FILE_MODE, like=like)
        return kept

    def describe(self, in_force: str | None) -> dict[str, Any]:
        """The file and its versions, the newest first, as JSON values without any text.

        `in_force`: the text that a gateway has in force; None: unknown.
        """
        on_disk, rows = self.on_disk(), list[dict[str, Any]]()
        lines, folder = Counter[str](), None
        for one in self.versions():
            try:
                text = one.read()
            except ConfigError:
                continue
            folder = str(one.path.parent)
            before, lines = lines, Counter(text.split("\n"))
            rows.append(
                {
                    "name": one.name,
                    "at": datetime.fromtimestamp(one.at, UTC).isoformat().replace("+00:00", "Z"),
                    "bytes": one.size,
                    "lines": lines.total(),
                    "added": (lines - before).total(),
                    "removed": (before - lines).total(),
                    "in_force": None if in_force is None else text == in_force,
                    "on_disk": text == on_disk,
                }
            )
        rows.reverse()
        return {
            "kind": self.kind,
            "file": str(self.file),
            "folder": folder,
            "managed": self.managed_by(),
            "on_disk": on_disk is not None,
            "versions": rows,
        }

    def _folder(self) -> Path:
        """The folder for new versions: one that is there already, else the first that can be made.

        Raises: OSError.
        """
        for folder in self.folders:
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        error: OSError = FileNotFoundError(f"no folder for versions of {self.file}")
        for folder in self.folders:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(FOLDER_MODE)
            except OSError as failed:
                error = failed
            else:
                return folder
        raise error


def _drop_oldest(versions: Sequence[Version]) -> None:
    """Remove the oldest versions beyond the bounds, but for the newest one."""
    left, size = len(versions), sum(one.size for one in versions)
    for one in versions[:-1]:
        if left <= MOST_VERSIONS and size <= MOST_BYTES:
            break
        with contextlib.suppress(OSError):
            one.path.unlink()
        left, size = left - 1, size - one.size


_HEADER_LINES = 5
_ANSIBLE = re.compile(r"^\s*#.*(managed by ansible|ansible managed)", re.IGNORECASE | re.MULTILINE)


def find_version(histories: Iterable[FileHistory], name: str) -> tuple[FileHistory, Version]:
    """The version of this name, and the history that it is of. Raises: VersionError."""
    for history in histories:
        if _NAME.fullmatch(name) and name.startswith(history.kind):
            return history, history.find(name)
    raise VersionError(
        f"{name[:64]!r} is no version's name: those begin with gateway (the settings) or nodes "
        "(the inventory), such as gateway-20261130T081500Z; gateway alone is the newest"
    )


class TextDifference(NamedTuple):
    """What one text has and another has not."""

    lines: list[str]
    """As `diff -u` has them: `@@ … @@`, then lines that begin with a space, `-` or `+`."""
    added: int
    removed: int
    cut: bool  # whether there are more lines


def difference(before: str, after: str, *, with_secrets: bool = False) -> TextDifference:
    """The lines that differ, in order. What may be secret is masked, unless `with_secrets`.

    Lines are compared before they are masked: a secret that has changed shows as two masked lines.
    """
    old, new = before.split("\n"), after.split("\n")
    same = _common(old, new)
    first = max(0, same - CONTEXT)
    same_end = _common(old[same:][::-1], new[same:][::-1])
    end = max(0, same_end - CONTEXT)
    old, new = old[first : len(old) - end], new[first : len(new) - end]
    lines: list[str] = []
    counts: Counter[str] = Counter()
    show = _shortened if with_secrets else _masked
    for group in _groups(old, new):
        a, b = group[0][1] + first, group[0][3] + first
        sizes = group[-1][2] - group[0][1], group[-1][4] - group[0][3]
        lines.append(f"@@ -{a + 1},{sizes[0]} +{b + 1},{sizes[1]} @@")
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                lines += [f" {show(line)}" for line in old[a1:a2]]
                continue
            counts["-"] += a2 - a1
            counts["+"] += b2 - b1
            if len(lines) <= MOST_SHOWN:
                lines += [f"-{show(line)}" for line in old[a1 : min(a2, a1 + MOST_SHOWN)]]
                lines += [f"+{show(line)}" for line in new[b1 : min(b2, b1 + MOST_SHOWN)]]
    cut = len(lines) > MOST_SHOWN
    return TextDifference(lines[:MOST_SHOWN], counts["+"], counts["-"], cut)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines both begin with."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def _groups(old: list[str], new: list[str]) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """The changes with the lines around them, as difflib has them."""
    if old == new:
        return
    if max(len(old), len(new)) > MOST_COMPARED:
        yield [("replace", 0, len(old), 0, len(new))]
        return
    for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(CONTEXT):
        yield [*group]


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
    line = _shortened(line)
    for pattern, instead in _SECRETS:
        line = pattern.sub(instead, line)
    return line


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"
