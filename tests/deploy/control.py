"""The control machine of a test: an inventory, and Ansible's programs run on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.hosts import ADMIN, Site, ssh_options

PLAYBOOKS = Path(__file__).parents[2] / "deploy/ansible"
LIMIT = 1500.0  # seconds for one playbook; half a minute to two were seen
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)")


def ansible_programs() -> Path:
    """The folder of `ansible-playbook`: what `make test-deploy` made, else the one on PATH."""
    named = os.environ.get("DEPLOY_TEST_ANSIBLE")
    found = Path(named) / "ansible-playbook" if named else shutil.which("ansible-playbook")
    if not found or not Path(found).exists():
        raise FileNotFoundError("no ansible-playbook: run these tests by `make test-deploy`")
    return Path(found).absolute().parent


@dataclass(frozen=True, slots=True)
class Played:
    """How a playbook ended."""

    status: int
    output: str

    @property
    def changed(self) -> dict[str, int]:
        """What was changed on each host."""
        return {match[1]: int(match[3]) for match in self._recap() if int(match[3])}

    @property
    def text(self) -> str:
        """The output as one line: Ansible breaks messages where it likes, and quotes them."""
        return " ".join(self.output.split()).replace("''", "'")

    def _recap(self) -> list[re.Match[str]]:
        return [match for line in self.output.splitlines() if (match := RECAP.match(line))]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all that it started: Ansible's workers have sessions of their own."""
    family = [process.pid]
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)  # so that it starts nothing more
            for task in Path(f"/proc/{pid}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
    for pid in reversed(family):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@dataclass(slots=True)
class Control:
    """`groups` and `variables` are the inventory; what a test changes in them it changes back.

    What each playbook says is written to `folder` while it runs.
    """

    programs: Path
    folder: Path
    site: Site
    groups: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    host_variables: dict[str, dict[str, Any]] = field(default_factory=dict)
    limit: float = LIMIT
    _played: int = 0

    def play(self, playbook: str, *arguments: str, good: bool = True, **extra: Any) -> Played:
        """Run a playbook over the inventory; `extra` are variables of this run alone."""
        command = [
            *(str(self.programs / "ansible-playbook"), "-i", str(self._inventory())),
            *(playbook, *arguments),
        ]
        if extra:
            command += ["-e", json.dumps(extra)]
        self._played += 1
        log = self.folder / f"{self._played:02}-{playbook}.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                command,
                cwd=PLAYBOOKS,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self.limit)
            except BaseException:  # whatever ends the test ends the playbook and its workers
                end(process)
                raise
        played = Played(status, log.read_text())
        if (played.status == 0) != good:
            raise AssertionError(f"{playbook}: status {played.status}\n{played.output[-6000:]}")
        return played

    def _inventory(self) -> Path:
        path = self.folder / "hosts.json"
        told = {
            "all": {
                "vars": {
                    "ansible_user": ADMIN,
                    "ansible_ssh_private_key_file": str(self.site.key),
                    "ansible_ssh_common_args": " ".join(ssh_options()[:-2]),
                    **self.variables,
                },
                "children": {
                    group: {"hosts": {name: self._host(name) for name in names}}
                    for group, names in self.groups.items()
                },
            }
        }
        path.write_text(json.dumps(told, indent=2))
        return path

    def _host(self, name: str) -> dict[str, Any]:
        known = self.site.hosts.get(name)
        address = self.addresses.get(name) or (known.address if known else name)
        return {"ansible_host": address, **self.host_variables.get(name, {})}

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        return kept | {
            "PATH": f"{self.programs}{os.pathsep}{kept.get('PATH', '')}",
            "ANSIBLE_HOME": str(self.folder / "home"),
            "ANSIBLE_NOCOLOR": "1",
        }
