"""What nodes' prompt caches are predicted to hold, and prompts that are saved over an unload."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.events import PromptsKept
from gateway.lease import PromptKey
from gateway.nodes import saved_prompts
from gateway.nodes.calibration import WORDS as ORDINARY_WORDS
from gateway.nodes.prompt_cache import (
    DEFAULT_HOST_TOKENS,
    LEAST_HOST_TOKENS,
    MOST_COMPARED_PROMPTS,
    MOST_HIT_PREFIXES,
    MOST_HOST_BLOCKS,
    MOST_HOST_PROMPTS,
    CachedPrompt,
    FleetPromptCache,
    KeptPrompt,
    PromptTree,
)
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
from tests.calls import count_calls
from tests.each_case import each_case
from tests.emulator.router import EmulatedRouter
from tests.emulator.slot_files import SlotFile
from tests.gateways import Running, running_gateway
from tests.nodes.build import a_node
from tests.schedule.build import noted_beliefs
from tests.servers import demo_model, running_demo_servers, running_router
from tests.virtual import in_virtual_time, now

BLOCK = 100.0
FEW = 4
"""Nodes."""


def chain(words: Iterable[object]) -> tuple[int, ...]:
    """One block for each letter, or number."""
    last, blocks = 0, []
    for word in words:
        last = hash((last, word))
        blocks.append(last)
    return tuple(blocks)


def a_prompt(words: str) -> PromptKey:
    return PromptKey(chain(words), BLOCK * len(words))


KEPT = KeptPrompt(array("q", chain("abcde")).tobytes(), 500, 0, ends_on_block=True)


class Scene:
    """A prompt cache and its requests, which end as predicted unless the test says otherwise."""

    def __init__(self, rows: int = 1, slots: int = 1, host: float | None = None) -> None:
        self.cache = FleetPromptCache()
        for row in range(rows):
            self.cache.resize(row, slots)
            if host is not None:
                self.cache.nodes[row].host_capacity = host

    def cached(self, words: str, row: int = 0) -> float:
        return self.cache.lookup(a_prompt(words)).cached.get(row, 0.0)

    def ran(
        self, words: str, row: int = 0, *, cached: float | None = None, answer: float = 0
    ) -> None:
        prompt = a_prompt(words)
        if cached is None:
            cached = self.cache.lookup(prompt).cached.get(row, 0.0)
        self.cache.request_placed(row, prompt)
        self.cache.request_finished(row, prompt, prompt.tokens, cached, answer)

    def begun(self, words: str, row: int = 0) -> PromptKey:
        prompt = a_prompt(words)
        self.cache.request_placed(row, prompt)
        return prompt


def test_a_node_caches_the_prompts_it_has_read() -> None:
    scene = Scene(rows=3)
    scene.ran("syst", row=2)
    scene.ran("sabc", row=1)
    assert scene.cache.lookup(a_prompt("sxyz")).cached == {1: 100, 2: 100}
    assert scene.cache.lookup(a_prompt("sabcd")).cached == {1: 400, 2: 100}
    assert scene.cache.lookup(a_prompt("sabx")).cached == {1: 300, 2: 100}
    assert scene.cache.lookup(a_prompt("xabc")).cached == {}
    assert scene.cached("sabc", row=1) == 399, "the last token is always read"


def test_the_next_turn_finds_the_answer_too() -> None:
    scene = Scene()
    scene.ran("sab", answer=150)
    assert scene.cached("sabcd") == 450
    assert scene.cached("saxyz") == 200, "another continuation does not"


@pytest.mark.parametrize(
    ("change", "row", "predicted"),
    [
        (lambda cache, _: cache.request_placed(0, a_prompt("abcdx")), 0, 0),
        (lambda cache, running: cache.request_finished(1, running, 600, 0, 0), 1, 500),
        (lambda cache, _: cache.resize(0, 1), 0, 400),
        (lambda cache, _: cache.restore(0, KEPT, ""), 0, 500),
        (lambda cache, _: cache.forget(lambda caller: caller == "alice"), 0, 0),
        (lambda cache, _: (cache.forget_node(0), cache.resize(0, 1)), 0, 0),
    ],
)
def test_what_changes_between_the_look_up_and_the_start_counts(
    change: Callable[[FleetPromptCache, PromptKey], object], row: int, predicted: float
) -> None:
    scene, prompt = Scene(rows=2, slots=2), a_prompt("abcde")
    running = scene.begun("abcdef", row=1)
    for number in range(2):
        first = scene.begun("abcd", row=number)
        scene.cache.request_finished(number, first, 400, 0, 0, "alice")
        for words in ("lm", "wxyz"):
            scene.ran(words, row=number)  # The first one is in host memory.
    assert scene.cache.lookup(prompt).cached == {0: 400, 1: 400}
    change(scene.cache, running)
    scene.cache.request_placed(row, prompt)
    assert scene.cache.nodes[row].running[id(prompt)].predicted == predicted


def test_volatile_lines_that_a_server_reads_lower_predictions_for_such_prompts_only() -> None:
    scene = Scene(slots=2)
    scene.ran("wxyz")
    for _ in range(8):
        prompt = PromptKey(chain("sabc"), 400, omits_volatile=True)
        scene.cache.request_placed(0, prompt)
        scene.cache.request_finished(0, prompt, 400, 0, 0)
    assert scene.cache.lookup(PromptKey(chain("sabcd"), 500, omits_volatile=True)).cached[0] < 20
    assert scene.cached("sabcd") == 400
    assert scene.cached("wxyza") == 400


@each_case(
    ("slots", "host", "ran", "begun", "cached"),
    [
        # A replaced prompt goes to host memory, and comes back.
        (1, None, ["abcd", "wxyz"], None, {"abcde": 400}),
        (1, None, ["abcd", "wxyz", "abcde"], None, {"abcdef": 500, "wxyzw": 400}),
        # Without host memory an empty slot goes first, then the least recently used one.
        (2, 0, ["abcd", "wxyz"], None, {"abcde": 400, "wxyza": 400}),
        (2, 0, ["abcd", "wxyz", "abcde", "klmn"], None, {"abcdef": 500, "wxyza": 0}),
        # A prompt that keeps half of a slot's overwrites the rest.
        (1, None, ["sysabc", "sysxyz"], None, {"sysabcd": 300}),
        # Three quarters of a similar slot's prompt would be kept: nothing is loaded.
        (1, None, ["sysabcdefghijklm", "zzzzzzzz", "syst"], None, {"sysabcdefghijklmn": 300}),
        # Nor is a prompt of which little would be left.
        (1, None, ["sabcdefghi", "zzzz"], None, {"sx": 0}),
        # The prompt of an idle slot is copied to host memory when another slot gets work.
        (2, None, ["sysa", "zzzz"], "sysb", {"sysc": 300}),
        (2, 0, ["sysa", "zzzz"], "sysb", {"sysc": 0}),
        # Of two slots with something in common the one with more is taken.
        (2, 0, ["a" + 13 * "b", "ac" + 12 * "d"], "acd", {"a" + 14 * "b": 1400}),
    ],
)
def test_prompts_are_cached_as_llama_cpp_does(
    slots: int, host: float | None, ran: list[str], begun: str | None, cached: dict[str, float]
) -> None:
    scene = Scene(slots=slots, host=host)
    for words in ran:
        scene.ran(words)
    if begun is not None:
        scene.begun(begun)
    assert {words: scene.cached(words) for words in cached} == cached


def test_host_memory_that_keeps_more_than_predicted_is_believed_larger() -> None:
    scene = Scene(slots=1)
    for turn in range(12):
        for letter in "abcdefghijklmnop":
            scene.ran(letter * 60, cached=5999 if turn else 0)
    assert scene.cache.nodes[0].host_capacity > DEFAULT_HOST_TOKENS
    for letter in "abcdefghijklmnop":
        assert scene.cached(letter * 61) > 0
    # And smaller if it keeps less: what is older than an evicted prompt is evicted, too.
    scene.ran("d" * 61, cached=0)
    assert (scene.cached("a" * 61), scene.cached("p" * 61) > 0) == (0, True)
    for i in range(200):
        scene.ran(chr(97 + i % 4) * 10, cached=0)
    assert LEAST_HOST_TOKENS <= scene.cache.nodes[0].host_capacity < DEFAULT_HOST_TOKENS


def test_failed_predictions_in_a_row_mean_an_unseen_restart() -> None:
    scene = Scene(slots=4)
    for words in ("aaaa", "bbbb", "cccc", "dddd"):
        scene.ran(words)
    scene.ran("aaaaa", cached=0)
    assert scene.cached("ccccc") == 400
    scene.ran("bbbbb", cached=0)
    assert scene.cached("ccccc") == 0
    assert scene.cached("bbbbbb") == 500


def test_a_forgotten_row_may_be_used_again() -> None:
    scene = Scene(rows=2, slots=1)
    scene.ran("abcd", row=0)
    scene.ran("abcd", row=1)
    running = scene.begun("wxyz", row=0)
    scene.cache.forget_node(0)
    assert scene.cache.lookup(a_prompt("abcde")).cached == {1: 400}
    scene.cache.resize(0, 1)
    scene.cache.request_finished(0, running, 400, 0, 0)
    assert scene.cache.lookup(a_prompt("wxyza")).cached == {}, "it ran on the node before"
    scene.cache.forget_node(1)
    assert len(scene.cache.tree._edges) == 0


@each_case("lie", [math.nan, -1.0, 0.0, math.inf])
def test_impossible_figures_are_ignored(lie: float) -> None:
    scene = Scene(slots=2)
    scene.ran("abcd")
    for figures in ((lie, 0, 0), (400, lie, 0), (400, 0, lie), (lie, lie, lie)):
        prompt = scene.begun("wxyz")
        scene.cache.request_finished(0, prompt, *figures)
    found = scene.cache.lookup(PromptKey(chain("abcde"), lie))
    assert all(0 <= tokens < 1e6 for tokens in found.cached.values())
    assert scene.cached("abcde") == 400


def test_requests_that_never_end_are_forgotten() -> None:
    scene = Scene(slots=2)
    for i in range(500):
        scene.begun(f"x{i}")
    assert len(scene.cache.nodes[0].running) < 50


ROWS, SLOTS = 3, 2
WORDS = st.text("ab", min_size=1, max_size=8)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "finish", "fail", "drop", "forget", "resize"]),
        st.integers(0, ROWS - 1),
        WORDS,
    ),
    max_size=60,
)


@given(STEPS, WORDS)
@settings(max_examples=200)
def test_any_events_leave_the_sums_consistent(
    steps: list[tuple[str, int, str]], asked: str
) -> None:
    scene = Scene(rows=ROWS, slots=SLOTS, host=2000)
    cache = scene.cache
    running: list[tuple[int, PromptKey]] = []
    for what, row, words in steps:
        if what == "place":
            running.append((row, scene.begun(words, row)))
        elif what == "forget":
            cache.forget_node(row)
        elif what == "resize":
            cache.resize(row, 1 + len(words) % 3)
        elif running:
            on, prompt = running.pop(0)
            if what == "drop":
                cache.request_dropped(on, prompt)
            else:
                cached = 0 if what == "fail" else cache.lookup(prompt).cached.get(on, 0.0)
                cache.request_finished(on, prompt, prompt.tokens, cached, len(words))
        for node in cache.nodes.values():
            assert node.host_used == pytest.approx(sum(held.tokens for held in node.host_prompts))
            assert node.host_used <= node.host_capacity
            assert len(node.slot_prompts) <= node.slots
    found = cache.lookup(a_prompt(asked))
    assert all(0 < tokens < max(found.tokens, 1.1) for tokens in found.cached.values())
    for row in range(ROWS):
        cache.forget_node(row)
    assert len(cache.tree._edges) == 0


def fill(rows: int, conversations: int) -> tuple[FleetPromptCache, PromptKey]:
    """Conversations of some turns behind shared system prompts; the prompt of one of them."""
    cache, rng = FleetPromptCache(), random.Random(1)
    systems = [chain(f"{i} system") for i in range(200)]
    prompt = a_prompt("")
    for row in range(rows):
        cache.resize(row, 2)
        cache.nodes[row].host_capacity = 1e9
        for i in range(conversations):
            blocks = list(rng.choice(systems))
            for turn in range(rng.choice((1, 3, 5))):
                for part in range(rng.randrange(2, 6)):
                    blocks.append(hash((blocks[-1], row, i, turn, part)))
                prompt = PromptKey(tuple(blocks), BLOCK * len(blocks))
                cached = cache.lookup(prompt).cached.get(row, 0.0)
                cache.request_placed(row, prompt)
                cache.request_finished(row, prompt, prompt.tokens, cached, 150)
    return cache, prompt


@pytest.mark.slow
def test_a_thousand_full_nodes_fit_200_megabytes() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    # A few nodes with full caches; they share fewer prefixes than a thousand would.
    cache, _ = fill(FEW, MOST_HOST_PROMPTS + 30)
    used = (tracemalloc.get_traced_memory()[0] - before) / FEW
    tracemalloc.stop()
    held = sum(len(node.host_prompts) for node in cache.nodes.values())
    assert held > FEW * 0.9 * MOST_HOST_PROMPTS
    # Besides, the blocks of the longest prompts.
    assert (used + 8 * MOST_HOST_BLOCKS) * 1000 < 200e6


@pytest.mark.slow
def test_a_lookup_over_a_thousand_nodes_is_quick() -> None:
    cache, prompt = fill(1000, 3)
    longer = PromptKey((*prompt.blocks, *range(12)), prompt.tokens + 12 * BLOCK)
    assert len(cache.lookup(longer).cached) > 100
    # Some 90: the count may grow with the prompt's blocks, but not with the nodes.
    assert count_calls(lambda: cache.lookup(longer)) < 300


def test_a_prompt_that_a_node_reads_now_is_pending_and_not_cached_yet() -> None:
    cache = FleetPromptCache()
    for row in (0, 1):
        cache.resize(row, 2)
    system = PromptKey((1, 2, 3, 4), 400.0)
    running = PromptKey((1, 2, 3, 4, 50, 51), 600.0)
    cache.request_placed(0, running)
    cache.request_placed(1, PromptKey((1, 2, 70), 300.0))
    found = cache.lookup(system)
    assert found.cached == {}
    assert found.pending == {0: 400.0, 1: 200.0}
    for other in ((9, 10), (7, 2), ()):
        assert cache.lookup(PromptKey(other, 200.0)).pending == {}
    # The longest match of a node's prompts counts.
    longest = PromptKey((1, 2, 3, 60), 400.0)
    cache.request_placed(1, longest)
    assert cache.lookup(system).pending == {0: 400.0, 1: 300.0}
    cache.request_dropped(1, longest)
    cache.request_finished(0, running, 600.0, 0.0, 10.0)
    assert cache.lookup(system).pending == {1: 200.0}
    cache.forget_node(1)
    assert cache.lookup(system).pending == {}
    assert set(cache.lookup(system).cached) == {0}


def test_a_prompt_that_thousands_share_is_compared_with_a_few() -> None:
    cache = FleetPromptCache()
    prompts = [PromptKey((1, 2), 200.0) for _ in range(2000)]
    for row, prompt in enumerate(prompts):
        cache.resize(row, 1)
        cache.request_placed(row, prompt)
    assert len(cache.lookup(PromptKey((1, 2), 200.0)).pending) == MOST_COMPARED_PROMPTS


# The tree gives the same result as comparing every prompt with every other.


def in_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# Few words and lengths, so that prompts share prefixes, branch, and are prefixes of others.
PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(chain)
TREE_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "move", "remove"]), st.integers(0, 2), PROMPTS), max_size=40
)


@given(TREE_STEPS, PROMPTS)
@settings(max_examples=300)
def test_the_tree_finds_how_far_each_row_agrees(
    steps: list[tuple[str, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    tree = PromptTree()
    kept: list[tuple[CachedPrompt, tuple[int, ...]]] = []
    for what, row, blocks in steps:
        if what == "add":
            held = CachedPrompt(row, None, 1.0, 0.0, ends_on_block=True)
            tree.add(held, blocks)
            kept.append((held, blocks))
        elif kept and what == "move":
            held, its_blocks = kept[row % len(kept)]
            if held.in_slot and its_blocks:
                held.copy_to_host()
                tree.remove(held, in_slot=True)
        elif kept:
            held, _ = kept.pop(row % len(kept))
            tree.remove(held, in_slot=held.in_slot)
    path = [*tree.path(asked)]
    for row in range(3):
        for idle in (True, False):
            mine = [b for held, b in kept if held.row == row and held.in_slot is idle]
            common = [in_common(blocks, asked) for blocks in mine]
            found = [
                at
                for edge, at, _ in path
                if row in (edge.slot_counts if idle else edge.host_counts)
            ]
            assert max(found, default=0) == max(common, default=0)
    for held, _ in kept:
        tree.remove(held, in_slot=held.in_slot)
    assert len(tree._edges) == 0


def test_the_prefix_without_a_hit_for_longest_makes_room() -> None:
    scene = Scene(slots=200)
    names = [chr(ord("a") + number) for number in range(MOST_HIT_PREFIXES + 1)]
    for name in (*names[:-1], names[0], names[-1]):
        scene.ran(name * 3, cached=200)
    kept = [*scene.cache.nodes[0].hits]
    assert len(kept) == MOST_HIT_PREFIXES
    assert kept[-2:] == [chain(name)[0] for name in (names[0], names[-1])]
    assert chain(names[1])[0] not in kept


# What is predicted of a real server behind a gateway.


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.smoke
async def test_a_growing_conversation_is_found_after_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = noted_beliefs(monkeypatch)
    talks: list[str] = []

    async def say(running: Running, name: str, messages: list[dict[str, Any]]) -> None:
        rng = random.Random(f"{name} {len(messages)}")
        text = " ".join(rng.choices(ORDINARY_WORDS[:18], k=60 if messages else 210))
        messages.append({"role": "user", "content": f"{name}: {text}"})
        body = {"messages": messages, "max_tokens": 80, "temperature": 0}
        reply = await running.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])
        talks.append(name)

    with running_demo_servers(1, slots=2, context=4096) as [server]:
        async with running_gateway(tmp_path, [server.url]) as running:
            home: list[dict[str, Any]] = []
            await say(running, "home", home)
            for i in range(3):
                # Enough other prompts to push it out of both slots, and then out of one only.
                for j in range(3 - i % 3):
                    await say(running, f"stranger {i} {j}", [])
                await say(running, "home", home)
    assert turns[0].believed == 0
    for name, turn in list(zip(talks, turns, strict=True))[1:]:
        if name == "home":
            assert turn.believed > 0.6 * turn.prompt
            assert abs(turn.believed - turn.cached) <= turn.block
        else:
            assert turn.believed < turn.block


# Prompts that are saved before a model's unload and restored after its next load.


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
NOUNS = ("river", "stone", "light", "wheat", "garden", "winter", "letter", "bridge", "house")


def prompt(seed: int, words: int) -> str:
    """A prompt of so many words."""
    return " ".join(random.Random(seed).choices(NOUNS, k=words))


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
