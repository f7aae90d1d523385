"""No task shows a secret in its output, on a command line, or in a file that all users can read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PLAYBOOKS = Path(__file__).parents[2] / "deploy/ansible"
# Variables with a secret, and with a file that contains one.
GIVEN = {"verify_key", "verify_key_file"}
FILES = {"balancer_tls_key", "edge_tls_key", "gateway_cluster_tls", "gateway_files"}
# Variables that are derived from a secret, but are none.
HARMLESS = {
    "gateway_digest",  # a hash of all that needs a restart
    "gateway_settings_made",  # names the file of the admin key where there is one
    "gateway_key_paths_found",  # names of files, by a hash of a key of 256 bits
    "monitoring_keyed",
}
COMMANDS = {"ansible.builtin.command", "ansible.builtin.shell", "ansible.builtin.raw"}
WRITERS = {"ansible.builtin.copy", "ansible.builtin.template"}
# Parts of a task that Ansible never shows with their values.
UNSHOWN = {"when", "name", "until", "failed_when", "changed_when", "notify", "register", "tags"}
CLOSED = {"0600", "0640"}
PARTS = ("tasks", "pre_tasks", "post_tasks", "handlers", "block", "rescue", "always")

Task = dict[str, Any]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) or []


def tasks_of(value: Any) -> Iterator[Task]:
    """The tasks of a playbook or of a file of tasks, including those in blocks."""
    for one in value:
        inner = [task for part in PARTS for task in one.get(part, [])]
        yield from tasks_of(inner) if inner else [one]


def all_tasks() -> list[Task]:
    found: list[Task] = []
    for pattern in ("*.yml", "plays/*.yml", "roles/*/tasks/*.yml", "roles/*/handlers/*.yml"):
        for path in sorted(PLAYBOOKS.glob(pattern)):
            if not path.name.startswith("."):
                found += tasks_of(read(path))
    return found


def module_of(task: Task) -> str:
    return next((key for key in task if key.startswith("ansible.builtin.")), "")


def arguments_of(task: Task) -> dict[str, Any]:
    arguments = task.get(module_of(task))
    return arguments if isinstance(arguments, dict) else {"_": arguments}


def mentions(value: object, names: set[str]) -> set[str]:
    """The names whose value an expression in the task uses."""
    expressions = re.findall(r"\{[{%](.*?)[%}]\}", json.dumps(value), re.DOTALL)
    words = {word for one in expressions for word in re.findall(r"\w+", re.sub(r"'.*?'", "", one))}
    return names & words


def secrets_of(tasks: list[Task]) -> set[str]:
    """The variables that contain a secret, directly or through other variables."""
    found = set(GIVEN)
    for path in PLAYBOOKS.glob("roles/*/meta/argument_specs.yml"):
        for entry in read(path)["argument_specs"].values():
            found |= {name for name, value in entry["options"].items() if value.get("no_log")}
    found -= FILES
    texts: dict[str, Any] = {}
    for path in PLAYBOOKS.glob("roles/*/[dv]*/main.yml"):
        texts |= read(path) or {}
    for task in tasks:
        if module_of(task) == "ansible.builtin.slurp" and is_key(arguments_of(task)["src"]):
            found.add(task["register"])
    words = {name: set(re.findall(r"\w+", json.dumps(text))) for name, text in texts.items()}
    while more := {name for name in words if words[name] & found} - found - HARMLESS:
        found |= more
    return found


def closed_results(tasks: list[Task]) -> set[str]:
    """Results of tasks with `no_log`; they contain the tasks' arguments."""
    return {task["register"] for task in tasks if task.get("no_log") and "register" in task}


def is_key(path: str) -> bool:
    return bool(re.search(r"key|\.pem|environment", path))


TASKS = all_tasks()
SECRETS = secrets_of(TASKS)
RESULTS = closed_results(TASKS)


def test_the_secrets_are_known() -> None:
    assert {"gateway_admin_key", "gateway_environment", "monitoring_scrapes"} <= SECRETS
    assert {"monitoring_key", "edge_verify_key", "gateway_verify_key"} <= SECRETS
    assert {"gateway_node_key", "gateway_node_keys", "monitoring_node_keys"} <= SECRETS
    assert len(TASKS) > 150


def complaint(task: Task) -> str:
    """How a task shows a secret; empty if it does not."""
    module, arguments = module_of(task), arguments_of(task)
    used = mentions({key: value for key, value in task.items() if key not in UNSHOWN}, SECRETS)
    writes = module in WRITERS
    if writes:
        used |= mentions(task, FILES)
        used |= {name for name in [str(arguments.get("dest", ""))] if is_key(name)}
    # A loop shows its items, whatever its label is.
    loop = str(task.get("loop", ""))
    if not re.search(r"range\(|map\(attribute", loop):
        used |= mentions(loop, RESULTS)
    if module == "ansible.builtin.slurp":
        used |= {name for name in [str(arguments["src"])] if is_key(name)}
    if not used:
        return ""
    if task.get("no_log") is not True:
        return f"shows {used}"
    if module in COMMANDS:
        return f"has {used} on a command line"
    if writes and (task.get("diff") is not False or arguments["mode"] not in CLOSED):
        return f"writes {used} for --diff, or for everybody"
    return ""


def test_no_task_shows_a_secret() -> None:
    value = {str(task.get("name")): complaint(task) for task in TASKS}
    assert {name: why for name, why in value.items() if why} == {}
