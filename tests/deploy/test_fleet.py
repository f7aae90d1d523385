"""Deploying and changing a fleet, in the order of docs/deploy.md: these tests run in order."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import DeployedFleet
from tests.deploy.load import nothing_fails
from tests.deploy.release_files import ReleaseFiles

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]

UNIT = "/etc/systemd/system/grafana-server.service"
SECURITY = 2.0  # exposure by systemd-analyze: 0 is closed, 10 open; it was 1.5 and 1.7


def wait_for(what: Callable[[], bool], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.3)


def node_key(fleet: DeployedFleet, name: str) -> str:
    """The key that the servers of a host require."""
    return fleet.hosts[name].run("head -n 1 /var/lib/llama-node/api.key").stdout.strip()


def request_of_gateway(
    fleet: DeployedFleet, name: str, path: str, key: str = ""
) -> tuple[int, str]:
    """Status and body of a node's answer to the gateway's machine."""
    url = f"http://{fleet.hosts[name].address}:8080{path}"
    code = (
        "import urllib.request as r, urllib.error as e\n"
        f"wanted = r.Request({url!r}, headers={{'Authorization': 'Bearer {key}'}})\n"
        "try: answer = r.urlopen(wanted, timeout=60)\n"
        "except e.HTTPError as error: answer = error\n"
        "print(answer.status, answer.read().decode())"
    )
    status, _, text = fleet.hosts["gw"].run(f'python3 -c "{code}"').stdout.partition(" ")
    return int(status), text


def test_bare_machines_become_a_fleet_that_answers_through_nginx(fleet: DeployedFleet) -> None:
    assert set(fleet.result.changed) == {"gw", "n1", "n2"}
    assert fleet.chat()["usage"]["completion_tokens"] == 8
    assert {name: node["state"] for name, node in fleet.nodes().items()} == {
        "n1-numa0": "ready",
        "n2-numa0": "ready",
    }


def test_the_commands_that_are_printed_can_be_pasted_on_the_gateways_host(
    fleet: DeployedFleet,
) -> None:
    told = fleet.hosts["gw"].run("cd / && llama-gateway check && llama-gateway nodes").stdout
    assert "n1-numa0" in told
    assert "n2-numa0" in told


def test_a_second_run_changes_nothing(fleet: DeployedFleet) -> None:
    assert fleet.control.play("site.yml").changed == {}


def test_a_check_reports_what_a_run_would_change_and_changes_nothing(fleet: DeployedFleet) -> None:
    check = ("site.yml", "--check", "--diff")
    assert fleet.control.play(*check).changed == {}
    pid = "systemctl show -p MainPID --value llama-server-numa0"
    before = fleet.hosts["n1"].run(pid).stdout
    output = fleet.control.play(*check, llama_node_slots=3)
    assert set(output.changed) == {"n1", "n2"}
    assert "--slots 3" in output.text
    assert fleet.hosts["n1"].run(pid).stdout == before
    assert {node["state"] for node in fleet.nodes().values()} == {"ready"}
    assert fleet.control.play("site.yml").changed == {}


def test_single_tags_change_nothing_after_a_complete_run(fleet: DeployedFleet) -> None:
    for tag in ("install", "configure", "run"):
        assert fleet.control.play("site.yml", "--tags", tag).changed == {}


def test_the_fleet_is_verified(fleet: DeployedFleet) -> None:
    assert fleet.control.play("verify.yml").changed == {}


def test_a_node_requires_a_key_that_only_the_gateway_has(fleet: DeployedFleet) -> None:
    host, key = fleet.hosts["n1"], node_key(fleet, "n1")
    assert len(key) == 64
    assert key != node_key(fleet, "n2")
    assert request_of_gateway(fleet, "n1", "/props")[0] == 401
    assert request_of_gateway(fleet, "n1", "/slots", key=node_key(fleet, "n2"))[0] == 401
    assert request_of_gateway(fleet, "n1", "/props", key=key)[0] == 200
    mode = host.run("stat -c '%a %U %G' /var/lib/llama-node/api.key").stdout.split()
    assert mode == ["640", "root", "llama-node"]
    held = fleet.hosts["gw"].run("stat -c '%a %U %G' /etc/llama-gateway/keys/*").stdout
    assert held.splitlines() == ["640 root llama-gateway"] * 2
    shown = host.run("ps axww -o args; systemctl cat 'llama-*'; cat /var/lib/llama-node/*.json")
    assert key not in shown.stdout


def reaches(fleet: DeployedFleet, name: str) -> bool:
    """Whether a machine other than the gateway can connect to n1's port."""
    address = fleet.hosts["n1"].address
    code = f"import socket; socket.create_connection(('{address}', 8080), timeout=5)"
    return fleet.hosts[name].run(f'python3 -c "{code}"', check=False).returncode == 0


def gets_port_unreachable(fleet: DeployedFleet, name: str) -> bool:
    """Whether a machine other than the gateway gets an ICMP error from an unused UDP port."""
    address = fleet.hosts["n1"].address
    code = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(20);"
        f" s.connect(('{address}', 8080)); s.send(b'x'); s.recv(1)"
    )
    done = fleet.hosts[name].run(f'python3 -c "{code}"', check=False)
    return "ConnectionRefusedError" in done.stderr


def test_no_other_machine_reaches_a_node(fleet: DeployedFleet) -> None:
    host = fleet.hosts["n1"]
    assert not reaches(fleet, "n2")
    assert gets_port_unreachable(fleet, "n2")
    host.run("systemctl restart nftables")  # which first removes every table
    assert "llama_node" in host.run("nft list tables").stdout
    assert not reaches(fleet, "n2")
    arguments = ("site.yml", "--limit", "n1,gw", "--tags", "configure")
    fleet.control.play(*arguments, llama_node_firewall=False)
    try:
        assert reaches(fleet, "n2")
    finally:
        fleet.control.play(*arguments)
    assert not reaches(fleet, "n2")
    assert fleet.chat()["usage"]["completion_tokens"] == 8


def test_a_server_that_is_killed_comes_back(fleet: DeployedFleet) -> None:
    host = fleet.hosts["n1"]

    def main_pid() -> str:
        return host.run("systemctl show -p MainPID --value llama-server-numa0").stdout.strip()

    before = main_pid()
    host.run(f"kill -9 {before}")
    assert fleet.chat()["usage"]["completion_tokens"] == 8  # by the other node
    # The gateway may not have noticed yet: the node counts as ready until a probe or request fails.
    wait_for(lambda: main_pid() not in {before, "0"})
    wait_for(lambda: fleet.nodes()["n1-numa0"]["state"] == "ready")


def test_prometheus_scrapes_the_gateway_and_every_node(fleet: DeployedFleet) -> None:
    host = fleet.hosts["gw"]

    def health() -> dict[str, str]:
        output = host.fetch("http://127.0.0.1:9090/api/v1/targets")
        targets = json.loads(output)["data"]["activeTargets"]
        return {t["labels"].get("node", t["labels"]["job"]): t["health"] for t in targets}

    expected = {"llama-gateway": "up", "n1-numa0": "up", "n2-numa0": "up"}
    wait_for(lambda: health() == expected, limit=60)
    host.run("promtool check config /etc/prometheus/prometheus.yml")


def test_the_alerts_use_metrics_that_nodes_have(fleet: DeployedFleet) -> None:
    """`tests/monitoring` knows those of the gateway."""
    rules = fleet.hosts["gw"].run("cat /etc/prometheus/llama-gateway-rules.yml").stdout
    output = request_of_gateway(fleet, "n1", "/metrics", key=node_key(fleet, "n1"))[1]
    named = set(re.findall(r"\bllamacpp:\w+", rules))
    assert named
    assert named <= set(re.findall(r"^# TYPE (\S+)", output, re.MULTILINE))


def test_grafana_gets_its_data_source_and_dashboard_where_it_is(fleet: DeployedFleet) -> None:
    """Debian has no package of it: folders as Grafana's package makes them, a unit that sleeps."""
    host = fleet.hosts["gw"]
    pid = "systemctl show -p MainPID --value grafana-server"
    unit = "[Service]\nExecStart=/usr/bin/sleep infinity\n"
    provisioning = "/etc/grafana/provisioning"
    folder = host.root / provisioning.strip("/")
    host.run(
        f"mkdir -p {provisioning}/dashboards {provisioning}/datasources && printf '{unit}' >{UNIT}"
    )
    host.run("systemctl daemon-reload && systemctl start grafana-server")
    try:
        before = host.run(pid).stdout
        assert set(fleet.control.play("site.yml", "--tags", "configure").changed) == {"gw"}
        assert host.run(pid).stdout != before
        assert fleet.control.play("site.yml", "--tags", "configure").changed == {}
        (source,) = yaml.safe_load((folder / "datasources/llama-gateway.yml").read_text())[
            "datasources"
        ]
        assert source["url"] == "http://127.0.0.1:9090"
        (provider,) = yaml.safe_load((folder / "dashboards/llama-gateway.yml").read_text())[
            "providers"
        ]
        made = host.run(f"cat {provider['options']['path']}/llama-gateway.json").stdout
        assert json.loads(made)["panels"]
    finally:
        host.run(
            f"systemctl stop grafana-server; rm -r /etc/grafana {UNIT}; systemctl daemon-reload"
        )


def test_a_gateway_with_traces_gets_their_packages(fleet: DeployedFleet) -> None:
    traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": 1}
    settings = {**fleet.control.variables["gateway_settings"], "telemetry": {"traces": traces}}
    there = "/opt/llama-gateway/current/bin/python -c 'import opentelemetry.proto'"
    host = fleet.hosts["gw"]
    assert host.run(there, check=False).returncode != 0
    with nothing_fails(fleet.url, fleet.headers, 5):
        assert set(fleet.control.play("site.yml", gateway_settings=settings).changed) == {"gw"}
    host.run(there)
    # Nobody takes them there: the gateway says so, and serves.
    assert fleet.chat()["usage"]["completion_tokens"] == 8
    lost = re.compile(r'llama_gateway_traces_dropped_total\{reason="not_taken"\} [1-9]')
    wait_for(lambda: lost.search(host.fetch("http://127.0.0.1:8001/metrics")) is not None)
    assert fleet.control.play("site.yml", gateway_settings=settings).changed == {}
    assert set(fleet.control.play("site.yml").changed) == {"gw"}


@pytest.mark.parametrize(
    ("name", "unit"), [("n1", "llama-server-numa0.service"), ("gw", "llama-gateway.service")]
)
def test_the_units_are_valid_and_hardened(fleet: DeployedFleet, name: str, unit: str) -> None:
    host = fleet.hosts[name]
    assert host.run(f"systemd-analyze verify {unit}").stderr == ""
    host.run(f"systemd-analyze security --threshold={int(SECURITY * 10)} {unit}")


def test_a_node_is_added_under_load(fleet: DeployedFleet) -> None:
    fleet.control.groups["llama_nodes"].append("n3")
    with nothing_fails(fleet.url, fleet.headers, 20):
        fleet.control.play("site.yml")
        wait_for(lambda: fleet.nodes()["n3-numa0"]["requests"] > 0)


def test_llama_cpp_and_the_gateway_are_upgraded_under_load(
    fleet: DeployedFleet, release_files: ReleaseFiles
) -> None:
    fleet.control.variables["llama_gateway_release_wheel"] = str(release_files.newer_wheel())
    fleet.control.variables["llama_node_slots"] = 3
    with nothing_fails(fleet.url, fleet.headers, 20):
        fleet.control.play("upgrade.yml")
    status = fleet.hosts["gw"].fetch("http://127.0.0.1:8001/admin/status")
    assert json.loads(status)["version"] == "99.0.0"
    assert {node["slots_total"] for node in fleet.nodes().values()} == {3}
    assert {node["state"] for node in fleet.nodes().values()} == {"ready"}


def test_nodes_get_keys_and_new_ones_under_load(fleet: DeployedFleet) -> None:
    """An older fleet has no keys; then it gets some, which are renewed in two runs."""
    control = fleet.control
    control.play("site.yml", llama_node_key=False, llama_node_firewall=False)
    assert request_of_gateway(fleet, "n1", "/props")[0] == 200
    with nothing_fails(fleet.url, fleet.headers, 5) as load:
        control.play("site.yml")
        load.wait_for(5)
        first = node_key(fleet, "n1")
        assert request_of_gateway(fleet, "n1", "/props")[0] == 401
        control.play("site.yml", llama_node_key_rotate=True)
        load.wait_for(5)
        control.play("site.yml")
    assert request_of_gateway(fleet, "n1", "/props", key=first)[0] == 401
    assert request_of_gateway(fleet, "n1", "/props", key=node_key(fleet, "n1"))[0] == 200
    assert len(fleet.hosts["gw"].run("ls /etc/llama-gateway/keys").stdout.split()) == len(
        control.groups["llama_nodes"]
    )
    assert control.play("site.yml").changed == {}


def test_a_node_is_removed_under_load(fleet: DeployedFleet) -> None:
    fleet.control.groups["llama_nodes"].remove("n3")
    with nothing_fails(fleet.url, fleet.headers, 20):
        fleet.control.play("site.yml")
    assert set(fleet.nodes()) == {"n1-numa0", "n2-numa0"}


def test_huge_pages_and_the_governor_are_set_on_request(fleet: DeployedFleet) -> None:
    host = fleet.hosts["n1"]
    setting = host.run("cat /sys/kernel/mm/transparent_hugepage/enabled").stdout
    now = setting.partition("[")[2].partition("]")[0]  # a container can't set another
    expected: dict[str, Any] = {
        "llama_node_hugepages": now,
        "llama_node_governor": "performance",
    }
    arguments = ("site.yml", "--limit", "n1,gw", "--tags", "configure")
    assert set(fleet.control.play(*arguments, **expected).changed) == {"n1"}
    assert fleet.control.play(*arguments, **expected).changed == {}
    rule = host.run("cat /etc/tmpfiles.d/llama-node.conf").stdout.split()
    assert rule[1:] == ["/sys/kernel/mm/transparent_hugepage/enabled", "-", "-", "-", "-", now]
    assert host.run("systemctl is-enabled llama-governor").stdout.strip() == "enabled"
    assert host.run("systemd-analyze verify llama-governor.service").stderr == ""
    assert fleet.nodes()["n1-numa0"]["state"] == "ready"


def test_a_host_is_drained_and_resumed(fleet: DeployedFleet) -> None:
    fleet.control.play("drain.yml", "--limit", "n1")
    assert fleet.nodes()["n1-numa0"]["state"] == "draining"
    assert "--limit" in fleet.control.play("drain.yml", good=False).text
    wrong = fleet.control.play("drain.yml", "--limit", "n1", good=False, drain="resumed")
    assert "drain is resumed. Remedy: " in wrong.text
    fleet.control.play("drain.yml", "--limit", "n1", drain="resume")
    assert fleet.nodes()["n1-numa0"]["state"] == "ready"


def test_an_elastic_server_that_its_gateway_has_stopped_stays_stopped(fleet: DeployedFleet) -> None:
    hook = ["true"]
    entry = {"standby": True, "start": hook, "stop": hook}
    arguments = ("site.yml", "--limit", "n2,gw")
    fleet.control.play(*arguments, llama_node_entry=entry)
    fleet.hosts["n2"].run("systemctl stop llama-server-numa0")
    assert fleet.control.play(*arguments, llama_node_entry=entry).changed == {}
    state = fleet.hosts["n2"].run("systemctl is-active llama-server-numa0", check=False)
    assert state.stdout.strip() == "inactive"
    fleet.control.play(*arguments)
    wait_for(lambda: fleet.nodes()["n2-numa0"]["state"] == "ready")


def test_a_host_of_other_groups_is_not_removed_unasked(fleet: DeployedFleet) -> None:
    output = fleet.control.play("remove.yml", "--limit", "gw", good=False)
    assert "remove=yes" in output.text
    assert output.changed == {}
    assert fleet.chat()["usage"]["completion_tokens"] == 8


def test_a_host_is_removed(fleet: DeployedFleet) -> None:
    assert "remove=yes" in fleet.control.play("remove.yml", "--limit", "n2", good=False).text
    fleet.control.play("remove.yml", "--limit", "n2", remove=True)
    fleet.control.groups["llama_nodes"].remove("n2")
    assert set(fleet.nodes()) == {"n1-numa0"}
    assert fleet.hosts["n2"].run("ls /etc/systemd/system/llama-*", check=False).returncode != 0
    assert fleet.hosts["n2"].run("ls /opt/llama-node", check=False).returncode != 0
    assert fleet.chat()["usage"]["completion_tokens"] == 8
