from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from tests.deploy.control import kill_tree

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_killing_a_playbook_kills_workers_in_sessions_of_their_own() -> None:
    command = ["python3", "-c", f"import subprocess as s; s.run(['python3', '-c', '''{PARENT}'''])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        worker = Path(f"/proc/{int(process.stdout.readline())}/stat")
        assert worker.exists()
        kill_tree(process)
    deadline = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        while worker.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "the worker lives on"
            time.sleep(0.01)
