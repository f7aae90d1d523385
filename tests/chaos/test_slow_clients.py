"""Healthy clients lose nothing beside slow ones; `make slow-clients` is the same with 10,000."""

from __future__ import annotations

import ipaddress

import pytest

from tests.chaos.slow_clients import SlowClients, options_parser
from tests.chaos.slow_crowd import source_address

SMALL = [
    *("--clients", "300", "--addresses", "20", "--connections", "400", "--minutes", "0.4"),
    *("--ramp", "3", "--pause", "2", "--alone", "2", "--settle", "5", "--every", "2"),
    *("--healthy", "5"),
]


def test_each_slow_client_has_a_loopback_address_of_its_own() -> None:
    addresses = [ipaddress.IPv4Address(source_address(number)) for number in range(600)]
    assert len(set(addresses)) == 600
    assert all(address.is_loopback and str(address) != "127.0.0.1" for address in addresses)
    assert str(addresses[0]) == "127.0.0.2"


@pytest.mark.slow
async def test_healthy_clients_lose_nothing_beside_slow_ones() -> None:
    run = SlowClients(options_parser().parse_args(SMALL))
    await run.run()
    assert not run.alone.lost
    assert not run.beside.lost
    assert len(run.beside.delays) > 50
    assert max(sample.slow for sample in run.samples) > 150
    statuses = run.crowd["statuses"]
    assert isinstance(statuses, dict)
    assert {"head 408", "read 200"} <= set(statuses)
    assert run.before is not None
    assert run.after is not None
    assert run.after.descriptors <= run.before.descriptors + 50
