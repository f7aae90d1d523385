"""What the emulated node, router, llama-swap and Ollama do that no test compares with real ones."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator import EmulatedNode, expected_chat_text, expected_text
from tests.emulator.generation import Compute
from tests.emulator.language_model import WORDS, detokenize, tokenize
from tests.emulator.on_demand import EmulatedOllama, EmulatedSwap
from tests.emulator.process import emulator_process, send_command
from tests.emulator.raw_connection import RawConnection, chat, post, raw_connection
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LIMIT = 30.0


@given(st.text(), st.integers(0, 30), st.integers(0, 30))
def test_an_answer_continues_in_the_same_way_wherever_it_was_cut(
    prompt: str, first: int, more: int
) -> None:
    begun = expected_text(prompt, first)
    assert begun + expected_text(prompt + begun, more) == expected_text(prompt, first + more)
    assert detokenize(tokenize(prompt)) == prompt.encode(errors="replace").decode()


def test_different_prompts_have_different_answers_that_use_all_words() -> None:
    answers = {expected_text(f"prompt {i}", 12) for i in range(500)}
    assert len(answers) == 500
    assert set(" ".join(answers).split()) == set(WORDS)


@in_virtual_time
async def test_the_model_ends_its_answer_unless_limited_or_ignoring_its_end() -> None:
    async with EmulatedNode(answer_tokens=7) as node, httpx.AsyncClient() as client:
        so_far = {"role": "assistant", "content": expected_chat_text(HELLO, 4)}
        for messages, more, tokens, reason in (
            (HELLO, {}, 7, "stop"),
            (HELLO, {"max_tokens": 3}, 3, "length"),
            (HELLO, {"max_tokens": 20, "ignore_eos": True}, 20, "length"),
            ([*HELLO, so_far], {}, 3, "stop"),
        ):
            reply = await client.post(node.url + CHAT, json={"messages": messages, **more})
            choice = reply.json()["choices"][0]
            assert choice["message"]["content"] == expected_chat_text(messages, tokens)
            assert choice["finish_reason"] == reason


async def ask(stack: AsyncExitStack, node: EmulatedNode, text: str = "hello") -> RawConnection:
    wire = await stack.enter_async_context(raw_connection(node.url))
    await wire.send(post(CHAT, chat(text)))
    return wire


@in_virtual_time
async def test_a_full_node_withholds_the_head_until_a_slot_is_free() -> None:
    async with (
        EmulatedNode(slots=2, answer_tokens=10**6, decode_tps=100) as node,
        AsyncExitStack() as stack,
    ):
        first, second, third = [await ask(stack, node) for _ in range(3)]
        await first.head()
        await second.head()
        await node.until(lambda: node.queued == 1)
        with pytest.raises(TimeoutError):
            await third.some(0.05)
        await first.leave()
        await third.head()
        assert (node.busy, node.peak_busy, node.queued) == (2, 2, 0)


@in_virtual_time
async def test_a_plain_request_holds_its_slot_to_the_end() -> None:
    async with EmulatedNode(decode_tps=100) as node, raw_connection(node.url) as wire:
        await wire.send(post(CHAT, chat(stream=False, max_tokens=30)))
        await node.until(lambda: node.busy == 1)
        await wire.leave()
        await node.until(lambda: node.busy == 0)
        assert node.engine.tokens == 30


@in_virtual_time
async def test_prompts_are_read_one_after_the_other_while_other_slots_write_a_token_a_batch() -> (
    None
):
    work = Compute(2000, 1000, step=0.002, batch=100, clock=now)
    written = 0

    async def read(tokens: int) -> list[int]:
        return [done async for done, _ in work.read(tokens)]

    async def neighbour() -> None:
        nonlocal written
        with work.writing(2) as writer:
            while True:
                await writer.next(2)
                written += 1

    first, second = await asyncio.gather(read(300), read(300))
    assert first[-1] == second[-1] == 300
    assert work.busy_seconds == pytest.approx(0.3)
    task = asyncio.create_task(neighbour())
    await asyncio.sleep(0.03)
    assert written == pytest.approx(10, abs=1)  # a token each takes 1 ms, and 2 ms for the second
    written = 0
    await read(294)
    assert written <= 5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
def test_a_process_executes_commands_even_while_it_refuses_connections() -> None:
    prompt = {"prompt": "hello", "max_tokens": 3}
    with (
        emulator_process("--slots", "3", "--model", "m") as node,
        httpx.Client(base_url=node.url, timeout=LIMIT) as client,
    ):
        assert client.get("/props").json()["total_slots"] == 3

        def command(**what: object) -> dict[str, str]:
            return asyncio.run(send_command(node.commands, **what))

        assert command(do="next", kind="status", status=500, n=2) == {}
        assert client.post("/v1/completions", json=prompt).status_code == 500
        command(do="clear")
        reply = client.post("/v1/completions", json=prompt)
        assert reply.json()["choices"][0]["text"] == expected_text("hello", 3)
        assert "there are: hang" in command(do="set", kind="rset")["error"]
        assert "no command" in command(do="dance")["error"]
        command(do="kill")
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
        command(do="revive", loading=True)
        assert client.get("/health").status_code == 503
        command(do="loading", on=False)
        assert client.get("/health").status_code == 200
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(LIMIT) == 0


def values(router: EmulatedRouter) -> dict[str, str]:
    return {name: model.as_json()["status"]["value"] for name, model in router.models.items()}


def naming(model: str | None, *, stream: bool = False) -> dict[str, object]:
    return {"model": model} | chat(stream=stream, max_tokens=10)


@in_virtual_time
async def test_the_model_that_was_used_least_recently_is_unloaded() -> None:
    async with (
        EmulatedRouter("abc", models_max=2) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
    ):
        for name in "abac":
            await client.post(CHAT, json=naming(name))
        assert values(router) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


@in_virtual_time
async def test_a_load_beyond_the_memory_of_the_host_is_killed() -> None:
    memory = HostMemory(10)
    files = {name: ModelFile(memory=6, load_seconds=10) for name in "ab"}
    async with (
        EmulatedRouter(files, memory=memory) as first,
        EmulatedRouter(files, memory=memory) as second,
        httpx.AsyncClient(timeout=100) as client,
    ):
        await client.post(f"{first.url}/models/load", json={"model": "a"})
        assert (await client.post(second.url + CHAT, json=naming("b"))).status_code == 500
        assert now() - 1000 == pytest.approx(10 * 4 / 6, abs=0.1)
        assert (values(first)["a"], values(second)["b"], memory.used) == ("loading", "unloaded", 6)
        assert memory.peak == memory.size
        await first.until(lambda: values(first)["a"] == "loaded")
        await client.post(f"{first.url}/models/unload", json={"model": "a"})
        await first.until(lambda: memory.used == 0)
        assert (await client.post(second.url + CHAT, json=naming("b"))).status_code == 200


@in_virtual_time
async def test_llama_swap_runs_one_model_which_it_ends_once_that_is_idle() -> None:
    async with (
        EmulatedSwap("ab", load_seconds=5, decode_tps=10) as swap,
        httpx.AsyncClient(base_url=swap.url, timeout=100) as client,
    ):
        began = now()
        first, second = await asyncio.gather(
            *(client.post(CHAT, json=naming(model)) for model in "ab")
        )
        assert [first.json()["model"], second.json()["model"]] == ["a", "b"]
        assert now() - began == pytest.approx(2 * (5 + 0.9), abs=0.2)
        listed = (await client.get("/running")).json()["running"]
        assert [(one["model"], one["state"]) for one in listed] == [("b", "ready")]
        for model, words in (("c", "suitable inference handler for c"), (None, "'model' key")):
            refused = await client.post(CHAT, json=naming(model))
            assert (refused.status_code, words in refused.text) == (400, True)
        swap.models["a"].failing_loads = 1
        assert (await client.post(CHAT, json=naming("a"))).status_code == 502
        swap.kill_model_after("a", 5)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=naming("a", stream=True))


@in_virtual_time
async def test_ollama_keeps_models_for_a_while_and_tells_no_timings() -> None:
    async with (
        EmulatedOllama("ab", load_seconds=5, ttl=60) as ollama,
        httpx.AsyncClient(base_url=ollama.url, timeout=100) as client,
    ):
        for model in "ab":
            answer = await client.post(CHAT, json=naming(model))
            assert (answer.status_code, "timings" in answer.text) == (200, False)
        running = (await client.get("/api/ps")).json()["models"]
        assert [one["name"] for one in running] == ["a", "b"]
        await asyncio.sleep(70)
        assert (await client.get("/api/ps")).json() == {"models": []}
