from __future__ import annotations

import hashlib
from pathlib import Path

from gateway.local.demo_model import (
    BARE_WORDS,
    SPACE_MARK,
    TRAINED_CONTEXT,
    WORDS,
    TokenType,
    ensure_demo_model,
    vocabulary,
)
from gateway.local.gguf import read_model

DIGEST = "10da5477ee65e120e29e483324a53f2aa8138a7174e6520b950fd961edd0975f"


def test_the_model_has_the_same_bytes_everywhere(tmp_path: Path) -> None:
    path = ensure_demo_model(tmp_path)
    # Changed on purpose? Then raise FILE_VERSION, so that old files are not reused.
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGEST
    assert path.name == "demo-small-v2.gguf"
    model = read_model(path, "demo")
    assert 3_000_000 < model.size < 4_500_000
    assert model.trained_context == TRAINED_CONTEXT
    # It is written once.
    before = path.stat()
    assert ensure_demo_model(tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_every_word_byte_and_ascii_character_can_be_reached() -> None:
    tokens = vocabulary()
    texts = {token.text for token in tokens}
    assert len(texts) == len(tokens)
    assert {chr(code) for code in range(0x21, 0x7F)} < texts
    assert sum(token.kind is TokenType.BYTE for token in tokens) == 256
    for word in (*(SPACE_MARK + word for word in WORDS), *BARE_WORDS):
        assert all(word[:end] in texts for end in range(1, len(word) + 1))
