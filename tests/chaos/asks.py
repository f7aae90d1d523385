"""What is asked, in each dialect, and what the answer to it must be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.emulator import expected_chat_text, expected_embedding, expected_text
from tests.emulator.words import WORDS

EMULATED = "words"
REAL = "demo"
EMBEDDING_SIZE = 16

GENERATING: dict[str, str] = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
}
"""Paths, each with the field that bounds its answer."""
EMBEDDINGS = "/v1/embeddings"

_REAL_PROMPTS = (
    "hello there",
    "what is a river",
    "tell me of the stones in the water and of the wind",
    "count the words that follow this",
    "the quick brown fox jumps over the lazy dog, and then again it does",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, with what must come back."""

    path: str
    body: dict[str, Any]
    text: str
    """The whole answer's text; empty for an embedding."""
    tokens: int = 0
    vector: tuple[float, ...] = ()
    real: bool = False

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True


def emulated(rng: random.Random, *, seed: str) -> Ask:
    """Anything that the emulated nodes can be asked; no two prompts are the same."""
    words = " ".join(rng.choices(WORDS, k=rng.choice((2, 5, 20, 60))))
    prompt = f"{seed} {rng.getrandbits(32):x} {words}"
    if rng.random() < 0.1:
        vector = tuple(expected_embedding(prompt, EMBEDDING_SIZE))
        return Ask(EMBEDDINGS, {"model": EMULATED, "input": prompt}, "", vector=vector)
    path = rng.choice(list(GENERATING))
    tokens = rng.choice((1, 3, 10, 30, 60, 120))
    body = _body(path, prompt, tokens, rng) | {"model": EMULATED}
    if "messages" in body or "input" in body:
        text = expected_chat_text([{"role": "user", "content": prompt}], tokens)
    else:
        text = expected_text(prompt, tokens)
    return Ask(path, body, text, tokens)


PROMPTS = len(_REAL_PROMPTS)


def real_bodies(prompts: int = PROMPTS) -> list[tuple[str, dict[str, Any], int]]:
    """Path, body and tokens of all that the real servers are asked. Greedy, nothing cached.

    The last of the prompts have the longest answers.
    """
    rng = random.Random(4)
    asks = []
    for path in GENERATING:
        for number, prompt in enumerate(_REAL_PROMPTS[:prompts]):
            tokens = (20, 60, 150, 300, 500)[number]
            body = _body(path, prompt, tokens, rng)
            body.pop("stream", None)
            body.pop("stream_options", None)
            body |= {"model": REAL, "temperature": 0, "seed": 1, "cache_prompt": False}
            asks.append((path, body, tokens))
    return asks


def real(rng: random.Random, references: Sequence[Ask]) -> Ask:
    """One of these, plain or streamed."""
    ask = rng.choice(references)
    if rng.random() < 0.7:
        body = ask.body | {"stream": True}
        return Ask(ask.path, body, ask.text, ask.tokens, real=True)
    return ask


def _body(path: str, prompt: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {GENERATING[path]: tokens}
    if path == "/v1/responses":
        body["input"] = prompt
    elif path in {"/v1/chat/completions", "/v1/messages"}:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if rng.random() < 0.7:
        body["stream"] = True
        if path in {"/v1/chat/completions", "/v1/completions"} and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if path == "/v1/chat/completions" and rng.random() < 0.2:
        body["temperature"] = 0
    return body
