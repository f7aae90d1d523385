"""An emulated llama.cpp server, for faults and fleet sizes that real servers can't provide.

    async with EmulatedNode(slots=2, prefill_tps=500, decode_tps=20) as node:
        node.faults.next("reset", after_events=3)        # the next request that needs a slot
        node.faults.next("status", 2, status=503)        # the two requests after it
        node.faults.set("hang", path="/health")          # every request, until faults.clear()
        ...                                              # send requests to node.url
        await node.until(lambda: node.busy == 0)
        assert node.requests == 3

The prompt determines the answer's text (`expected_text`, `expected_chat_text`). All kinds of
faults: `faults.POINT_FAULTS`, `faults.RESPONSE_FAULTS`, `faults.PRESETS`. `python -m
tests.emulator` runs a node as a process of its own, whose faults are switched by commands
(`process.py`).

`router.py` emulates a router, a server of many models (`--models-dir`), with such a node for each.

A request passes `connection.py` (HTTP), `node.py` (routes), `request_body.py`, `slots.py` with
`prompt_cache.py`, and `generation.py` (speeds) with `language_model.py` (text) and `apis.py` (the
form of the answer), which writes it by `response.py` or, with a fault, `faulty_response.py`.
"""

from __future__ import annotations

from tests.emulator.embeddings import expected_embedding
from tests.emulator.language_model import expected_text
from tests.emulator.node import EmulatedNode
from tests.emulator.request_body import expected_chat_text

__all__ = ["EmulatedNode", "expected_chat_text", "expected_embedding", "expected_text"]
