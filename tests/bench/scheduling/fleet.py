"""The emulated fleet: six nodes of two speeds, two slots each."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from tests.emulator import EmulatedNode

SLOTS = 2
BATCH = 512  # tokens of one step: what `llama-gateway up` starts servers with
HOST_MEMORY = 64_000
"""Tokens of evicted prompts that a node keeps: llama.cpp's 8 GiB at 128 KiB a token (8B, F16)."""
CONTEXT = 16_384
MODEL = "demo"
ASKED = re.compile(r"Answer in (\d+) words\.")


@dataclass(frozen=True, slots=True)
class Speed:
    """A node's speed in tokens/s; `step`: seconds that each further busy slot adds to a token."""

    prefill: float
    decode: float
    step: float

    def token(self, busy: int = 1) -> float:
        """Seconds from one token of a slot to its next while `busy` slots decode."""
        return 1 / self.decode + self.step * (busy - 1)

    def scaled(self, scale: float) -> Speed:
        """The same node, `scale` times as fast."""
        return Speed(self.prefill * scale, self.decode * scale, self.step / scale)


# One more slot makes a token a tenth slower: on a CPU it waits for memory, not for arithmetic.
FAST = Speed(prefill=600, decode=40, step=0.1 / 40)
SLOW = Speed(prefill=250, decode=16, step=0.1 / 16)
FLEET = (FAST, FAST, FAST, FAST, SLOW, SLOW)


def answer_tokens(prompt: str) -> int:
    """Length of the emulated model's answer: what the last user's message asks for."""
    return int(ASKED.findall(prompt)[-1])


@asynccontextmanager
async def nodes(
    fleet: Sequence[Speed], scale: float, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[list[EmulatedNode]]:
    """The nodes of a fleet, `scale` times as fast, in this process."""
    async with AsyncExitStack() as stack:
        started = []
        for speed in fleet:
            fast = speed.scaled(scale)
            node = EmulatedNode(
                slots=SLOTS,
                context=CONTEXT,
                context_train=CONTEXT,
                model=MODEL,
                prefill_tps=fast.prefill,
                decode_tps=fast.decode,
                decode_step=fast.step,
                answer_tokens=answer_tokens,
                batch=BATCH,
                prefill_stalls=True,
                cache_ram=HOST_MEMORY,
                remember=1,
                clock=clock,
            )
            started.append(await stack.enter_async_context(node))
        yield started
