"""Prompts that outlive an unload: saved to files of the node before it, restored after a load.

A llama.cpp server with `--slot-save-path` writes what a slot caches to a file, and reads it into a
slot of a later process: prefill is spared, minutes of it on a CPU. All models of a router share one
folder and nothing is deleted, so each model has a fixed name for each slot, overwritten each time.

A server takes any file of the right shape. That of other weights is taken too, and gives wrong text
then. So a file is restored only if build and arguments, the model's file among them, are those with
which it was saved; if it has as many tokens and bytes, and the same digest where the folder can be
read here; and if a canary gives what it gave before: a text of ours, whose cache is saved and
restored like the others and continued from there. What differs is erased.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.callers.callers import is_loopback
from gateway.config.inventory import url_host
from gateway.events import PromptsKept
from gateway.nodes.health import ProbeResponse, fetch
from gateway.nodes.node import Node
from gateway.nodes.prompt_cache import FleetPromptCache, KeptPrompt
from gateway.nodes.server_properties import UNREADABLE, parse_props, server_key

# Seconds that a model's unload, and its first request after a load, wait for its prompts at most.
MOST_SAVE, MOST_RESTORE = 5.0, 3.0
PAUSE = 600.0  # seconds without a save after one that failed: each unload would wait in vain
# Bytes a second of llama.cpp's saves and restores, which stop the server's loop: the lower ends of
# what was measured.
SAVE_RATE, RESTORE_RATE = 660 * 2**20, 1700 * 2**20
# Bytes of a token of a model of so many parameters, at 16 bits, until a save has shown them. Others
# have about as many as the square root of their parameters says.
USUAL_TOKEN_BYTES, USUAL_PARAMETERS = 131_072.0, 7.5e9
MOST_SAVED = 16  # files of one model: those of further slots are not saved
MOST_KEPT = 4000  # saved prompts of all models: beyond it those saved first are forgotten
LEAST_TOKENS = 64  # of a prompt that is worth a file
USUAL_REUSE = 0.25  # the share of a saved prompt that later ones are believed to be spared
LARGEST_ANSWER = 1 << 20  # bytes of an answer
CANARY_TEXT = "The quick brown fox jumps over the lazy dog. It ran away, and"
CANARY_TOKENS = 4
# Most by which a probability's logarithm may differ in a canary. From one process of llama.cpp to
# the next it was equal in all digits; other weights of the same shape differ by some tenths.
MOST_DIFFERENCE = 0.01

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """What a file must have to be restored."""

    tokens: _Count
    size: _Count  # bytes
    digest: bytes | None  # None: its folder can't be read here


class Canary(msgspec.Struct, frozen=True, array_like=True):
    """What follows the canary's text, and the file of its cache."""

    tokens: tuple[int, ...]
    logarithms: tuple[float, ...]  # of their probabilities
    file: SavedFile | None = None

    def agrees(self, other: Canary) -> bool:
        """Whether the same model has given both."""
        pairs = zip(self.logarithms, other.logarithms, strict=False)
        close = all(abs(one - another) <= MOST_DIFFERENCE for one, another in pairs)
        return self.tokens == other.tokens and close


class SavedPrompt(msgspec.Struct, frozen=True):
    """A saved prompt, with all that a restore needs; it holds no text."""

    server: bytes  # a digest of build and arguments
    canary: Canary
    file: SavedFile
    prompt: KeptPrompt
    caller: str


class SavedPrompts:
    """The saved prompts of the models of routers. `row_of`: a node's row in `cache`."""

    def __init__(
        self,
        cache: FleetPromptCache,
        row_of: Callable[[Node], int | None],
        publish: Callable[[PromptsKept], None],
    ) -> None:
        self._cache, self._row_of, self._publish = cache, row_of, publish
        self._saved: dict[str, dict[int, SavedPrompt]] = {}
        """By `server_key` and slot; all of one model have the same canary."""
        self._verified: dict[str, tuple[str, ...]] = {}
        """For models that have given the canary after their load: the arguments of that process,
        which has a port of its own."""
        self._paused: dict[str, float] = {}
        """Until when nothing is saved of a model whose last save failed."""

    def count(self, node: Node) -> int:
        """Prompts of this model that are saved."""
        return len(self._saved.get(server_key(node.spec), ())) if node.spec.slot_save else 0

    async def save(self, node: Node) -> None:
        """Save what is worth it of an idle model that gets no requests, within `MOST_SAVE` s."""
        key, call = server_key(node.spec), _Calls(node, node.clock() + MOST_SAVE)
        before, files = self._saved.get(key, {}), list[SavedFile]()
        if node.clock() < self._paused.get(key, -math.inf):
            return
        try:
            chosen = await self._choose(node, before, call)
            if not chosen:
                return
            server, canary = await call.server(), None
            if before and self._verified.get(key) == call.args:
                canary = next(iter(before.values())).canary
            else:
                self._saved.pop(key, None)  # The canary that vouches for them is overwritten.
            for slot, _, _ in chosen:
                before.pop(slot, None)
                files.append(await call.save(slot))
            if canary is None:
                await call.canary()
                canary = await call.canary()  # From its cache, as after a restore.
                canary = msgspec.structs.replace(canary, file=await call.save(None))
        except _Wrong as error:
            self._paused[key] = node.clock() + PAUSE
            self._tell(node, error)
            return
        self._verified[key] = call.args
        count = tokens = 0
        for (slot, prompt, caller), file in zip(chosen, files, strict=True):
            if abs(file.tokens + 1 - prompt.prompt_tokens - prompt.answer_tokens) <= 1:
                self.add(f"{key}.{slot}", SavedPrompt(server, canary, file, prompt, caller))
                count, tokens = count + 1, tokens + file.tokens
        self._publish(PromptsKept(node.name, "saved", count, tokens))

    async def _choose(
        self, node: Node, before: dict[int, SavedPrompt], call: _Calls
    ) -> list[tuple[int, KeptPrompt, str]]:
        """The slots whose prompts are worth a file, and these prompts with their callers."""
        if self._row_of(node) is None or node.sleep.asleep:
            return []
        slots = await call.slots()
        row, speed = self._row_of(node), node.speed
        if row is None or any(slot.is_processing for slot in slots):
            return []
        cached = [one for _, one in self._cache.export(row) if one.tokens >= LEAST_TOKENS]
        cached.sort(key=lambda one: not one.in_slot)
        files = [one.file for one in before.values()]
        token_bytes = sum(one.size for one in files) / max(1, sum(one.tokens for one in files))
        if not token_bytes:
            params = node.properties.n_params or USUAL_PARAMETERS
            token_bytes = USUAL_TOKEN_BYTES * math.sqrt(params / USUAL_PARAMETERS)
        chosen, tokens = list[tuple[int, KeptPrompt, str]](), 0
        for slot in slots[:MOST_SAVED]:
            # One that was restored and not used yet shows none; one that was used all but the last.
            known = before.get(slot.id)
            size = slot.n_prompt_tokens or (0 if known is None else known.file.tokens)
            held = next((one for one in cached if abs(one.tokens - 1 - size) <= 1), None)
            # Half of the time is left to the canary, and for a slower disk.
            fits = (tokens + size) * token_bytes <= 0.5 * MOST_SAVE * SAVE_RATE
            if held is not None and fits:
                cached.remove(held)
                chosen.append((slot.id, KeptPrompt.of(held), held.caller))
                tokens += size
        # What is spared if they come back, against the seconds of the files and of two canaries.
        spared = USUAL_REUSE * tokens / speed.expected_prefill_tps
        price = tokens * token_bytes * (1 / SAVE_RATE + 1 / RESTORE_RATE)
        price += 2 * CANARY_TOKENS * (speed.token_base + speed.token_step)
        price += 2 * len(CANARY_TEXT) / 3 / speed.expected_prefill_tps
        return chosen if spared > price else []

    async def restore(self, node: Node) -> bool:
        """Restore the prompts of a model that is loaded and gets no requests yet.

        It takes `MOST_RESTORE` seconds, and as many again if a slot must be emptied. The prompt
        cache of the node's row knows them then. False: a slot has what is wrong.
        """
        key, call = server_key(node.spec), _Calls(node, node.clock() + MOST_RESTORE)
        saved = [*self._saved.get(key, {}).items()]
        self._verified.pop(key, None)
        if not saved:
            return True
        first, restored, tokens = saved[0][1], list[int](), 0
        try:
            if await call.server() != first.server:
                self._saved.pop(key, None)
                return True
            if any(slot.is_processing for slot in await call.slots()):
                return True  # Others have loaded it, past this gateway.
        except _Wrong as error:
            self._tell(node, error)
            return True
        try:
            await call.restore(None, first.canary.file)
            await call.canary(first.canary)
        except _Wrong as error:
            self._saved.pop(key, None)
            self._tell(node, error)
            return await call.empties(0)
        self._verified[key] = call.args
        # A calibration would take a slot of theirs.
        node.calibration.end("warmed", node.clock(), warm=True, again=False)
        for slot, one in saved:
            if call.end - node.clock() < one.file.size / RESTORE_RATE:
                continue
            try:
                await call.restore(slot, one.file)
            except _Wrong as error:
                self._saved.get(key, {}).pop(slot, None)
                self._tell(node, error)
                if not await call.empties(slot):
                    return False
                continue
            restored.append(slot)
            tokens += one.file.tokens
            if (row := self._row_of(node)) is not None:
                self._cache.restore(row, one.prompt, one.caller)
        if 0 not in restored:
            await call.empties(0)  # It holds the canary.
        self._publish(PromptsKept(node.name, "restored", len(restored), tokens))
        return True

    def _tell(self, node: Node, error: _Wrong) -> None:
        self._publish(PromptsKept(node.name, error.action, 1, 0, str(error)))

    # The record.

    def add(self, key: str, saved: SavedPrompt) -> bool:
        """Take a newer record, as `export` gives it; False: it is none. Raises: ValueError."""
        server, _, slot = key.partition(".")
        number, others = int(slot), self._saved.get(server, {})
        if not 0 <= number < MOST_SAVED or len(saved.prompt.blocks) % 8:
            return False
        first = next(iter(others.values()), saved)
        if (first.server, first.canary) != (saved.server, saved.canary):
            others = {}  # They are older: their canary is overwritten.
        others[number] = saved
        self._saved[server] = others
        while sum(map(len, self._saved.values())) > MOST_KEPT:
            self._saved.pop(next(iter(self._saved)))
        return True

    def export(self) -> Iterator[tuple[str, SavedPrompt]]:
        """All saved prompts."""
        for key, model in self._saved.items():
            for slot, saved in model.items():
                yield f"{key}.{slot}", saved

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Forget the prompts of the callers that are gone."""
        for model in self._saved.values():
            for slot, saved in [*model.items()]:
                if saved.caller and is_gone(saved.caller):
                    del model[slot]


def file_name(node: Node, slot: int | None) -> str:
    """The name of a slot's file, or of the canary's: always the same, and of this model alone."""
    part = "canary" if slot is None else str(slot)
    return f"llama-gateway-{server_key(node.spec, node.name)}-{part}.bin"


class _Wrong(Exception):  # noqa: N818 - it ends a step, and is no error of ours
    """A save or restore is not to be used. `action`: as it is told of."""

    def __init__(self, why: str, action: str = "failed") -> None:
        super().__init__(why)
        self.action = action


# What a server answers.


class _Moved(msgspec.Struct):
    n_saved: _Count = 0
    n_written: _Count = 0
    n_restored: _Count = 0
    n_read: _Count = 0


class _Slot(msgspec.Struct):
    id: _Count
    is_processing: bool
    n_prompt_tokens: _Count = 0


class _Probability(msgspec.Struct):
    id: _Count
    logprob: float


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Completion(msgspec.Struct):
    completion_probabilities: list[_Probability]
    timings: _Timings


T = TypeVar("T")
_TOO_SLOW = "no time is left to read a file"


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE:
        raise _Wrong("the server's answer can't be read") from None


@dataclass(slots=True)
class _Calls:
    """Calls of a model's server until `end`, by the node's clock. They raise _Wrong."""

    node: Node
    end: float
    args: tuple[str, ...] = field(init=False)
    """Of the server, as the router had listed it when the calls began: it may be another by now."""

    def __post_init__(self) -> None:
        listed = None if self.node.load is None else self.node.load.listed
        self.args = () if listed is None else listed.args

    async def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to a GET of `path`, or to a POST of `body`."""
        what, left = path.partition("?action=")[2] or path, self.end - self.node.clock()
        if left <= 0:
            raise _Wrong(f"no time is left for {what}")
        named = None if body is None else {"model": self.node.spec.instance, **body}
        sent = None if named is None else msgspec.json.encode(named)
        reply = await fetch(self.node, path, body=sent, largest=LARGEST_ANSWER, limit=left)
        if not isinstance(reply, ProbeResponse):
            raise _Wrong(reply.detail)
        if reply.status != HTTPStatus.OK:
            raise _Wrong(f"the server answers {what} with {reply.status}")
        return reply.body

    async def slots(self) -> list[_Slot]:
        return _read(await self.send("/slots"), list[_Slot])

    async def act(self, action: str, slot: int | None, **body: str) -> bytes:
        """Save, restore or erase a slot; the canary's is 0."""
        return await self.send(f"/slots/{slot or 0}?action={action}", body)

    async def empties(self, slot: int) -> bool:
        """Empty a slot, however late it is; whether it is empty."""
        try:
            await replace(self, end=self.node.clock() + MOST_RESTORE).act("erase", slot)
        except _Wrong:
            return False
        return True

    async def server(self) -> bytes:
        """A digest of build and arguments of the server that runs."""
        props = parse_props(await self.send("/props"))
        if not isinstance(props, dict):
            raise _Wrong("its properties can't be read")
        args = [one for before, one in pairwise(("", *self.args)) if "--port" not in {before, one}]
        told = (props.get("build_info"), props.get("model_path"), args)
        return blake2b(msgspec.json.encode(told), digest_size=16).digest()

    async def canary(self, before: Canary | None = None) -> Canary:
        """What follows the canary's text in slot 0; what came `before` is cached there."""
        body = {"prompt": CANARY_TEXT, "n_predict": CANARY_TOKENS, "temperature": 0.0, "n_probs": 1}
        body |= {"id_slot": 0, "cache_prompt": True, "ignore_eos": True}
        found = _read(await self.send("/completion", body), _Completion)
        first = found.completion_probabilities[:CANARY_TOKENS]
        if not first or (before is not None and found.timings.cache_n < 1):
            raise _Wrong("the server does not go on from what it has cached")
        canary = Canary(tuple(one.id for one in first), tuple(one.logprob for one in first))
        if before is not None and not before.agrees(canary):
            raise _Wrong("the canary gives other tokens than before", "mismatch")
        return canary

    async def save(self, slot: int | None) -> SavedFile:
        """Save a slot, or the canary's."""
        name = file_name(self.node, slot)
        moved = _read(await self.act("save", slot, filename=name), _Moved)
        size = moved.n_written
        return SavedFile(moved.n_saved, size, await self._digest(name, size))

    async def restore(self, slot: int | None, file: SavedFile | None) -> None:
        """Restore a slot, or the canary's, from its file."""
        name = file_name(self.node, slot)
        if file is None or file.digest not in {None, await self._digest(name, file.size)}:
            raise _Wrong("a file's bytes are not those that were saved", "mismatch")
        moved = _read(await self.act("restore", slot, filename=name), _Moved)
        if (moved.n_restored, moved.n_read) != (file.tokens, file.size):
            raise _Wrong("a file has other tokens than those that were saved", "mismatch")

    async def _digest(self, name: str, size: int) -> bytes | None:
        """A digest of a file of so many bytes; None: it can't be read here."""
        folder = Path(dict(pairwise(self.args)).get("--slot-save-path", ""))
        if not folder.is_absolute() or not is_loopback(url_host(self.node.spec.url)):
            return None
        left = max(0.0, self.end - self.node.clock())
        reading = asyncio.to_thread(_file_digest, folder / name, size, time.monotonic() + left)
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                return await reading
        raise _Wrong(_TOO_SLOW)


def _file_digest(path: Path, size: int, until: float) -> bytes | None:
    """A digest of a file of so many bytes; None: it is none. Raises: _Wrong after `until`."""
    digest, left = blake2b(digest_size=16), size
    try:
        # Neither what a link leads to, nor a pipe, which is opened only when it is written to.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, "rb") as file:  # noqa: PTH123 - a descriptor
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                if time.monotonic() > until:
                    raise _Wrong(_TOO_SLOW)
                digest.update(part)
                left -= len(part)
    except (OSError, ValueError):
        return None
    return digest.digest()
