from __future__ import annotations

import socket

import pytest

from gateway.local.server import claim_free_port, claim_port, claimed_port

HOST = "127.0.0.1"


def listen_as_a_server(port: int, option: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((HOST, port))
        server.listen()


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_the_server_can_listen_on_its_claimed_port(option: int) -> None:
    with claim_port(HOST) as claim:
        listen_as_a_server(claimed_port(claim), option)
        listen_as_a_server(claimed_port(claim), option)  # and once more after its end


def test_the_first_port_from_the_base_that_is_not_claimed_is_else_any() -> None:
    with claim_port(HOST) as taken:
        with pytest.raises(OSError, match="in use"):
            claim_port(HOST, claimed_port(taken))
        with claim_free_port(HOST, claimed_port(taken)) as claim:
            assert claimed_port(claim) > claimed_port(taken)
    with claim_free_port(HOST, 65536) as claim:
        assert claimed_port(claim) > 0


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        claim_free_port("192.0.2.1")
