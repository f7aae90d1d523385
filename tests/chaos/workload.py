"""The requests of the load, in the form of each API, with their expected answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.emulator import expected_chat_text, expected_embedding, expected_text
from tests.emulator.language_model import WORDS

EMULATED_MODEL, REAL_MODEL = "words", "demo"
MAX_TOKENS_FIELDS: dict[str, str] = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
}  # generating paths, each with the field that limits the answer's tokens
REAL_PROMPTS = (
    ("hello there", 20),
    ("what is a river", 60),
    ("tell me of the stones in the water and of the wind", 150),
    ("count the words that follow this", 300),
    ("the quick brown fox jumps over the lazy dog, and then again it does", 500),
)  # prompts for real servers, and the tokens of their answers


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    path: str
    body: dict[str, Any]
    text: str  # text of the complete answer; empty for an embedding
    tokens: int = 0
    vector: tuple[float, ...] = ()
    real: bool = False

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True


def emulated_request(rng: random.Random, *, seed: str) -> WorkloadRequest:
    """A random request to emulated nodes; no two have the same prompt."""
    words = " ".join(rng.choices(WORDS, k=rng.choice((2, 5, 20, 60))))
    prompt = f"{seed} {rng.getrandbits(32):x} {words}"
    if rng.random() < 0.1:
        body = {"model": EMULATED_MODEL, "input": prompt}
        return WorkloadRequest("/v1/embeddings", body, "", vector=tuple(expected_embedding(prompt)))
    path = rng.choice(list(MAX_TOKENS_FIELDS))
    tokens = rng.choice((1, 3, 10, 30, 60, 120))
    body = _body(path, prompt, tokens, rng) | {"model": EMULATED_MODEL}
    chat = [{"role": "user", "content": prompt}]
    raw = "prompt" in body
    text = expected_text(prompt, tokens) if raw else expected_chat_text(chat, tokens)
    return WorkloadRequest(path, body, text, tokens)


def real_request_bodies(prompts: int) -> list[tuple[str, dict[str, Any], int]]:
    """Path, body and answer tokens of every request to real servers: greedy, without cache."""
    rng = random.Random(4)
    requests = []
    for path in MAX_TOKENS_FIELDS:
        for prompt, tokens in REAL_PROMPTS[:prompts]:
            body = _body(path, prompt, tokens, rng)
            body.pop("stream", None)
            body.pop("stream_options", None)
            body |= {"model": REAL_MODEL, "temperature": 0, "seed": 1, "cache_prompt": False}
            requests.append((path, body, tokens))
    return requests


def real_request(rng: random.Random, references: Sequence[WorkloadRequest]) -> WorkloadRequest:
    """One of the reference requests, plain or streamed."""
    request = rng.choice(references)
    if rng.random() < 0.7:
        body = request.body | {"stream": True}
        return WorkloadRequest(request.path, body, request.text, request.tokens, real=True)
    return request


def _body(path: str, prompt: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {MAX_TOKENS_FIELDS[path]: tokens}
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
