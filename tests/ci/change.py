"""Finds what a change touched: its files and their changed lines, without pure moves."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git's id of the empty tree."""
RECENT_HOURS = 4
"""Without an upstream, the commits of so many hours before HEAD are the change."""

Change = Mapping[str, AbstractSet[int]]
"""Files of the repository that a change touched, and their changed lines (numbers from 1)."""


def add_since(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where a change begins."""
    parser.add_argument(
        "--since",
        default=os.environ.get("GATE_SINCE") or None,
        help="revision before the change (default: $GATE_SINCE, else the upstream branch, "
        f"else the last commit {RECENT_HOURS} hours older than HEAD)",
    )


def change(since: str | None, root: Path = ROOT) -> dict[str, set[int]]:
    """Return the changed lines since a revision.

    Files that were only moved are left out.
    Without a revision: since this branch left its upstream; else the changes of HEAD and of the
    commits in the hours before it; without an older commit, everything.
    """
    base = since or _left_upstream(root) or _before_recent_hours(root) or EMPTY_TREE
    found: dict[str, set[int]] = {}
    before = name = ""
    in_head = False
    for line in git(root, "diff", "--unified=0", "--find-renames", base).splitlines():
        if line.startswith("diff --git "):
            in_head = True
        elif in_head and line.startswith("--- "):
            before = line.removeprefix("--- ").removeprefix("a/")
        elif in_head and line.startswith("+++ "):
            in_head = False
            # A deleted file has no new name.
            name = line.removeprefix("+++ ").removeprefix("b/").replace("/dev/null", before)
            found[name] = set()
        elif (hunk := HUNK.match(line)) and name in found:
            first, count = int(hunk[1]), int(hunk[2] or 1)
            # Removed lines were between two lines.
            found[name] |= set(range(first, first + count)) if count else {first, first + 1}
    for name in git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        found[name] = set(range(1, len((root / name).read_bytes().splitlines()) + 1))
    return found


def _left_upstream(root: Path) -> str | None:
    head = git(root, "rev-parse", "HEAD").strip()
    try:
        base = git(root, "merge-base", "HEAD", "@{upstream}").strip()
    except subprocess.CalledProcessError:
        return None
    return base if base != head else None


def _before_recent_hours(root: Path) -> str | None:
    when = int(git(root, "log", "-1", "--format=%ct"))
    before = f"--before={when - RECENT_HOURS * 3600}"
    return git(root, "rev-list", "-1", before, "HEAD").strip() or None


def git(root: Path, *words: str) -> str:
    """Return what a command of git prints. Raises: CalledProcessError."""
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
