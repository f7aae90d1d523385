"""Prompts that are saved before a model's unload and restored after its next load."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

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
from tests.nodes.build import a_node
from tests.nodes.saved_prompts import SavingModels, prompt, saving_models
from tests.virtual import in_virtual_time, now

SAVED, RESTORED = [("r1/a", "saved", 2)], [("r1/a", "restored", 2)]
OPTIONS: dict[str, Any] = {
    "models_max": 1,
    "slots": 2,
    "context": 4096,
    "cache_ram": 9999,
    "prefill_tps": 100,
    "decode_tps": 50,
    "load_seconds": 2,
}


@dataclass(slots=True)
class Site:
    """A gateway over one emulated router of the models `a` and `b`."""

    models: SavingModels
    router: EmulatedRouter
    files: dict[str, SlotFile]

    async def ask(self, model: str, *seeds: int) -> list[tuple[str, int]]:
        return [await self.models.ask(model, prompt(seed, 300)) for seed in seeds]

    async def saved(self) -> list[tuple[str, int]]:
        """Two answers of the model `a`, which is then unloaded for `b`."""
        answers = await self.ask("a", 1, 2)
        await self.models.ask("b", "Hello.")
        return answers

    async def cached(self, *seeds: int) -> list[bool]:
        """Whether the model `a` had these prompts cached."""
        return [cached > 200 for _, cached in await self.ask("a", *seeds)]

    def path(self, slot: int | None) -> str:
        return file_name(self.models.running.gateway.fleet.nodes["r1/a"], slot)


@asynccontextmanager
async def site(folder: Path, *, slot_save: bool = True, **options: Any) -> AsyncIterator[Site]:
    files: dict[str, SlotFile] = {}
    async with (
        EmulatedRouter("ab", **{"slot_files": files, **OPTIONS, **options}) as router,
        saving_models(folder, [router.url], slot_save=slot_save) as models,
    ):
        yield Site(models, router, files)


@in_virtual_time
async def test_a_model_that_is_loaded_again_has_its_prompts(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        before = await one.saved()
        for _ in range(2):
            assert one.models.told == SAVED
            assert one.router.models["a"].state == "unloaded"
            after = await one.ask("a", 1, 2)
            assert one.models.told == RESTORED
            assert [text for text, _ in after] == [text for text, _ in before]
            assert all(cached > 200 for _, cached in after)
            await one.models.ask("b", "Hello.")
        assert set(one.files) == {one.path(0), one.path(1), one.path(None)}


@in_virtual_time
async def test_nothing_is_saved_that_the_settings_do_not_allow_or_that_is_not_worth_it(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, slot_save=False) as one:
        await one.saved()
        assert await one.cached(1, 2) == [False, False]
        assert (one.models.told, one.files) == ([], {})
    async with site(tmp_path, prefill_tps=1e6) as one:
        await one.saved()
        assert (one.models.told, one.files) == ([], {})


@in_virtual_time
async def test_files_of_other_weights_are_erased_and_no_text_is_wrong(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        before = await one.saved()
        for name, file in one.files.items():
            one.files[name] = file._replace(weights="others of the same shape")
        after = await one.ask("a", 1, 2)
        assert one.models.told == [*SAVED, ("r1/a", "mismatch", 1)]
        assert after == before  # and nothing was cached
        await one.models.ask("b", "Hello.")
        assert await one.cached(1, 2) == [True, True]
        assert one.models.told == [*SAVED, *RESTORED]


@in_virtual_time
async def test_a_server_that_does_not_answer_is_waited_for_within_limits(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        await one.ask("a", 1, 2)
        server, began = one.router.models["a"].node, now()
        server.faults.set("hang", path="/slots/0")
        await one.models.ask("b", "Hello.")
        assert one.models.told == [("r1/a", "failed", 1)]
        assert MOST_SAVE <= now() - began < MOST_SAVE + 4
        # The next unloads do not wait for it; later it is tried again.
        await one.saved()
        assert one.models.told == []
        server.faults.clear()
        await asyncio.sleep(PAUSE)
        await one.saved()
        assert one.models.told == SAVED
        # A slot that may hold anything and can't be emptied: it is loaded once more.
        server.faults.set("hang", path="/slots/0")
        began, loads = now(), one.router.models["a"].loads
        assert await one.cached(1) == [False]
        assert one.models.told == [("r1/a", "failed", 1)]
        assert one.router.models["a"].loads == loads + 2
        assert now() - began < 2 * MOST_RESTORE + 30  # of which the router's kill takes 10


@in_virtual_time
async def test_nothing_is_restored_into_a_model_that_others_have_loaded_and_use(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as one:
        await one.saved()
        assert one.models.told == SAVED
        loads = one.router.models["a"].loads
        messages = [{"role": "user", "content": prompt(3, 1500)}]  # for some 35 s
        async with httpx.AsyncClient(base_url=one.router.url, timeout=120) as others:
            body = {"model": "a", "messages": messages, "max_tokens": 8}
            reply = await others.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert one.models.told == []
        assert one.router.models["a"].loads == loads + 1
        # The files are those of the next load still.
        await one.models.ask("b", "Hello.")
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
