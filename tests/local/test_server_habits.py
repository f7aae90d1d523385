"""Behaviour of the pinned llama.cpp server that the gateway relies on.

Where one of these fails after an upgrade, it is the relay that has to learn.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
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


class Connection(HTTPConnection):
    """A client whose connection is never made anew."""

    auto_open = False

    def __init__(self, url: str) -> None:
        super().__init__(urlsplit(url).netloc, timeout=TIMEOUT)
        self.connect()

    def ask(self, path: str, body: object = None) -> None:
        self.request(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body)
        )

    def is_silent_for(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.sock], [], [], seconds)
        return not ready


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
    with closing(Connection(url)) as connection:
        for number in range(1, 101):
            connection.ask("/health")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            if number == 1:
                assert response.headers["keep-alive"] == "timeout=5, max=100"
            assert (response.headers.get("connection") == "close") == (number == 100)


@pytest.mark.smoke
def test_an_error_closes_the_connection(url: str) -> None:
    with closing(Connection(url)) as connection:
        connection.ask("/v1/chat/completions", {})
        response = connection.getresponse()
        assert (response.status, response.headers["connection"]) == (400, "close")


@pytest.mark.smoke
def test_a_slot_is_free_soon_after_its_stream_is_closed(url: str) -> None:
    with closing(Connection(url)) as connection:
        connection.ask("/completion", LONG)
        response = connection.getresponse()
        assert (response.status, bool(response.readline())) == (200, True)
        assert busy(url)
        response.close()
    assert broken_off(url)


def withheld(url: str) -> bool:
    """Return whether a second response's head came only after the first request left the slot."""
    with closing(Connection(url)) as first, closing(Connection(url)) as second:
        first.ask("/completion", LONG)
        response = first.getresponse()
        assert response.status == 200
        second.ask("/completion", LONG | {"n_predict": 3})
        silent = second.is_silent_for(0.3)
        response.close()
        first.close()
        assert second.getresponse().status == 200
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
