"""Small JSON files that last over a restart: replaced as a whole, and read without trust."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

T = TypeVar("T")


def read(path: Path, kind: type[T], largest: int, lost: str) -> T | None:
    """What the file holds; None where there is none, or none that can be used.

    A file that can't be used is logged, and a damaged one is kept aside. `largest`: bytes that are
    read at most. `lost`: what it means, for the log.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s can't be read (%s): %s", path, error.strerror or error, lost)
        return None
    if len(raw) > largest:
        damage = f"more than {largest} bytes"
    else:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            damage = str(error)
    bad = path.with_name(path.name + ".bad")
    log.warning("%s is damaged (%s): kept as %s, %s", path, damage, bad.name, lost)
    try:
        path.replace(bad)
    except OSError:
        log.warning("%s could not be kept aside", path)
    return None


def write(path: Path, value: object) -> None:
    """Replace the file; a reader finds the old one or the new one. Raises: OSError."""
    # Two processes may do so at once, while one hands over to the other.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
