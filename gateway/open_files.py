"""The limit of open files: each client and each node connection takes one."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Raise this process's limit to what the system allows; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def within(files: int, public: int, admin: int) -> tuple[int, int]:
    """Connections that the two listeners may have, so that `files` suffice for the nodes' as well.

    A half is for the public one, a quarter for the admin one: who fills one has not filled all.
    """
    return min(public, max(1, files // 2)), min(admin, max(1, files // 4))
