"""Predictions of a prompt cache against the reports of a real llama.cpp server."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gateway.api.tokens import read_usage
from gateway.lease import KeyedHash
from gateway.nodes.prompt_cache import FleetPromptCache
from gateway.request.prompt_key import BLOCK_BYTES, VolatileLines, build_prompt_key
from gateway.request.routes import ROUTES
from tests.servers import running_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow]

CHAT = "/v1/chat/completions"
WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are")
NODE = 3


@dataclass(slots=True)
class Turn:
    believed: float
    cached: int
    prompt: int
    block: float
    """Tokens of one block."""


KEYED_HASH = KeyedHash()


@dataclass
class Talk:
    """One conversation with one server, recorded in a prompt cache as the gateway does it."""

    url: str
    memory: FleetPromptCache
    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.name)
        self.messages.append({"role": "system", "content": f"{self.name}: {some_words(rng, 150)}"})
        self.rng = rng

    def say(self, words: int = 60) -> Turn:
        self.messages.append({"role": "user", "content": some_words(self.rng, words)})
        body = json.dumps(
            {"model": "demo", "messages": self.messages, "max_tokens": 80, "temperature": 0}
        ).encode()
        prompt = build_prompt_key(body, ROUTES[CHAT], "demo", VolatileLines(), KEYED_HASH)
        assert prompt is not None
        believed = self.memory.lookup(prompt).cached.get(NODE, 0.0)
        self.memory.request_placed(NODE, prompt)
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            reply = client.post(CHAT, content=body)
        assert reply.status_code == 200, reply.text
        usage = read_usage(reply.content)
        assert usage is not None
        self.memory.request_finished(
            NODE, prompt, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )
        answer = reply.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        block = usage.prompt_tokens * BLOCK_BYTES / prompt.size
        return Turn(believed, usage.cached_tokens, usage.prompt_tokens, block)


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.mark.smoke
def test_a_growing_conversation_is_found_after_other_requests() -> None:
    memory = FleetPromptCache()
    memory.resize(NODE, 2)
    with running_demo_servers(1, slots=2, context=4096) as [server]:
        home = Talk(server.url, memory, "home")
        turns = [home.say()]
        for i in range(3):
            # Enough other prompts to push it out of both slots, and then out of one only.
            for j in range(3 - i % 3):
                stranger = Talk(server.url, memory, f"stranger {i} {j}").say()
                assert stranger.believed < stranger.block
            turns.append(home.say())
    for turn in turns[1:]:
        assert turn.believed > 0.6 * turn.prompt
        assert abs(turn.believed - turn.cached) <= turn.block
    assert turns[0].believed == 0


def test_a_conversation_is_lost_when_a_similar_one_takes_its_slot() -> None:
    memory = FleetPromptCache()
    memory.resize(NODE, 1)
    with running_demo_servers(1, slots=1, context=4096) as [server]:
        first = Talk(server.url, memory, "shared")
        second = Talk(server.url, memory, "shared")
        second.rng.seed("another")
        first.say(20)
        taken = second.say(20)
        back = first.say(20)
    assert 0 < taken.cached < taken.prompt
    assert abs(taken.believed - taken.cached) <= taken.block
    assert abs(back.believed - back.cached) <= back.block
