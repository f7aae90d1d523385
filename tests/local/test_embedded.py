from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local.demo_model import WORDS
from gateway.local.gguf import read_model
from gateway.local.server import server_environment
from tests.each_case import each_case
from tests.local.machine import is_locked
from tests.local.server_requests import TIMEOUT, get, post
from tests.processes import gone, wait_until_gone
from tests.servers import (
    demo_model,
    demo_servers,
    may_lock,
    running_demo_servers,
    spawn_demo_server,
    stop_demo_server,
    wait_for_demo_server,
)

pytestmark = [pytest.mark.real, pytest.mark.wheel_only("about the embedded server itself")]

CITY = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_servers(1, slots=2) as (url,):
        yield url


def chat(url: str, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | more
    answer = post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_the_endpoints_that_the_gateway_reads_are_enabled(url: str) -> None:
    assert get(f"{url}/health").json() == {"status": "ok"}
    props = get(f"{url}/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert len(get(f"{url}/slots").json()) == 2
    assert "llamacpp:prompt_tokens_total" in get(f"{url}/metrics").text
    assert [model["id"] for model in get(f"{url}/v1/models").json()["data"]] == ["demo"]


def test_no_web_page_may_call_the_server(url: str) -> None:
    answer = get(f"{url}/slots", headers={"Origin": "http://evil.example"})
    assert answer.headers.get("Access-Control-Allow-Origin", "") == ""


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


@each_case("content", [None, b"", b"\n \n", "schlüssel".encode()])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    server = spawn_demo_server(extra=("--api-key-file", str(keys)))
    try:
        with pytest.raises(AssertionError, match=f"embedded: --api-key-file {keys} "):
            wait_for_demo_server(server)
        assert server.process.wait(TIMEOUT) == 1
    finally:
        stop_demo_server(server)


def test_it_generates_printable_words_up_to_its_length(url: str) -> None:
    choice = chat(url, "Tell me of the sea.", max_tokens=300)
    assert choice["finish_reason"] == "length"
    text = choice["message"]["content"]
    assert text.isprintable()
    words = text.split()
    assert sum(word in WORDS for word in words) > 0.8 * len(words)
    assert len(set(words)) > 50


def test_greedy_text_is_the_same_on_every_server_alone_or_beside_others() -> None:
    prompts = [f"Tell me of the river, {number}." for number in range(8)]
    with demo_servers(2, slots=4) as (one, other):

        def text(url: str, prompt: str) -> str:
            content: str = chat(url, prompt, max_tokens=60)["message"]["content"]
            return content

        first = [text(one, prompt) for prompt in prompts]
        assert len(set(first)) == len(prompts)
        assert [text(one, prompt) for prompt in prompts] == first
        assert [text(other, prompt) for prompt in reversed(prompts)] == first[::-1]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(text, [other] * 8, prompts)) == first


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_it_calls_a_tool_and_then_answers_with_words(url: str, choice: str) -> None:
    reply = chat(url, "Weather?", tools=[TOOL], tool_choice=choice, max_tokens=200)
    assert reply["finish_reason"] == "tool_calls"
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [{"role": "user", "content": "Weather?"}, reply["message"], result]
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 20, "temperature": 0}
    answer = post(f"{url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["message"]["content"].split()) > 10


def test_a_json_schema_is_followed(url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    choice = chat(url, "JSON, please.", response_format=form, max_tokens=100)
    assert choice["message"]["content"].replace(" ", "") in {'{"a":"x"}', '{"a":"y"}'}


def test_any_text_is_tokenized_and_restored(url: str) -> None:
    text = "Grüße, 日本 \U0001f600\n\ttab  two spaces <b>&</b>"
    tokens = post(f"{url}/tokenize", json={"content": text}).json()["tokens"]
    assert post(f"{url}/detokenize", json={"tokens": tokens}).json()["content"] == text


def test_one_for_embeddings_serves_them() -> None:
    with demo_servers(1, embedding=True) as (url,):
        body = {"input": ["the river", "the river", "a lamp"], "model": "demo"}
        data = post(f"{url}/v1/embeddings", json=body).json()["data"]
        long = post(f"{url}/v1/embeddings", json={"input": "sea " * 2000, "model": "demo"})
    assert long.json()["usage"]["prompt_tokens"] > 2000
    one, same, other = (item["embedding"] for item in data)
    assert len(one) == 128
    assert math.isclose(sum(x * x for x in one), 1.0, rel_tol=1e-3)
    assert sum(x * y for x, y in zip(one, same, strict=True)) > 0.999
    assert sum(x * y for x, y in zip(one, other, strict=True)) < 0.99


def test_without_mmap_the_model_is_in_memory_of_its_own() -> None:
    servers = [spawn_demo_server(), spawn_demo_server(extra=("--no-mmap",))]
    try:
        for server in servers:
            wait_for_demo_server(server)
        maps = [Path(f"/proc/{server.pid}/maps").read_text() for server in servers]
    finally:
        for server in servers:
            stop_demo_server(server)
    assert [str(demo_model()) in text for text in maps] == [True, False]


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


def test_sigterm_ends_the_server_at_once_during_a_stream() -> None:
    with running_demo_servers(1, context=16_384) as (server,):
        body = {"prompt": "on", "n_predict": 16_000, "stream": True}
        url = f"{server.url}/completion"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as answer:
            next(answer.iter_lines())
            server.process.terminate()
            # By itself the server ends its streams first, some 30 s, and then with status 0.
            assert server.process.wait(60) == -signal.SIGTERM


@pytest.mark.smoke
def test_it_dies_when_its_parent_is_killed() -> None:
    inner = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'gateway.local.embedded', '--model', "
        f"{str(demo_model())!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True, env=server_environment()
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert not gone(server)
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    wait_until_gone([server])


def run_embedded(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.local.embedded", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=server_environment()
    )


def test_a_file_that_is_no_model_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really")
    done = run_embedded("--model", str(bad))
    assert done.returncode == 1
    assert f"embedded: llama.cpp could not serve {bad}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_holds_no_prompt_and_no_answer() -> None:
    with running_demo_servers(1) as (server,):
        text = chat(server.url, "my secret lighthouse", max_tokens=50)["message"]["content"]
        log = server.log_with("prompt eval time")
    assert "lighthouse" not in log
    assert text.split()[0] + " " + text.split()[1] not in log
