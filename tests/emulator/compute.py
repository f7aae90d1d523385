"""The computation that all slots of one node share, batch after batch.

As in llama.cpp's `update_slots`, a batch holds one token of every decoding slot, and then as many
prompt tokens as fit (`--batch-size`), first come, first served. It takes

    prompt tokens / prefill_tps + base + step * (decoding - 1)      seconds

where `base` is the time of a token alone and `step` is added by each further decoding slot. So
prompts are read one after the other, and meanwhile each decoding slot gets one token a batch.

The times at which batches are due add up: a late timer delays one batch, but does not make the
node slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _BatchShare:
    """The share of one request in the batches: a prompt in prefill, or answers in decode."""

    left: int = 0  # prompt tokens still to be read
    begun: float = 0.0  # time of the first batch with some of them
    width: int = 0  # answers being decoded
    asked: bool = False  # whether it waits for its next tokens
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Compute:
    """One node's computation. Speeds in tokens/s, `step` in seconds."""

    prefill_tps: float
    decode_tps: float  # of a slot that decodes alone
    step: float
    batch: int  # tokens
    clock: Callable[[], float]
    busy_seconds: float = 0.0
    _reading: list[_BatchShare] = field(default_factory=list)
    _writing: list[_BatchShare] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def read(self, tokens: int) -> AsyncGenerator[tuple[int, float], None]:
        """Read a prompt. Yields after each batch the tokens read and the time of their first
        batch (0: not yet).
        """
        share = _BatchShare(left=tokens)
        self._reading.append(share)
        try:
            while share.left:
                self._run()
                await share.wake.wait()
                share.wake.clear()
                yield tokens - share.left, share.begun
        finally:
            if share in self._reading:
                self._reading.remove(share)

    @contextmanager
    def writing(self, width: int) -> Iterator[BatchWriter]:
        share = _BatchShare(width=width)
        self._writing.append(share)
        try:
            yield BatchWriter(share, self._run)
        finally:
            self._writing.remove(share)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _run(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._batches())

    async def _batches(self) -> None:
        due = self.clock()
        while self._reading or any(share.asked for share in self._writing):
            begun = self.clock()
            writers = [share for share in self._writing if share.asked]
            width = sum(share.width for share in writers)
            taken = self._prompt_tokens_of_batch(max(self.batch - width, 1), begun)
            seconds = sum(taken.values()) / self.prefill_tps
            if width:
                seconds += 1 / self.decode_tps + self.step * (width - 1)
            due += seconds
            self.busy_seconds += seconds
            await asyncio.sleep(max(due - self.clock(), 0))
            for share, tokens in taken.items():
                share.left -= tokens
            for share in self._reading:
                share.wake.set()
            self._reading = [share for share in self._reading if share.left]
            for share in writers:
                share.asked = False
                share.wake.set()
            await asyncio.sleep(0)  # lets requests that are done leave or go on to decode

    def _prompt_tokens_of_batch(self, room: int, now: float) -> dict[_BatchShare, int]:
        taken = {}
        for share in self._reading:
            taken[share] = min(room, share.left)
            if not share.begun:
                share.begun = now
                share.wake.set()
            room -= taken[share]
            if not room:
                break
        return taken


@dataclass(slots=True)
class BatchWriter:
    """The answers of one request while they are decoded."""

    share: _BatchShare
    run: Callable[[], None]

    async def next(self, width: int) -> None:
        """Wait for the batch that brings the next token of each of the answers that go on."""
        self.share.width, self.share.asked = width, True
        self.run()
        await self.share.wake.wait()
        self.share.wake.clear()
