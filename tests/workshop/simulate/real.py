"""Requests to a real server, and the figures it reports: what the model is compared with."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

BATCH = 512  # what `gateway/local/embedded.py` starts servers with


@dataclass
class Answer:
    """The result of one request."""

    slot: int = 0
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    progress: list[int] = field(default_factory=list)
    """Prompt tokens that the slot had, at first and after each prefill step."""
    took: float = 0.0  # seconds

    @property
    def pieces(self) -> list[int]:
        """Tokens of the prompt that each step read."""
        return [after - before for before, after in pairwise(self.progress)]

    @property
    def steps(self) -> int:
        """Steps of the server: the last one of the prefill gives the first token."""
        return len(self.pieces) + len(self.ids) - 1


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], output: int) -> Answer:
    """Send one request and read it to its end."""
    body = {
        "prompt": prompt,
        "n_predict": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
    }
    answer, sent = Answer(), time.monotonic()
    async with client.stream("POST", f"{url}/completion", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if progress := event.get("prompt_progress"):
                answer.progress.append(progress["processed"])
                continue
            answer.ids += event["tokens"]
            if event["stop"]:
                answer.took = time.monotonic() - sent
                answer.timings = event["timings"]
                answer.slot, answer.cached = event["id_slot"], event["timings"]["cache_n"]
                return answer
    raise AssertionError("the stream has no end")


def words(rng: random.Random, count: int) -> list[int]:
    """Tokens of the demo model's vocabulary, without control tokens."""
    return [rng.randrange(300, 900) for _ in range(count)]


async def computed(client: httpx.AsyncClient, url: str) -> tuple[int, int]:
    """Steps that the server has computed so far, and the sum of the slots busy in each."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    reported = dict(line.split() for line in lines if not line.startswith("#"))
    steps = int(float(reported["llamacpp:n_decode_total"]))
    return steps, round(steps * float(reported["llamacpp:n_busy_slots_per_decode"]))
