"""Prompts that are saved before a model's unload and restored after its next load."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.events import PromptsKept
from gateway.nodes import saved_prompts
from gateway.nodes.prompt_cache import FleetPromptCache, KeptPrompt
from gateway.nodes.router import ModelLoad, read_list
from gateway.nodes.saved_prompts import (
    MOST_KEPT,
    MOST_RESTORE,
    MOST_SAVE,
    MOST_SAVED,
    PAUSE,
    Canary,
    SavedFile,
    SavedPrompt,
    SavedPrompts,
    file_name,
)
from tests.emulator.router import EmulatedRouter
from tests.emulator.slot_files import SlotFile
from tests.gateways import Running, running_gateway
from tests.nodes.build import a_node
from tests.servers import demo_model, running_router
from tests.virtual import in_virtual_time, now

SAVED, RESTORED = [("r1/a", "saved", 2)], [("r1/a", "restored", 2)]
MISMATCH = [("r1/a", "mismatch", 1)]
OPTIONS: dict[str, Any] = {
    "models_max": 1,
    "slots": 2,
    "context": 4096,
    "cache_ram": 9999,
    "prefill_tps": 100,
    "decode_tps": 50,
    "load_seconds": 2,
}
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
WORDS = ("river", "stone", "light", "wheat", "garden", "winter", "letter", "bridge", "house")


def prompt(seed: int, words: int) -> str:
    """A prompt of so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@dataclass(slots=True)
class Site:
    """A gateway over a router of the models `a` and `b`, of which it holds one at a time."""

    running: Running
    words: int
    """Of a prompt. Nearly as many tokens are cached of it."""
    router: EmulatedRouter = field(init=False)
    """If it is an emulated one: what it does, and what was saved there."""
    files: dict[str, SlotFile] = field(init=False)
    _told: list[PromptsKept] = field(default_factory=list)

    @property
    def told(self) -> list[tuple[str, str, int]]:
        """Node, action and prompts, of each event of saved prompts since the last time."""
        self.running.gateway.bus.flush()
        told = [(one.node, one.action, one.prompts) for one in self._told]
        self._told.clear()
        return told

    async def ask(self, model: str, text: str) -> tuple[str, int]:
        """An answer, and the tokens of the prompt that were cached."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        reply = await self.running.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    async def answers(self, *seeds: int) -> list[tuple[str, int]]:
        """Those of the model `a` to these prompts."""
        return [await self.ask("a", prompt(seed, self.words)) for seed in seeds]

    async def saved(self) -> list[str]:
        """Two answers of the model `a`, which is then unloaded for `b`."""
        texts = [text for text, _ in await self.answers(1, 2)]
        await self.unload()
        return texts

    async def unload(self) -> None:
        """Have the model `a` unloaded."""
        await self.ask("b", "Hello.")

    async def cached(self, *seeds: int) -> list[bool]:
        """Whether the model `a` had these prompts cached."""
        return [cached >= self.words for _, cached in await self.answers(*seeds)]

    async def answers_cached(self) -> list[str]:
        """The texts of the two answers, of which all was cached."""
        found = await self.answers(1, 2)
        assert all(cached >= self.words for _, cached in found)
        return [text for text, _ in found]


@asynccontextmanager
async def site(
    folder: Path, url: str, words: int = 700, *, slot_save: bool = True
) -> AsyncIterator[Site]:
    """A gateway over the router `r1` at this address."""
    specs = [{"name": "r1", "url": url, "host": "r1", "slot_save": slot_save}]
    async with running_gateway(folder, specs, {"model_placement": {"hysteresis": 0}}) as running:
        found = Site(running, words)
        running.gateway.bus.subscribe(PromptsKept, found._told.append)
        yield found
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


@asynccontextmanager
async def emulated(folder: Path, *, slot_save: bool = True, **options: Any) -> AsyncIterator[Site]:
    """The same over an emulated router."""
    files: dict[str, SlotFile] = {}
    async with (
        EmulatedRouter("ab", **{"slot_files": files, **OPTIONS, **options}) as router,
        site(folder, router.url, 300, slot_save=slot_save) as one,
    ):
        one.router, one.files = router, files
        yield one


def with_real_router(test: Callable[..., Any]) -> Any:
    """Mark the test of a real router."""
    binary = pytest.mark.binary_only("the wheel's server has no router mode")
    return pytest.mark.real(pytest.mark.slow(binary(test)))


@contextmanager
def real_router(folder: Path) -> Iterator[str]:
    """The address of a real router of the models `a` and `b`, which saves in `saved`."""
    for name in ("models", "saved"):
        (folder / name).mkdir()
    for name in "ab":
        (folder / "models" / f"{name}.gguf").write_bytes(demo_model().read_bytes())
    saving = ("--models-max", "1", "--slot-save-path", f"{folder / 'saved'}/")
    with running_router(folder / "models", slots=2, context=4096, extra=saving + EXACT) as router:
        yield router.url


@in_virtual_time
async def test_a_model_that_is_loaded_again_has_its_prompts(tmp_path: Path) -> None:
    async with emulated(tmp_path) as one:
        before = await one.saved()
        for _ in range(2):
            assert one.told == SAVED
            assert one.router.models["a"].state == "unloaded"
            assert await one.answers_cached() == before
            assert one.told == RESTORED
            await one.unload()
        node = one.running.gateway.fleet.nodes["r1/a"]
        assert set(one.files) == {file_name(node, slot) for slot in (0, 1, None)}


@with_real_router
async def test_a_real_router_s_model_and_the_next_gateway_have_its_prompts(tmp_path: Path) -> None:
    with real_router(tmp_path) as url:
        async with site(tmp_path, url) as one:
            texts = await one.saved()
            files = sorted((tmp_path / "saved").iterdir())
            assert [file.name[-6:] for file in files] == ["-0.bin", "-1.bin", "ry.bin"]
            assert await one.answers_cached() == texts
            await one.unload()
            assert one.told == [*SAVED, *RESTORED, *SAVED]
        async with site(tmp_path, url) as one:
            assert await one.answers_cached() == texts
            assert one.told == RESTORED


@in_virtual_time
async def test_nothing_is_saved_that_the_settings_do_not_allow_or_that_is_not_worth_it(
    tmp_path: Path,
) -> None:
    async with emulated(tmp_path, slot_save=False) as one:
        await one.saved()
        assert await one.cached(1, 2) == [False, False]
        assert (one.told, one.files) == ([], {})
    async with emulated(tmp_path, prefill_tps=1e6) as one:
        await one.saved()
        assert (one.told, one.files) == ([], {})


@in_virtual_time
async def test_files_of_other_weights_are_erased_and_no_text_is_wrong(tmp_path: Path) -> None:
    async with emulated(tmp_path) as one:
        before = await one.saved()
        for name, file in one.files.items():
            one.files[name] = file._replace(weights="others of the same shape")
        after = await one.answers(1, 2)
        assert one.told == [*SAVED, *MISMATCH]
        assert after == [(text, 0) for text in before]
        await one.unload()
        assert await one.cached(1, 2) == [True, True]
        assert one.told == [*SAVED, *RESTORED]


@with_real_router
async def test_no_text_of_a_real_router_is_wrong_after_its_weights_have_changed(
    tmp_path: Path,
) -> None:
    with real_router(tmp_path) as url:
        async with site(tmp_path, url) as one:
            texts = await one.saved()
            content = bytearray((tmp_path / "models" / "a.gguf").read_bytes())
            # Some weights are those of others: the same shape, other numbers.
            content[-400_000:] = content[-800_000:-400_000]
            for name in ("a.gguf", "b.gguf"):
                (tmp_path / "models" / name).unlink()
                (tmp_path / "models" / name).write_bytes(content)
            changed = await one.answers(1, 2)
            assert one.told == [*SAVED, *MISMATCH]
            assert [cached for _, cached in changed] == [0, 0]
            assert [text for text, _ in changed] != texts
            assert changed == [await one.ask("b", prompt(seed, one.words)) for seed in (1, 2)]


@with_real_router
@pytest.mark.parametrize("part", ["0", "canary"])
async def test_a_file_of_a_real_router_with_a_flipped_bit_is_erased(
    tmp_path: Path, part: str
) -> None:
    with real_router(tmp_path) as url:
        async with site(tmp_path, url) as one:
            texts = await one.saved()
            [file] = (tmp_path / "saved").glob(f"*-{part}.bin")
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0x40
            file.write_bytes(content)
            found = await one.answers(2, 1)
            assert [text for text, _ in found] == texts[::-1]
            one_left = [("r1/a", "restored", 1)] if part == "0" else []
            assert one.told == [*SAVED, *MISMATCH, *one_left]
            assert [cached >= one.words for _, cached in found] == [part == "0", False]


@in_virtual_time
async def test_a_server_that_does_not_answer_is_waited_for_within_limits(tmp_path: Path) -> None:
    async with emulated(tmp_path) as one:
        await one.answers(1, 2)
        server, began = one.router.models["a"].node, now()
        server.faults.set("hang", path="/slots/0")
        await one.unload()
        assert one.told == [("r1/a", "failed", 1)]
        assert MOST_SAVE <= now() - began < MOST_SAVE + 4
        # The next unloads do not wait for it; later it is tried again.
        await one.saved()
        assert one.told == []
        server.faults.clear()
        await asyncio.sleep(PAUSE)
        await one.saved()
        assert one.told == SAVED
        # A slot that may hold anything and can't be emptied: it is loaded once more.
        server.faults.set("hang", path="/slots/0")
        began, loads = now(), one.router.models["a"].loads
        assert await one.cached(1) == [False]
        assert one.told == [("r1/a", "failed", 1)]
        assert one.router.models["a"].loads == loads + 2
        assert now() - began < 2 * MOST_RESTORE + 30  # of which the router's kill takes 10


@in_virtual_time
async def test_nothing_is_restored_into_a_model_that_others_have_loaded_and_use(
    tmp_path: Path,
) -> None:
    async with emulated(tmp_path) as one:
        await one.saved()
        assert one.told == SAVED
        loads = one.router.models["a"].loads
        messages = [{"role": "user", "content": prompt(3, 1500)}]  # for some 35 s
        async with httpx.AsyncClient(base_url=one.router.url, timeout=120) as others:
            body = {"model": "a", "messages": messages, "max_tokens": 8}
            reply = await others.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert one.told == []
        assert one.router.models["a"].loads == loads + 1
        # The files are those of the next load still.
        await one.unload()
        assert await one.cached(1, 2) == [True, True]


def test_no_two_routers_share_a_file_in_one_folder() -> None:
    routers = [("r1", "http://h:1"), ("r1", "http://h:2"), ("r2", "http://h:1")]
    nodes = [a_node(name=name, url=url) for name, url in routers]
    names = [file_name(node, slot) for node in nodes for slot in (0, 1, None)]
    assert len(set(names)) == 9
    assert all(re.fullmatch(r"llama-gateway-[0-9a-f]{32}-\w+\.bin", name) for name in names)


def test_a_record_is_kept_as_far_as_it_agrees_and_its_caller_is_there() -> None:
    saved = SavedPrompts(FleetPromptCache(), lambda _: None, lambda _: None)
    file, canary = SavedFile(99, 4096, b"digest"), Canary((7, 8), (-0.5, -0.25))
    prompts = KeptPrompt(b"12345678", 90, 10, ends_on_block=True)
    one = SavedPrompt(b"server", canary, file, prompts, "")
    saved.add("a.0", one)
    for caller, slot in (("here", 1), ("gone", 2), ("here", MOST_SAVED), ("here", -1)):
        saved.add(f"a.{slot}", msgspec.structs.replace(one, caller=caller))
    half = KeptPrompt(b"1234", 90, 10, ends_on_block=True)
    assert not saved.add("a.5", msgspec.structs.replace(one, prompt=half))
    with pytest.raises(ValueError, match="invalid literal"):
        saved.add("a", one)
    assert [key for key, _ in saved.export()] == ["a.0", "a.1", "a.2"]
    saved.forget(lambda caller: caller == "gone")
    assert [key for key, _ in saved.export()] == ["a.0", "a.1"]
    for _, known in saved.export():
        assert msgspec.json.decode(msgspec.json.encode(known), type=SavedPrompt) == known
    # What is newer has overwritten the canary's file, as in the last seconds of a predecessor.
    for newer in (
        msgspec.structs.replace(one, server=b"another build"),
        msgspec.structs.replace(one, canary=Canary((7, 8), (-0.5, -0.75))),
    ):
        assert saved.add("a.3", newer)
        assert [*saved.export()] == [("a.3", newer)]


def test_records_are_bounded_and_those_saved_first_go_first() -> None:
    saved = SavedPrompts(FleetPromptCache(), lambda _: None, lambda _: None)
    canary, prompts = Canary((7,), (-0.5,)), KeptPrompt(b"12345678", 90, 10, ends_on_block=True)
    one = SavedPrompt(b"server", canary, SavedFile(99, 4096, None), prompts, "")
    for number in range(MOST_KEPT // MOST_SAVED + 3):
        for slot in range(MOST_SAVED):
            assert saved.add(f"{number}.{slot}", one)
    keys = [key for key, _ in saved.export()]
    assert len(keys) == MOST_KEPT
    assert (keys[0], keys[-1]) == ("3.0", f"{MOST_KEPT // MOST_SAVED + 2}.{MOST_SAVED - 1}")


async def test_only_a_file_is_read_for_a_digest_and_not_for_longer_than_there_is_time(
    tmp_path: Path,
) -> None:
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.write_bytes(b"saved")
    os.mkfifo(pipe)
    link.symlink_to(file)
    node = a_node(url="http://127.0.0.1:1")
    listed = {"id": "m", "status": {"args": ["--slot-save-path", str(tmp_path)]}}
    [model] = read_list({"data": [listed]})
    node.load = ModelLoad(listed=model)
    began = time.monotonic()

    async def digest(name: str, size: int, seconds: float = 10.0) -> bytes | None:
        return await saved_prompts._Calls(node, node.clock() + seconds)._digest(name, size)

    found = await digest("file", 5)
    assert found is not None
    assert [await digest(name, 5) for name in ("pipe", "link", "none")] == [None] * 3
    assert await digest("file", 6) is None
    os.truncate(file, 1 << 42)
    with pytest.raises(saved_prompts._Wrong, match="no time is left to read a file"):
        await digest("file", 1 << 42, 0.1)
    assert time.monotonic() - began < 5
