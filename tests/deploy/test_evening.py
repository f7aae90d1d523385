"""The last steps of docs/deploy.md's evening: keys, and the settings that suit a machine."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import DeployedFleet, chat, create_key

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]


def test_another_key_is_valid_once_it_is_in_the_settings(
    fleet: DeployedFleet, tmp_path: Path
) -> None:
    control, other = fleet.control, create_key("team-a")
    settings = control.variables["gateway_settings"]
    control.variables["gateway_settings"] = {"keys": [fleet.key.entry, other.entry]}
    keyed = tmp_path / "key"
    keyed.write_text(f"{other.secret}\n")
    try:
        assert set(control.play("site.yml", "--limit", "gw").changed) == {"gw"}
        keys = (None, "lg_wrong", other.secret)
        assert [chat(fleet.url, key).status_code for key in keys] == [401, 401, 200]
        assert "asks for a key" in control.play("verify.yml").text
        first = control.play("verify.yml", "-vvv", verify_key_file=str(keyed))
        assert "asks for a key" not in first.text
        assert other.secret not in first.output
        assert control.play("site.yml", "--limit", "gw").changed == {}
    finally:
        control.variables["gateway_settings"] = settings
        control.play("site.yml", "--limit", "gw")
    ended = [chat(fleet.url, key).status_code for key in (other.secret, fleet.key.secret)]
    assert ended == [401, 200]


def test_no_secret_is_shown_even_with_the_most_verbose_output(
    fleet: DeployedFleet, tmp_path: Path
) -> None:
    """All secrets change in runs that print differences and the arguments of each module."""
    control = fleet.control
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=edge"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    named = tmp_path / "named.key"
    named.write_text("marked-file-a1\n")
    secrets: dict[str, Any] = {
        "edge_tls_certificate": str(certificate),
        "edge_tls_key": str(key),
        "gateway_admin_key": "marked-admin-key-a2",
        "gateway_environment": {"SOME_KEY": "marked-variable-a3"},
        "gateway_files": {"named.key": str(named)},
        "monitoring_scrapes": [{
            "job_name": "other", "static_configs": [{"targets": ["127.0.0.1:1"]}],
            "basic_auth": {"username": "u", "password": "marked-scrape-a4"},
        }],
    }  # fmt: skip
    control.variables |= secrets
    try:
        first = control.play("site.yml", "-vvv", "--diff", llama_node_key_rotate=True)
        second = control.play("site.yml", "-vvv", "--diff")
    finally:
        for name in secrets:
            del control.variables[name]
        control.play("site.yml")
    hidden = [line for line in key.read_text().splitlines() if "PRIVATE" not in line]
    hidden += [f"marked-{mark}" for mark in ("file-a1", "admin-key-a2", "variable-a3", "scrape-a4")]
    for name in control.groups["llama_nodes"]:
        hidden += fleet.hosts[name].run("cat /var/lib/llama-node/api.key").stdout.split()
    for result in (first, second):
        assert set(result.changed) == {"gw", *control.groups["llama_nodes"]}
        shown = result.output
        assert not [mark for mark in hidden if mark in shown or encoded(mark) in shown]


def encoded(mark: str) -> str:
    """The beginning of the text as `slurp` shows it in a file."""
    return base64.b64encode(mark.encode())[:16].decode()


def test_a_machine_runs_with_the_settings_that_tune_has_found(fleet: DeployedFleet) -> None:
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
