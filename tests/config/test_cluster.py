from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.settings import (
    Address,
    ClusterSettings,
    Settings,
    changed_restart_keys,
    parse_address,
)
from tests.config.conftest import LoadSettings
from tests.each_case import each_case
from tests.known import known

TLS = "tls: {cert: c.pem, key: c.key, ca: ca.pem}"
Load = Callable[[str], ClusterSettings]


@pytest.fixture
def load(tmp_path: Path, load_gateway: LoadSettings) -> Load:
    for name in ("c.pem", "c.key", "ca.pem"):
        (tmp_path / name).write_text("x")
    return lambda text: known(load_gateway(f"cluster: {{{text}}}").cluster)


def test_what_is_not_said_comes_from_the_host(load: Load) -> None:
    made = load(f"listen: 0.0.0.0:8090, {TLS}")
    host = socket.gethostname()
    assert (made.name, made.member_name, made.term) == ("llama-gateway", host, 2.0)
    assert made.advertised == Address(host, 8090)
    assert load(f"listen: 10.0.0.1:8090, {TLS}").advertised == Address("10.0.0.1", 8090)
    given = load(f"listen: '[::]:1', advertise: '[fd00::1]:8090', member: gw-a, {TLS}")
    assert (str(given.advertised), given.member_name) == ("[fd00::1]:8090", "gw-a")


@each_case(
    "text", ["", "host", "host:", "host:0", "host:99999", "a b:1", "fd00::1", "x:1/path", "u@x:1"]
)
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@each_case(
    ("text", "problem"),
    [
        (TLS, "cluster.listen"),
        ("listen: 1.2.3.4:1", "cluster.tls"),
        (f"listen: 8090, {TLS}", "must be an address with a port"),
        (f"listen: ':8090', {TLS}", "must be an address with a port"),
        (f"listen: 1.2.3.4:1, advertise: '[::]:1', {TLS}", "by which others reach this member"),
        (f"listen: 1.2.3.4:1, member: a/b, {TLS}", "must be a name of letters"),
        (f"listen: 1.2.3.4:1, term: 0.5, {TLS}", "1"),
        (f"listen: 1.2.3.4:1, term: 5m, {TLS}", "60"),
        (f"listen: 1.2.3.4:1, allow: 10.0.0.1/24, {TLS}", "write 10.0.0.0/24"),
        ("listen: 1.2.3.4:1, tls: {cert: c.pem, key: c.key, ca: no.pem}", "there is no such file"),
    ],
)
def test_mistakes_are_told_with_their_key(load: Load, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(text)


def test_a_change_needs_a_restart(load: Load) -> None:
    old = Settings(cluster=load(f"listen: 1.2.3.4:1, {TLS}"))
    new = Settings(cluster=load(f"listen: 1.2.3.4:1, term: 3, {TLS}"))
    assert changed_restart_keys(old, new) == ("cluster.term",)
    assert changed_restart_keys(Settings(), new) == ("cluster",)
