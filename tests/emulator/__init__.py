"""An emulated llama.cpp server, for the faults and the scale that real ones can't give.

    async with EmulatedNode(slots=2, prefill_tps=500, decode_tps=20) as node:
        node.faults.next("reset", after_events=3)        # the next request that asks for a slot
        node.faults.next("status", 2, status=503)        # the two after it
        node.faults.set("hang", path="/health")          # every one, until node.faults.clear()
        ...                                              # ask node.url
        await node.until(lambda: node.busy == 0)
        assert node.requests == 3

The answer's text follows from the prompt (`expected_text`, `expected_chat_text`). All kinds of
faults: `faults.ACTS`, `faults.WHOLE`, `faults.PRESETS`. As a process of its own, with the faults
switched over HTTP: `python -m tests.emulator` (see `desk.py`).
"""

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
