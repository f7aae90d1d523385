"""What all slots of one node share: the computation, batch after batch.

As in llama.cpp's `update_slots`, a batch holds one token of every slot that writes, and then as
much as has room (`--batch-size`) of the prompts, first come, first served. It takes

    prompt tokens / prefill_tps + base + step * (writing - 1)      seconds

where `base` is what a token takes alone and `step` what each more slot that writes adds. So
prompts are read one after the other, and whoever writes meanwhile gets one token a batch.

Batches are due at times that add up: a machine that is late delays one, but does not make the
node slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Share:
    """What one request has in the batches: a prompt being read, or answers being written."""

    left: int = 0  # prompt tokens still to be read
    begun: float = 0.0  # when the first of them were taken up
    width: int = 0  # answers being written
    asked: bool = False  # for their next tokens
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class Compute:
    """One node's computation. Speeds in tokens/s, `step` in seconds."""

    prefill_tps: float
    decode_tps: float  # of a slot that writes alone
    step: float
    batch: int  # tokens
    clock: Callable[[], float]
    busy_seconds: float = 0.0
    _reading: list[_Share] = field(default_factory=list)
    _writing: list[_Share] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def read(self, tokens: int) -> AsyncGenerator[tuple[int, float], None]:
        """Read a prompt. Tells when it is begun and after each batch how much of it has been read,
        and when it was begun (0: not yet).
        """
        share = _Share(left=tokens)
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
    def writing(self, width: int) -> Iterator[Writer]:
        """Write `width` answers side by side."""
        share = _Share(width=width)
        self._writing.append(share)
        try:
            yield Writer(share, self._run)
        finally:
            self._writing.remove(share)

    def close(self) -> None:
        """Forget the batch that is under way."""
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
            taken = self._take_prompts(max(self.batch - width, 1), begun)
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
            await asyncio.sleep(0)  # whoever is done leaves or goes on to write

    def _take_prompts(self, room: int, now: float) -> dict[_Share, int]:
        """Prompt tokens of the next batch."""
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
class Writer:
    """The answers of one request while they are written."""

    share: _Share
    run: Callable[[], None]

    def narrow(self, width: int) -> None:
        """Some of its answers have ended."""
        self.share.width = width

    async def next(self) -> None:
        """Wait for the batch that brings the next token of each."""
        self.share.asked = True
        self.run()
        await self.share.wake.wait()
        self.share.wake.clear()
