"""Behaviour of the pinned llama.cpp server that the gateway relies on.

Where one of these fails after an upgrade, it is the relay that has to learn.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import pytest

from tests.local.server_requests import TIMEOUT, get, post
from tests.servers import demo_servers

pytestmark = pytest.mark.real

LONG = {"prompt": "on and on", "n_predict": 16_000, "stream": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_servers(1, slots=1, context=16_384) as (url,):
        yield url


class Connection:
    """A client that sees every byte."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT)
        self.file: BinaryIO = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self._socket.close()

    def send(self, path: str, body: object = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        verb = "GET" if body is None else "POST"
        head = f"{verb} {path} HTTP/1.1\r\nHost: node\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers; EOFError when the server has closed the connection."""
        line = self.file.readline()
        if not line:
            raise EOFError
        headers: dict[str, str] = {}
        while field := self.file.readline().strip():
            name, _, value = field.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    def silent_for(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(TIMEOUT)
        return False


def busy(url: str) -> bool:
    return any(slot["is_processing"] for slot in get(f"{url}/slots").json())


def wait_until_free(url: str) -> None:
    while busy(url):
        time.sleep(0.005)


def broken_off(url: str) -> bool:
    """Return whether the last response was incomplete; wait until its slot is free."""
    wait_until_free(url)
    [slot] = get(f"{url}/slots").json()
    return bool(slot["next_token"][0]["has_next_token"])


def test_a_connection_serves_a_hundred_requests(url: str) -> None:
    with Connection(url) as connection:
        for number in range(1, 101):
            connection.send("/health")
            status, headers = connection.head()
            connection.file.read(int(headers["content-length"]))
            assert status == 200
            if number == 1:
                assert headers["keep-alive"] == "timeout=5, max=100"
            assert (headers.get("connection") == "close") == (number == 100)
        assert connection.file.read() == b""


@pytest.mark.smoke
def test_an_error_closes_the_connection(url: str) -> None:
    with Connection(url) as connection:
        connection.send("/v1/chat/completions", {})
        status, headers = connection.head()
        assert (status, headers["connection"]) == (400, "close")


@pytest.mark.smoke
def test_a_slot_is_free_soon_after_its_stream_is_closed(url: str) -> None:
    with Connection(url) as connection:
        connection.send("/completion", LONG)
        assert connection.head()[0] == 200
        assert connection.file.readline()
        assert busy(url)
    assert broken_off(url)


def withheld(url: str) -> bool:
    """Return whether a second response's head came only after the first request left the slot."""
    with Connection(url) as first, Connection(url) as second:
        first.send("/completion", LONG)
        assert first.head()[0] == 200
        second.send("/completion", LONG | {"n_predict": 3})
        silent = second.silent_for(0.3)
        first.__exit__()
        assert second.head()[0] == 200
    wait_until_free(url)
    return silent


def test_the_head_comes_at_once_with_a_free_slot_and_is_withheld_without(url: str) -> None:
    # On a busy machine this process can stand still until the first answer has come to its end.
    assert any(withheld(url) for _ in range(10))


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(url: str) -> None:
    answer = post(f"{url}/completion", json={"prompt": "x" * 20_000, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 16_384
    assert error["n_prompt_tokens"] >= 20_000
    # The settings can't be changed from outside.
    assert post(f"{url}/props", json={}).status_code == 501
