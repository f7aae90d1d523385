"""Embeddings and reranking, with numbers that depend on the text alone."""

from __future__ import annotations

import base64
import math
import random
import struct
from typing import Any
from zlib import crc32

from tests.emulator.generation import Engine
from tests.emulator.language_model import count_tokens
from tests.emulator.request_body import RefusedError, bad_request, raw_prompts

EMBEDDING_SIZE = 16


def expected_embedding(text: str) -> list[float]:
    numbers = random.Random(crc32(text.encode(errors="replace")))
    vector = [numbers.uniform(-1, 1) for _ in range(EMBEDDING_SIZE)]
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector]


def expected_score(query: str, document: str) -> float:
    """The relevance score of a document, between 0 and 1."""
    return crc32(f"{query}\n{document}".encode(errors="replace")) / 2**32


async def embeddings(
    engine: Engine, body: dict[str, Any], *, native: bool
) -> dict[str, Any] | list[Any]:
    inputs = body.get("input", body.get("content"))
    if inputs is None:
        raise bad_request('"input" or "content" must be provided')
    texts = raw_prompts(inputs)
    tokens = await _read(engine, texts)
    vectors = [expected_embedding(text) for text in texts]
    if native:
        return [{"index": i, "embedding": [vector]} for i, vector in enumerate(vectors)]
    rows: list[dict[str, Any]] = [
        {"embedding": vector, "index": i, "object": "embedding"} for i, vector in enumerate(vectors)
    ]
    if body.get("encoding_format") == "base64":
        for row in rows:
            raw = struct.pack(f"<{EMBEDDING_SIZE}f", *row["embedding"])
            row |= {"embedding": base64.b64encode(raw).decode(), "encoding_format": "base64"}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": engine.model, "object": "list", "usage": usage, "data": rows}


async def rerank(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str):
        raise bad_request('"query" must be provided')
    if not isinstance(documents, list) or not documents:
        raise bad_request('"documents" must be a non-empty string array')
    tokens = await _read(engine, [f"{query}\n{document}" for document in documents])
    scores = [
        {"index": i, "relevance_score": expected_score(query, str(document))}
        for i, document in enumerate(documents)
    ]
    scores.sort(key=lambda row: row["relevance_score"], reverse=True)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    results = scores[: body.get("top_n") or len(scores)]
    return {"model": engine.model, "object": "list", "usage": usage, "results": results}


async def _read(engine: Engine, texts: list[str]) -> int:
    counts = [count_tokens(text) for text in texts]
    if max(counts) > engine.context:
        size = f"(current batch size: {engine.context})"
        message = f"input ({max(counts)} tokens) is too large to process. increase the physical"
        raise RefusedError(500, "server_error", f"{message} batch size {size}")
    for count in counts:
        await engine.read_only(count)
    return sum(counts)
