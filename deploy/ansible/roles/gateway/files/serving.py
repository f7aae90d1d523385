"""Describes the running gateway as a JSON object: `python3 - HOME SETTINGS`.

`release` is the folder that its libraries are mapped from, `digest` that of its unit. `stale` is
true if the settings were written after the start.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SLACK = 1.5  # seconds; a process's start is known to a hundredth, the boot's to a second


def main(home: str, settings: str) -> dict[str, Any]:
    """Describe the main process; everything is empty if none runs."""
    shown = subprocess.run(
        ["systemctl", "show", "--property=MainPID", "--value", "llama-gateway.service"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    ).stdout.strip()
    nothing = {"pid": 0, "release": "", "digest": "", "stale": False}
    process = Path(f"/proc/{shown or 0}")
    try:
        maps = (process / "maps").read_text()
        environment = (process / "environ").read_text(errors="replace").split("\0")
        ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
        booted = int(re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)[1])
    except OSError:
        return nothing
    mapped = re.search(rf"({re.escape(home)}/[^/]+)/lib/", maps)
    digests = [
        pair.partition("=")[2] for pair in environment if pair.startswith("LLAMA_GATEWAY_DIGEST=")
    ]
    started = booted + ticks / os.sysconf("SC_CLK_TCK")
    return {
        "pid": int(shown),
        "release": mapped[1] if mapped else "",
        "digest": digests[0] if digests else "",
        "stale": Path(settings).stat().st_mtime > started + SLACK,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:3])) + "\n")
