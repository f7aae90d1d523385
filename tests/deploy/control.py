"""The control machine of a test: an inventory, and Ansible's programs that run with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.base_image import CONTAINED_COMMAND
from tests.deploy.hosts import ADMIN, HostNetwork, ssh_options
from tests.processes import ran

PLAYBOOKS = Path(__file__).parents[2] / "deploy/ansible"
LIMIT = 1500.0  # seconds for one playbook; they took half a minute to two minutes
RECAP = re.compile(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=")


def ansible_programs() -> Path:
    """The folder of `ansible-playbook`: that of `make test-deploy`, else the one on PATH."""
    named = os.environ.get("DEPLOY_TEST_ANSIBLE")
    found = Path(named) / "ansible-playbook" if named else shutil.which("ansible-playbook")
    if not found or not Path(found).exists():
        raise FileNotFoundError("no ansible-playbook: run these tests by `make test-deploy`")
    return Path(found).absolute().parent


def play_here(
    folder: Path, play: str, variables: dict[str, Any], inventory: str | Path, status: int = 0
) -> str:
    """Run a play on this machine in place of a host; its output."""
    (folder / "play.yml").write_text(play)
    settings = {"ansible_python_interpreter": "/usr/bin/python3", **variables}
    given = ("-i", inventory, folder / "play.yml", "-e", json.dumps(settings))
    program = ansible_programs() / "ansible-playbook"
    return ran(program, *given, cwd=PLAYBOOKS, limit=200, status=status).stdout


@dataclass(frozen=True, slots=True)
class PlaybookResult:
    """The result of a playbook."""

    status: int
    output: str

    @property
    def changed(self) -> dict[str, int]:
        """The number of changes on each host that was changed."""
        recap = filter(None, map(RECAP.match, self.output.splitlines()))
        return {match[1]: int(match[2]) for match in recap if int(match[2])}

    @property
    def text(self) -> str:
        """The output in one line, without the line breaks and quotes that Ansible adds."""
        return " ".join(self.output.split()).replace("''", "'")


def wait_for(what: Callable[[], bool], limit: float = 60.0) -> None:
    """Wait until it is so."""
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.1)


@dataclass(slots=True)
class ControlMachine:
    """Runs playbooks; `groups` and `variables` are the inventory.

    A test that changes the inventory restores it. The output of each playbook goes to `folder`.
    """

    programs: Path
    folder: Path
    site: HostNetwork
    groups: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    host_variables: dict[str, dict[str, Any]] = field(default_factory=dict)
    limit: float = LIMIT
    _plays: int = 0

    def play(
        self, playbook: str, *arguments: str, good: bool = True, **extra: Any
    ) -> PlaybookResult:
        """Run a playbook over the inventory; `extra` are variables of this run only.

        Raises AssertionError unless it succeeds, or with `good=False` unless it fails.
        """
        command = [
            *(*CONTAINED_COMMAND, "--mount-proc", "--"),  # Ansible's workers end with the test
            *(str(self.programs / "ansible-playbook"), "-i", str(self._inventory())),
            *(playbook, *arguments),
        ]
        if extra:
            command += ["-e", json.dumps(extra)]
        self._plays += 1
        log = self.folder / f"{self._plays:02}-{playbook}.log"
        with log.open("wb") as written:
            done = subprocess.run(
                command, cwd=PLAYBOOKS, env=self._environment(), stdin=subprocess.DEVNULL,
                stdout=written, stderr=subprocess.STDOUT, timeout=self.limit, check=False,
            )  # fmt: skip
        played = PlaybookResult(done.returncode, log.read_text())
        if (played.status == 0) != good:
            raise AssertionError(f"{playbook}: status {played.status}\n{played.output[-6000:]}")
        return played

    def _inventory(self) -> Path:
        path = self.folder / "hosts.json"
        inventory = {
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
        path.write_text(json.dumps(inventory, indent=2))
        return path

    def _host(self, name: str) -> dict[str, Any]:
        known = self.site.hosts.get(name)
        address = self.addresses.get(name) or (known.address if known else name)
        return {"ansible_host": address, **self.host_variables.get(name, {})}

    def _environment(self) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")
        }
        return inherited | {
            "PATH": f"{self.programs}{os.pathsep}{inherited.get('PATH', '')}",
            "ANSIBLE_HOME": str(self.folder / "home"),
            "ANSIBLE_NOCOLOR": "1",
        }
