"""Creates and renews the key that a host's servers require: `python3 - SPEC`.

The file holds one key, or two while a key is renewed: servers take either, the gateway sends the
first. SPEC is a JSON object: `path`, `group` (who may read it), `rotate` (begin to renew it),
`running` (the `fingerprint` that each running server was started with), `check` (change nothing).
Writes `changed` and `fingerprint`, never a key.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

BYTES = 32  # of chance in a key
LONGEST = 4096  # bytes of the file
MODE = 0o640


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Bring the file to the wanted keys."""
    path = Path(spec["path"])
    there = read(path)
    keys = wanted(there, rotate=spec["rotate"], running=spec["running"])
    changed = keys != there
    if not spec["check"]:
        group = group_number(spec["group"])
        if changed:
            write(path, keys, group)
        else:
            changed = close(path, group)
    return {"changed": changed, "fingerprint": fingerprint(keys)}


def wanted(keys: list[str], *, rotate: bool, running: list[str]) -> list[str]:
    """A new key is added first; the old one goes once every server that runs knows both."""
    if not keys or (rotate and len(keys) == 1):
        return [*keys, secrets.token_hex(BYTES)]
    if not rotate and len(keys) > 1 and set(running) <= {fingerprint(keys)}:
        return keys[-1:]
    return keys


def read(path: Path) -> list[str]:
    """The keys in the file."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)
    except FileNotFoundError:
        return []
    text = content.decode("latin-1")
    if len(content) > LONGEST or not (text.isascii() and text.replace("\n", "").isprintable()):
        sys.exit(f"{path} holds something else than keys. Remedy: a key a line, or take it away")
    return text.split()


def fingerprint(keys: list[str]) -> str:
    """A hash that distinguishes keys and reveals nothing of them."""
    return hashlib.sha256("\n".join(["llama-node", *keys]).encode()).hexdigest()[:16]


def group_number(name: str) -> int:
    """The id of the group that the servers run as."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        sys.exit(
            f"the group {name} is not there yet. Remedy: run the play without --tags, or with "
            "--tags install first"
        )


def write(path: Path, keys: list[str], group: int) -> None:
    """Replace the file at once; nobody else can read it at any time."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as file:
        file.write("".join(f"{key}\n" for key in keys))
        os.fchown(number, 0, group)
        os.fchmod(number, MODE)
        file.flush()
        os.fsync(number)
    draft.replace(path)


def close(path: Path, group: int) -> bool:
    """Let only root and the servers read the file. Returns whether that was a change."""
    seen = path.stat()
    if (seen.st_uid, seen.st_gid, seen.st_mode & 0o7777) == (0, group, MODE):
        return False
    os.chown(path, 0, group)
    path.chmod(MODE)
    return True


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
