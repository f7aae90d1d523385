"""An emulated llama.cpp server, for the faults and the scale that real ones can't give."""

from __future__ import annotations

from tests.emulator.faults import Fault, FaultBoard
from tests.emulator.node import EmulatedNode
from tests.emulator.prompts import expected_chat_text, render_chat
from tests.emulator.vectors import expected_embedding, expected_score
from tests.emulator.words import expected_text

__all__ = [
    "EmulatedNode",
    "Fault",
    "FaultBoard",
    "expected_chat_text",
    "expected_embedding",
    "expected_score",
    "expected_text",
    "render_chat",
]
