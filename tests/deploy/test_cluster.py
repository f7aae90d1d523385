"""Two gateways as one, with PostgreSQL, HAProxy and keepalived, on bare hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.deploy.conftest import ClientKey, DeployedFleet, variables_of
from tests.deploy.control import ControlMachine, ansible_programs, wait_for
from tests.deploy.hosts import NETWORK, HostNetwork
from tests.deploy.load import nothing_fails
from tests.deploy.release_files import ReleaseFiles

pytestmark = [pytest.mark.net, pytest.mark.timeout(3000)]

ADDRESS = f"{NETWORK}.200"


def holders(cluster: DeployedFleet) -> list[str]:
    """The hosts that have the balancers' common address."""
    return [
        name
        for name in cluster.control.groups["balancer"]
        if cluster.hosts[name].up and ADDRESS in cluster.hosts[name].run("ip -o address").stdout
    ]


@pytest.fixture(scope="module")
def cluster(
    hosts: HostNetwork,
    release_files: ReleaseFiles,
    key: ClientKey,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DeployedFleet]:
    """Two hosts with a gateway and a balancer each, one of them with the database, and a node."""
    hosts.add("gw-a", "gw-b", "cn")
    control = ControlMachine(ansible_programs(), tmp_path_factory.mktemp("cluster"), hosts)
    control.groups = {
        "llama_nodes": ["cn"],
        "gateway": ["gw-a", "gw-b"],
        "balancer": ["gw-a", "gw-b"],
        "database": ["gw-b"],
        "edge": [],
        "monitoring": [],
    }
    balancer = {"balancer_address": f"{ADDRESS}/24", "balancer_connections": 2000}
    control.variables = variables_of(release_files, key) | balancer
    yield DeployedFleet(control, hosts, control.play("site.yml"), key, ADDRESS)
    for name in ("gw-a", "gw-b", "cn"):
        hosts.stop(name)


def test_bare_hosts_become_one_gateway(cluster: DeployedFleet) -> None:
    assert set(cluster.result.changed) == {"cn", "gw-a", "gw-b"}
    cluster.chat()
    assert len(holders(cluster)) == 1
    for name in cluster.control.groups["gateway"]:
        settings = cluster.hosts[name].run("cat /etc/llama-gateway/gateway.yaml").stdout
        assert f"member: {name}" in settings
        assert "passfile=/etc/llama-gateway/database.pgpass" in settings
        status = cluster.hosts[name].fetch("http://127.0.0.1:8001/admin/status")
        assert json.loads(status)["store"]["state"] == "up"
    cluster.control.play("verify.yml")


def test_nobody_but_the_gateways_reaches_the_database(cluster: DeployedFleet) -> None:
    password = (
        cluster.hosts["gw-b"].run("cat /etc/postgresql/llama-gateway.password").stdout.strip()
    )
    ask = (
        f"PGPASSWORD={password} psql -h {cluster.hosts['gw-b'].address} -U llama_gateway"
        " -c 'SELECT 1' llama_gateway"
    )
    cluster.hosts["gw-b"].run(ask)
    cluster.hosts["cn"].run("apt-get -qq -y install postgresql-client", limit=300)
    refused = cluster.hosts["cn"].run(ask, check=False)
    assert "no pg_hba.conf entry" in refused.stderr
    assert password not in cluster.result.output


def test_settings_of_all_members_change_one_after_the_other_with_nothing_dropped(
    cluster: DeployedFleet,
) -> None:
    """Another environment restarts each of them."""
    cluster.control.variables["gateway_environment"] = {"SOME_VARIABLE": "1"}
    with nothing_fails(cluster.url, cluster.headers, 3):
        changed = cluster.control.play("site.yml", "--limit", "gw-a,gw-b").changed
    assert set(changed) == {"gw-a", "gw-b"}


def test_when_a_host_dies_the_other_one_takes_its_address(cluster: DeployedFleet) -> None:
    """The database is on the other one."""
    cluster.hosts.stop("gw-a")
    wait_for(lambda: holders(cluster) == ["gw-b"])
    cluster.chat()
