"""The variables of the roles: each with a default is specified, described, used and well named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PLAYBOOKS = ROOT / "deploy/ansible"
ROLES = sorted(path.name for path in (PLAYBOOKS / "roles").iterdir())
TYPES = {one: {one.__name__} for one in (int, float, bool, list, dict)} | {str: {"str", "path"}}


FILES = ("*.yml", "plays/*.yml", "roles/*/[thv]*/*")  # tasks, templates, handlers, vars
READ = "\n".join(path.read_text() for files in FILES for path in PLAYBOOKS.glob(files))
"""All that may use a variable."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) or {}


def defaults(role: str) -> dict[str, Any]:
    found: dict[str, Any] = read(PLAYBOOKS / "roles" / role / "defaults/main.yml")
    return found


def specified(role: str) -> dict[str, dict[str, Any]]:
    specs = read(PLAYBOOKS / "roles" / role / "meta/argument_specs.yml")["argument_specs"]
    found: dict[str, dict[str, Any]] = specs["main"]["options"]
    for entry, other in specs.items():
        assert (PLAYBOOKS / "roles" / role / f"tasks/{entry}.yml").is_file()
        assert other["options"] == found
    return found


@pytest.mark.parametrize("role", ROLES)
def test_each_variable_is_used_and_specified_with_the_type_of_its_default(role: str) -> None:
    unused = [name for name in defaults(role) if not re.search(rf"\b{name}\b", READ)]
    assert not unused
    options = specified(role)
    assert list(options) == list(defaults(role))
    for name, value in defaults(role).items():
        assert options[name]["type"] in TYPES[type(value)], name
        assert len(options[name]["description"].split()) > 1, name
