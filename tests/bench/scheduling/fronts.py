"""The emulated fleet of six nodes of two speeds, two slots each; and the fronts before it.

The fronts are this gateway, nginx `least_conn` and HAProxy `leastconn` with a queue. Neither
peer keeps connections to the nodes: llama.cpp promises to keep a stream's connection and
closes it all the same, and what they send there meanwhile they would answer with 502.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from tests.bench.targets import TARGETS, Plan, Target, gateway, haproxy, nginx
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


# One more slot makes a token a tenth slower: on a CPU it waits for memory, not for arithmetic.
FAST = Speed(prefill=600, decode=40, step=0.1 / 40)
SLOW = Speed(prefill=250, decode=16, step=0.1 / 16)
FLEET = (FAST, FAST, FAST, FAST, SLOW, SLOW)


def answer_tokens(prompt: str) -> int:
    """Length of the emulated model's answer: what the last user's message asks for."""
    return int(ASKED.findall(prompt)[-1])


@asynccontextmanager
async def nodes(
    fleet: Sequence[Speed] = FLEET, scale: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[list[EmulatedNode]]:
    """The nodes of a fleet, `scale` times as fast, in this process."""
    async with AsyncExitStack() as stack:
        started = []
        for speed in fleet:
            node = EmulatedNode(
                slots=SLOTS,
                context=CONTEXT,
                context_train=CONTEXT,
                model=MODEL,
                prefill_tps=speed.prefill * scale,
                decode_tps=speed.decode * scale,
                decode_step=speed.step / scale,
                answer_tokens=answer_tokens,
                batch=BATCH,
                prefill_stalls=True,
                cache_ram=HOST_MEMORY,
                remember=1,
                clock=clock,
            )
            started.append(await stack.enter_async_context(node))
        yield started


@dataclass(frozen=True, slots=True)
class Front:
    """One column of the tables."""

    name: str
    title: str
    target: Target
    known: bool = True
    """Whether its clients say in `max_tokens` how long the answer will be. Only a gateway could
    make use of it."""


def _nginx(binary: str, plan: Plan) -> list[str]:
    server = "proxy_set_header Connection close; proxy_buffering off;"
    return nginx(binary, plan, http="client_body_buffer_size 1m;", server=server)


def _haproxy(binary: str, plan: Plan) -> list[str]:
    defaults = "  option http-server-close\n  timeout queue 1h"
    return haproxy(binary, plan, defaults=defaults, server=f"maxconn {SLOTS}")


# All settings are the defaults.
_GATEWAY = replace(TARGETS["gateway"], command=lambda binary, plan: gateway(binary, plan, {}))
_HAPROXY = replace(TARGETS["haproxy"], command=_haproxy)

FRONTS = {
    front.name: front
    for front in (
        Front("gateway", "gateway, lengths known", _GATEWAY),
        Front("gateway-unknown", "gateway, lengths unknown", _GATEWAY, known=False),
        Front("nginx", "nginx least_conn", replace(TARGETS["nginx"], command=_nginx)),
        Front("haproxy", f"HAProxy leastconn, maxconn {SLOTS}", _HAPROXY),
    )
}
OURS = ("gateway", "gateway-unknown")
PEERS = ("nginx", "haproxy")
