#!/usr/bin/python3 -I
"""Run llama-gateway with the files of this host's service: its settings, inventory and variables.

The playbooks install this as /usr/local/bin/llama-gateway. What the caller's own environment names
goes before. Only root and the service's group may read the files, and only root the variables, so
that commands that need them are run by sudo.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

FOLDER = Path("/etc/llama-gateway")
PROGRAM = Path("/opt/llama-gateway/current/bin/llama-gateway")


def variables() -> dict[str, str]:
    """Return the variables that the service has, as far as this user may read them."""
    found = {
        "LLAMA_GATEWAY_CONFIG": str(FOLDER / "gateway.yaml"),
        "LLAMA_GATEWAY_NODES": str(FOLDER / "nodes.yaml"),
    }
    try:
        lines = (FOLDER / "environment").read_text().splitlines()
    except (FileNotFoundError, PermissionError):
        return found
    for line in lines:  # as systemd reads it
        name, is_one, value = line.strip().partition("=")
        if is_one and not name.startswith(("#", ";")):
            found[name.strip()] = " ".join(shlex.split(value))
    return found


def main() -> None:
    """Become the program."""
    try:
        os.execve(PROGRAM, [str(PROGRAM), *sys.argv[1:]], {**variables(), **os.environ})  # noqa: S606
    except (OSError, ValueError) as error:
        sys.exit(f"llama-gateway: {PROGRAM} can't be run with the files of {FOLDER}: {error}")


main()
