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
