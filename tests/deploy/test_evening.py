"""The last steps of docs/deploy.md's evening: keys, and the settings that suit a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.conftest import Fleet

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]


def test_keys_are_asked_for_once_there_are_some(fleet: Fleet) -> None:
    program = Path(sys.executable).with_name("llama-gateway")
    command = [str(program), "keys", "create", "--name", "Team A", "--json"]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    secret = made.pop("key")
    control = fleet.control
    control.variables["gateway_settings"] = {"keys": [made]}
    try:
        assert set(control.play("site.yml", "--limit", "gw").changed) == {"gw"}
        assert (status(fleet, None), status(fleet, "lg_wrong"), status(fleet, secret)) == (
            *(401, 401),
            200,
        )
        assert "asks for a key" in control.play("verify.yml").text
        assert "asks for a key" not in control.play("verify.yml", verify_key=secret).text
        assert control.play("site.yml", "--limit", "gw").changed == {}
    finally:
        del control.variables["gateway_settings"]
        control.play("site.yml", "--limit", "gw")
    assert status(fleet, None) == 200


def status(fleet: Fleet, key: str | None) -> int:
    """Of a chat through the edge with this key."""
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
        headers={"Authorization": f"Bearer {key}"} if key else {},
        verify=False,
        timeout=60,
    )
    return answer.status_code


def test_a_machine_runs_with_what_tune_found_for_it(fleet: Fleet) -> None:
    control, host = fleet.control, fleet.hosts["n1"]
    control.play("drain.yml", "--limit", "n1")
    host.run("systemctl stop 'llama-server-numa*'")
    host.run(
        "/opt/llama-node/current/bin/llama-gateway tune"
        " --model /var/lib/llama-node/models/*.gguf --write tuned.yml"
        " --minutes 1.5 --max-slots 4 --force",  # other tests may load this machine
        limit=600,
    )
    tuned = yaml.safe_load(host.run("cat tuned.yml").stdout)
    assert {"llama_node_threads", "llama_node_slots", "llama_node_batch"} <= set(tuned)
    control.host_variables["n1"] = tuned
    try:
        control.play("site.yml", "--limit", "n1,gw")
        control.play("drain.yml", "--limit", "n1", drain="resume")
        unit = host.run("systemctl cat llama-server-numa0").stdout
        for flag, name in (("--threads", "threads"), ("--batch", "batch")):
            assert f"{flag} {tuned[f'llama_node_{name}']} " in unit
        node = fleet.nodes()["n1-numa0"]
        assert (node["state"], node["slots_total"]) == ("ready", tuned["llama_node_slots"])
        assert control.play("site.yml", "--limit", "n1,gw").changed == {}
    finally:
        del control.host_variables["n1"]
        control.play("site.yml", "--limit", "n1,gw")
