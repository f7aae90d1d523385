"""Behaviour of the pinned llama.cpp server that the gateway relies on.

Where one of these fails after an upgrade, it is the relay that has to learn.
"""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.local.demo_model import WORDS
from gateway.local.gguf import read_model
from tests.local.machine import is_locked
from tests.servers import (
    demo_model,
    demo_servers,
    may_lock,
    running_demo_servers,
    spawn_demo_server,
    stop_demo_server,
    wait_for_demo_server,
)

pytestmark = pytest.mark.real
embedded = pytest.mark.wheel_only("about the embedded server itself")

TIMEOUT = 120.0  # seconds; the machine may be busy
CLIENT = httpx.Client(
    timeout=TIMEOUT, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
)

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
    return any(slot["is_processing"] for slot in CLIENT.get(f"{url}/slots").json())


def wait_until_free(url: str) -> None:
    while busy(url):
        time.sleep(0.005)


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
def test_a_slot_is_free_soon_after_its_stream_is_closed(url: str) -> None:
    with closing(Connection(url)) as connection:
        connection.ask("/completion", LONG)
        response = connection.getresponse()
        assert (response.status, bool(response.readline())) == (200, True)
        assert busy(url)
        response.close()
    wait_until_free(url)


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


def test_settings_can_not_be_changed_and_no_web_page_may_read_slots(url: str) -> None:
    assert CLIENT.post(f"{url}/props", json={}).status_code == 501
    evil = {"Origin": "http://evil.example"}
    slots = CLIENT.get(f"{url}/slots", headers=evil)
    told = slots.headers.get("access-control-allow-origin", "")
    assert (slots.status_code, told in {"*", *evil.values()}) == (200, False)


# The embedded server.


def chat(url: str, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | more
    answer = CLIENT.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@embedded
@pytest.mark.smoke
def test_keys_of_a_file_are_required(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("older-key\nnewer-key\n")
    server = spawn_demo_server(extra=("--api-key-file", str(keys)))
    try:
        url = wait_for_demo_server(server)
        for path in ("/props", "/slots", "/metrics"):
            assert CLIENT.get(f"{url}{path}").status_code == 401
            for key, status in (("older-key", 200), ("newer-key", 200), ("key", 401)):
                answer = CLIENT.get(f"{url}{path}", headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == status, (path, key)
        assert CLIENT.get(f"{url}/health").status_code == 200
    finally:
        stop_demo_server(server)
    for options, told in (
        ((f"--api-key-file={keys}",), f"embedded: --api-key-file {keys} "),
        ((f"--model={keys}",), f"embedded: llama.cpp could not serve {keys}"),
    ):
        keys.write_bytes(b"\n \n")
        server = spawn_demo_server(extra=options)
        try:
            with pytest.raises(AssertionError, match=told):
                wait_for_demo_server(server)
            assert server.process.wait(TIMEOUT) == 1
        finally:
            stop_demo_server(server)


@embedded
def test_words_are_generated_and_not_logged_and_sigterm_ends_it_at_once_during_a_stream() -> None:
    with running_demo_servers(1, context=16_384) as (server,):
        choice = chat(server.url, "my secret lighthouse", max_tokens=300)
        log = server.log_with("prompt eval time")
        body = {"prompt": "on", "n_predict": 16_000, "stream": True}
        url = f"{server.url}/completion"
        with CLIENT.stream("POST", url, json=body) as answer:
            next(answer.iter_lines())
            server.process.terminate()
            # By itself the server ends its streams first, some 30 s, and then with status 0.
            assert server.process.wait(60) == -signal.SIGTERM
    assert choice["finish_reason"] == "length"
    words = choice["message"]["content"].split()
    assert sum(word in WORDS for word in words) > 0.8 * len(words)
    assert len(set(words)) > 50
    assert "lighthouse" not in log
    assert f"{words[0]} {words[1]}" not in log


@embedded
@pytest.mark.skipif(not may_lock(), reason="the limit of locked memory is too low here")
@pytest.mark.parametrize("more", [(), ("--no-mmap",)])
def test_a_model_may_be_locked_in_memory(more: tuple[str, ...]) -> None:
    model = read_model(demo_model())
    server = spawn_demo_server(extra=("--mlock", *more))
    try:
        wait_for_demo_server(server)
        locked = is_locked(server.pid, model.path)
        mapped = str(model.path) in Path(f"/proc/{server.pid}/maps").read_text()
    finally:
        stop_demo_server(server)
    assert locked
    assert mapped == (not more)
