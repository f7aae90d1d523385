from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local.demo_model import WORDS
from gateway.local.gguf import read_model
from tests.local.machine import is_locked
from tests.local.server_requests import TIMEOUT, get, post
from tests.servers import (
    demo_model,
    may_lock,
    running_demo_servers,
    spawn_demo_server,
    stop_demo_server,
    wait_for_demo_server,
)

pytestmark = [pytest.mark.real, pytest.mark.wheel_only("about the embedded server itself")]


def chat(url: str, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | more
    answer = post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.smoke
def test_keys_of_a_file_are_required(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("older-key\nnewer-key\n")
    server = spawn_demo_server(extra=("--api-key-file", str(keys)))
    try:
        url = wait_for_demo_server(server)
        for path in ("/props", "/slots", "/metrics"):
            assert get(f"{url}{path}").status_code == 401
            for key, status in (("older-key", 200), ("newer-key", 200), ("key", 401)):
                answer = get(f"{url}{path}", headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == status, (path, key)
        assert get(f"{url}/health").status_code == 200
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


def test_words_are_generated_and_not_logged_and_sigterm_ends_it_at_once_during_a_stream() -> None:
    with running_demo_servers(1, context=16_384) as (server,):
        choice = chat(server.url, "my secret lighthouse", max_tokens=300)
        log = server.log_with("prompt eval time")
        body = {"prompt": "on", "n_predict": 16_000, "stream": True}
        url = f"{server.url}/completion"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as answer:
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
