"""The emulated router compared with a real one: the same responses, and the same states.

Build 11669 does not do what older pages say: it unloads idle models only, so that a request for
another one waits; and when a model's server dies in a stream, the router writes a line of text and
ends the body as if it were whole. That is how a gateway sees it: a stream without its last event.
A model that is told to unload waits for nobody: its requests get nothing more, and after 10 s its
server is killed (of some streams the real one ends at once).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.emulator.raw_connection import chat, post, raw_connection
from tests.emulator.router import EmulatedRouter
from tests.emulator.shapes import alike, clients, heads
from tests.polling import eventually
from tests.servers import DemoServer, demo_model, running_router

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.binary_only("the wheel's server has no router mode"),
]
CHAT = "/v1/chat/completions"
CONTEXT = 16_128  # tokens; a server rounds up to a multiple of 256
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three models, and of a file that is none."""
    made = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c"):
        (made / f"{name}.gguf").symlink_to(demo_model())
    (made / "bad.gguf").write_text("no model")
    return made


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[DemoServer]:
    with running_router(folder, slots=2, context=CONTEXT, extra=("--models-max", "1")) as router:
        yield router


Clients = list[tuple[httpx.AsyncClient, EmulatedRouter | None]]


@asynccontextmanager
async def both(real: DemoServer, **options: Any) -> AsyncIterator[Clients]:
    """Clients of the real and of an emulated router, both without a loaded model."""
    settings = {"models_max": 1, "slots": 2, "context": CONTEXT, "decode_tps": 2000} | options
    async with (
        EmulatedRouter("abc", unreadable=["bad"], **settings) as emulated,
        clients(real.url, emulated.url) as (first, second),
    ):
        for name, value in (await values(first)).items():
            if value != "unloaded":
                await first.post("/models/unload", json={"model": name})
                await shows(first, name, "unloaded")
        yield [(first, None), (second, emulated)]


async def values(client: httpx.AsyncClient) -> dict[str, str]:
    models = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def shows(client: httpx.AsyncClient, name: str, value: str) -> None:
    async def shown() -> bool | None:
        return (await values(client))[name] == value or None

    await eventually(shown)


async def both_alike(pair: Clients, method: str, path: str, **options: Any) -> httpx.Response:
    return await alike([client for client, _ in pair], method, path, **options)


ONE = {"model": "a"}


async def test_a_router_without_a_loaded_model_answers_alike(real: DemoServer) -> None:
    of_one, of_none = "model=a&autoload=false", "model=none"
    paths = ["/health", "/props", "/v1/models", "/slots", "/metrics", "/nothing"]
    paths += [f"/slots?{of_one}", f"/metrics?{of_one}", f"/props?{of_one}", f"/slots?{of_none}"]
    asked: list[tuple[str, dict[str, Any] | None]] = [
        *((path, None) for path in paths),
        *((CHAT, chat(**more)) for more in ({}, {"model": "none"}, {"model": "bad"})),
        (f"{CHAT}?autoload=false", chat(model="a")),
        ("/tokenize", {"content": "a"}),
        ("/models/load", {"model": "none"}),
        ("/models/unload", {"model": "none"}),
    ]
    for path, body in asked:
        async with both(real) as pair:
            await both_alike(pair, "GET" if body is None else "POST", path, json=body)


@asynccontextmanager
async def followed(client: httpx.AsyncClient) -> AsyncIterator[list[str]]:
    """The events of `/models/sse` as they come, each as short text; equal ones in a row once."""
    seen: list[str] = []

    async def follow(response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if line and (event := told(json.loads(line.removeprefix("data: ")))) not in seen[-1:]:
                seen.append(event)

    async with client.stream("GET", "/models/sse") as response:
        assert response.headers["content-type"] == "text/event-stream"
        task = asyncio.create_task(follow(response))
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def told(event: dict[str, Any]) -> str:
    """An event as text: all but a number in the middle of a load."""
    data = event.get("data", {})
    progress = data.get("progress", {})
    if "value" in progress:
        progress["value"] = int(progress["value"])
    if "info" in data:
        data["info"] = sorted(data["info"])
    return json.dumps(event)


async def until_told(seen: list[str], *words: str) -> None:
    async def told_of() -> bool | None:
        return (bool(seen) and all(word in seen[-1] for word in words)) or None

    await eventually(told_of)


async def test_followers_are_told_alike(real: DemoServer) -> None:
    both_saw = []
    async with both(real) as pair:
        for client, emulated in pair:
            await client.get("/v1/models?reload=1")  # its last events have come
            async with followed(client) as seen:
                for name in ("bad", "a", "b"):  # `b` takes the place of `a`
                    assert (await client.post("/models/load", json={"model": name})).is_success
                    await until_told(seen, f'"{name}"', "exit_code" if name == "bad" else "info")
                await client.post("/models/unload", json={"model": "b"})
                await until_told(seen, '"b"', '"exit_code": 0')
                await client.post(CHAT, json=chat(stream=False, model="c", max_tokens=1))
                await kill_server(real, emulated, "c")
                await until_told(seen, '"c"', '"exit_code": 1')
                await eventually(partial(has_failed, client, 2))
                await client.get("/v1/models?reload=1")
                await until_told(seen, "models_reload")
                states = (await client.get("/v1/models")).json()["data"]
                assert not any("failed" in model["status"] for model in states)
            both_saw.append(seen)
    assert both_saw[1] == both_saw[0]


async def kill_server(real: DemoServer, emulated: EmulatedRouter | None, name: str) -> None:
    if emulated is not None:
        await emulated.kill_model(name)
        return
    for child in psutil.Process(real.pid).children():
        child.kill()


async def test_a_request_while_a_model_loads_is_answered_by_its_server(real: DemoServer) -> None:
    path, body = "/tokenize?autoload=false", {"model": "a", "content": "b"}
    answers: list[dict[int, httpx.Response]] = []
    async with both(real, load_seconds=0.2) as pair:
        for client, _ in pair:
            answers.append(seen := {})
            for _ in range(100):
                await client.post("/models/load", json=ONE)
                while (await values(client))["a"] == "loading":
                    answer = await client.post(path, json=body)
                    seen[answer.status_code] = answer
                await client.post("/models/unload", json=ONE)
                await shows(client, "a", "unloaded")
                if 503 in seen:
                    break
    first, second = [seen[503] for seen in answers]
    assert (second.json(), heads(second)) == (first.json(), heads(first))


async def test_a_model_that_ends_is_loaded_still_but_takes_no_requests(real: DemoServer) -> None:
    """Requests hold it up, without an answer, until it is killed."""
    async with both(real) as pair:
        asked = [await hold_up(client) for client, _ in pair]
        for path in ("/slots?model=a&autoload=false", "/props?model=a&autoload=false"):
            for client, _ in pair:
                await eventually(partial(refuses, client, path))
                assert (await values(client))["a"] == "loaded"
            first, second = [await client.get(path) for client, _ in pair]
            assert (second.text, heads(second)) == (first.text, heads(first))
        await both_alike(pair, "POST", "/models/load", json=ONE)
        await both_alike(pair, "POST", "/models/unload", json=ONE)
        for plain, streamed in [await answers for answers in asked]:
            lost = "proxy error: Failed to read connection"
            assert (plain.status_code, plain.text, streamed.status_code) == (500, lost, 200)
            assert streamed.text.endswith(f"\n\n{lost}")
        for client, _ in pair:
            await eventually(partial(has_failed, client))


async def hold_up(client: httpx.AsyncClient) -> asyncio.Future[list[httpx.Response]]:
    """Unload `a` while it works on requests. A real one sometimes ends at once: try again."""
    for _ in range(50):
        await client.post("/models/load", json=ONE)
        await shows(client, "a", "loaded")
        bodies = [chat(stream=stream, model="a", **ENDLESS) for stream in (False, True)]
        asked = asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        await eventually(partial(is_busy, client, 2))
        assert (await client.post("/models/unload", json=ONE)).json() == {"success": True}
        await asyncio.wait({asked}, timeout=1)
        if not asked.done():
            return asked
    raise AssertionError("it always ended at once")


async def refuses(client: httpx.AsyncClient, path: str) -> bool | None:
    return (await client.get(path)).status_code == 500 or None


async def test_the_unloading_of_a_model_that_loads_is_a_failure_alike(real: DemoServer) -> None:
    async with both(real, load_seconds=5) as pair:
        for client, emulated in pair:
            await client.post("/models/load", json=ONE)
            if emulated is None:
                [child] = psutil.Process(real.pid).children()
                child.suspend()
            assert (await client.post("/models/unload", json=ONE)).json() == {"success": True}
            await eventually(partial(has_failed, client))


async def test_files_come_and_go_alike(real: DemoServer, folder: Path) -> None:
    new = folder / "new.gguf"
    async with both(real) as pair:
        for client, emulated in pair:
            if emulated is None:
                new.symlink_to(demo_model())
            else:
                emulated.add("new")
            assert "new" not in await values(client)
            response = await client.post("/models/load", json={"model": "new"})
            assert response.status_code == 404
            await client.get("/v1/models?reload=1")
            await client.post("/models/load", json={"model": "new"})
            await shows(client, "new", "loaded")
            if emulated is None:
                new.unlink()
            else:
                emulated.remove("new")
            assert "new" in await values(client)
            listed = (await client.get("/v1/models?reload=1")).json()["data"]
            assert "new" not in [model["id"] for model in listed]


async def test_a_loaded_model_is_shown_and_asked_alike(real: DemoServer) -> None:
    async with both(real) as pair:
        for client, _ in pair:
            assert (await client.post("/models/load", json=ONE)).json() == {"success": True}
            await shows(client, "a", "loaded")
        listed = (await both_alike(pair, "GET", "/v1/models")).json()["data"][0]
        assert listed["meta"]["n_ctx"] == CONTEXT
        for path in ("/slots?model=a", "/props?model=a", "/metrics?model=a", "/slots"):
            await both_alike(pair, "GET", path)
        await both_alike(pair, "POST", "/models/load", json=ONE)
        await both_alike(pair, "POST", "/models/load", json={"model": "b"})
        body = chat(stream=False, model="a", max_tokens=2)
        await both_alike(pair, "POST", CHAT, json=body)
        await both_alike(pair, "POST", CHAT, json=body | {"stream": True})
        await both_alike(pair, "POST", CHAT, json={"model": "a"})
        await both_alike(pair, "POST", "/v1/embeddings", json={"model": "a", "input": "b"})
        await both_alike(pair, "POST", "/tokenize", json={"model": "a", "content": "b"})
        for body in (ONE, {}):
            await both_alike(pair, "POST", "/slots/0?action=save", json=body | {"filename": "b"})


async def test_a_request_for_another_model_waits_until_the_loaded_one_is_idle(
    real: DemoServer,
) -> None:
    async with both(real) as pair:
        for client, _ in pair:
            async with raw_connection(str(client.base_url)) as busy:
                await busy.send(post(CHAT, chat(model="a", **ENDLESS)))
                await busy.until(b"\n\n")
                body = chat(stream=False, model="b", max_tokens=2)
                waiting = asyncio.create_task(client.post(CHAT, json=body))
                refused = await client.post("/models/load", json={"model": "c"})
                assert refused.json()["error"]["message"] == "model limit reached, try again later"
                for _ in range(20):  # answered as before: the other request changes nothing yet
                    assert (await values(client))["b"] == "unloaded"
                    assert not waiting.done()
            answer = await waiting
            assert (answer.status_code, answer.json()["model"]) == (200, "b")
            assert await values(client) == {
                **dict.fromkeys(("a", "bad", "c"), "unloaded"),
                "b": "loaded",
            }


@pytest.mark.parametrize("stream", [True, False])
async def test_the_death_of_a_model_s_server_looks_alike(real: DemoServer, stream: bool) -> None:
    ends = []
    async with both(real) as pair:
        for client, emulated in pair:
            async with raw_connection(str(client.base_url)) as wire:
                await wire.send(post(CHAT, chat(model="a", stream=stream, **ENDLESS)))
                if stream:
                    await wire.until(b"\n\n")
                await eventually(partial(is_busy, client))
                await kill_server(real, emulated, "a")
                rest = await wire.rest()
            ends.append((rest.splitlines()[0] if not stream else b"", rest[-48:]))
            await eventually(partial(has_failed, client))
            again = await client.post(CHAT, json=chat(stream=False, model="a", max_tokens=1))
            assert again.status_code == 200
    assert ends[0] == ends[1]
    assert ends[0][1].endswith(b"proxy error: Failed to read connection\r\n0\r\n\r\n")


async def is_busy(client: httpx.AsyncClient, least: int = 1) -> bool | None:
    slots = await client.get("/slots?model=a&autoload=false")
    if slots.status_code != 200:
        return None
    return sum(slot["is_processing"] for slot in slots.json()) >= least or None


async def has_failed(client: httpx.AsyncClient, index: int = 0) -> bool | None:
    status = (await client.get("/v1/models")).json()["data"][index]["status"]
    wanted = {"value": "unloaded", "failed": True, "exit_code": 1}
    return all(status.get(name) == value for name, value in wanted.items()) or None


async def test_a_model_that_sleeps_is_shown_and_wakes_alike(folder: Path) -> None:
    extra = ("--models-max", "1", "--sleep-idle-seconds", "1")
    both_saw = []
    with running_router(folder, slots=2, context=CONTEXT, extra=extra) as router:
        async with both(router, sleep_idle_seconds=1) as pair:
            for client, _ in pair:
                async with followed(client) as seen:
                    await client.post(CHAT, json=chat(stream=False, model="a", max_tokens=1))
                    await until_told(seen, "sleeping")
                    assert (await values(client))["a"] == "sleeping"
                    assert (await client.get("/props?model=a")).json()["is_sleeping"] is True
                    assert (await values(client))["a"] == "sleeping"
                    for path in ("/slots?model=a", "/slots?model=a&autoload=false"):
                        assert (await client.get(path)).status_code == 200
                        assert (await values(client))["a"] == "loaded"
                        await until_told(seen, "sleeping")
                    assert (await client.post("/models/load", json=ONE)).status_code == 400
                    await client.post("/models/unload", json=ONE)
                    await until_told(seen, "exit_code")
                both_saw.append(seen)
    assert both_saw[1] == both_saw[0]


async def test_slots_are_saved_and_restored_alike(folder: Path, tmp_path: Path) -> None:
    extra = ("--models-max", "1", "--slot-save-path", f"{tmp_path}/")
    prompt = {"model": "a", "prompt": "one two three four " * 50, "n_predict": 12, "id_slot": 0}
    prompt |= {"temperature": 0, "ignore_eos": True}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("0?action=save", {"filename": "one"}),
        ("1?action=save&autoload=false", {"filename": "empty"}),
        ("7?action=save", {"filename": "other"}),
        ("0?action=erase", {}),
        ("0?action=restore", {"filename": "one"}),
        ("0?action=restore", {"filename": "none"}),
        ("0?action=save", {"filename": "../one"}),
        ("0?action=save", {}),
        ("0?action=other", {"filename": "one"}),
        ("x?action=save", {"filename": "one"}),
    ]
    with running_router(folder, slots=2, context=CONTEXT, extra=extra) as router:
        async with both(router, cache_ram=10_000, slot_files={}) as pair:
            texts = [
                [(await client.post("/completion", json=prompt)).json()["content"]]
                for client, _ in pair
            ]
            for path, body in asked:
                await both_alike(pair, "POST", f"/slots/{path}", json=body | ONE)
            for client, _ in pair:
                await client.post("/models/unload", json=ONE)
                await shows(client, "a", "unloaded")
            path, body = "/slots/0?action=restore&autoload=false", {"filename": "one"} | ONE
            await both_alike(pair, "POST", path, json=body)
            for (client, _), found in zip(pair, texts, strict=True):
                await client.post("/models/load", json=ONE)
                await shows(client, "a", "loaded")
                await client.post(path, json=body)
                answer = (await client.post("/completion", json=prompt)).json()
                assert answer["timings"]["prompt_n"] == 1
                found.append(answer["content"])
            for found in texts:
                assert found[0] == found[1]
