"""What `verify.yml` makes of the gateway's list of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.control import PLAYBOOKS
from tests.deploy.test_units import run

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]

PLAY = """
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - name: Find the role's variables
      ansible.builtin.include_vars: {file: "{{ variables }}"}
    - name: Judge each list
      ansible.builtin.set_fact:
        made: "{{ made | default([]) + [{'unready': gateway_unready, 'asked': gateway_models_to_ask}] }}"
      loop: "{{ lists }}"
      vars:
        gateway_verified: {stdout: "{{ {'nodes': item} | to_json }}"}
    - name: Write
      ansible.builtin.copy: {content: "{{ made | to_json }}", dest: "{{ written }}", mode: "0644"}
"""  # noqa: E501


def node(name: str, state: str, *models: str) -> dict[str, Any]:
    return {"name": name, "state": state, "models": models}


def test_models_that_a_router_has_not_loaded_are_well_and_are_not_loaded_for_a_check(
    tmp_path: Path,
) -> None:
    router = node("r", "ready", "x", "y", "z")
    lists = [
        [node("a", "ready", "m"), node("b", "loading", "m"), node("c", "down", "m")],
        [router, node("r/x", "ready", "x"), node("r/y", "unloaded", "y"), node("r/z", "loading")],
        [router, node("r/x", "unloaded", "x"), node("r/y", "failed", "y")],
        [router, node("r/x", "unloaded", "x"), node("r/y", "unloaded", "y")],
    ]
    written = tmp_path / "made.json"
    variables = str(PLAYBOOKS / "roles/gateway/vars/main.yml")
    run(tmp_path, PLAY, {"variables": variables, "lists": lists, "written": str(written)})
    assert json.loads(written.read_text()) == [
        {"unready": ["b", "c"], "asked": ["m"]},
        {"unready": [], "asked": ["x"]},
        {"unready": ["r/y"], "asked": ["x"]},
        {"unready": [], "asked": ["x"]},
    ]
