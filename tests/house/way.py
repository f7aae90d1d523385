"""Which modules a streaming chat request enters: prints them as JSON.

Run by its path with a checkout's root on `PYTHONPATH`: it needs no more of the checkout than
`tests/gateways.py`, `tests/emulator` and the functions that `MARKS` names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

MARKS: Mapping[str, frozenset[str]] = {
    "received": frozenset(
        {"_Exchange.serve", "_HandledRequest.serve", "Exchange.serve", "Handler.serve"}
    ),
    "asked": frozenset({"Relay.__call__", "Forwarder.__call__", "Forwarder.forward"}),
    "granted": frozenset({"Scheduler.lease_now", "LeaseGranter.granted", "LeaseGranter.grant"}),
    "over": frozenset(
        {"_Exchange.close", "_HandledRequest.close", "Exchange.close", "Handler.close"}
    ),
}
"""Functions, by their qualified names of any time. The first two are entered; the others return,
the third with something other than None, and neither may be a coroutine. Add a name here when one
is changed."""
ORDER = tuple(MARKS)
REQUESTS = 6
"""The first enters what is learnt once; of the others, what all of them enter counts."""


class Tracer:
    """Notes the modules of the gateway that are entered, and where in its way a request is."""

    def __init__(self) -> None:
        self.passed = 0
        """How many of the marks."""
        self.entered: list[dict[str, None]] = [{} for _ in range(len(ORDER) + 1)]
        """Modules by the marks that were passed before, in order."""

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """As `sys.setprofile` wants it."""
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "gateway":
            return
        code = frame.f_code
        if event == "call":
            if self.passed < 2 and code.co_qualname in MARKS[ORDER[self.passed]]:
                self.passed += 1
            # What dataclasses write has no file; what is run at import is no step of a request.
            if code.co_filename[:1] != "<" and code.co_name != "<module>":
                self.entered[self.passed].setdefault(name)
        elif event == "return" and 2 <= self.passed < len(ORDER):
            wanted = code.co_qualname in MARKS[ORDER[self.passed]]
            if wanted and (value is not None or ORDER[self.passed] == "over"):
                self.passed += 1

    def between(self, first: int, last: int) -> list[str]:
        """Modules entered after so many marks and before so many."""
        return list({name: None for part in self.entered[first:last] for name in part})


async def traced() -> list[Tracer]:
    """Send the requests one after the other through a gateway of its own."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with EmulatedNode() as node, running_gateway(Path(folder), [node.url]) as running:
            for number in range(REQUESTS):
                tracer = Tracer()
                body = {
                    "messages": [{"role": "user", "content": f"hello {number}"}],
                    "max_tokens": 8,
                    "stream": True,
                }
                sys.setprofile(tracer)
                try:
                    path = "/v1/chat/completions"
                    async with running.client.stream("POST", path, json=body) as reply:
                        await reply.aread()
                finally:
                    sys.setprofile(None)
                if reply.status_code != 200 or tracer.passed != len(ORDER):
                    at = ORDER[min(tracer.passed, len(ORDER) - 1)]
                    raise SystemExit(f"status {reply.status_code}; no function marked {at!r}")
                found.append(tracer)
    return found


def told(found: Sequence[Tracer]) -> dict[str, list[str]]:
    """The modules by figure."""
    first, *others = found
    spans = {"to_lease": (1, 3), "asked_to_lease": (2, 3), "entered": (0, len(ORDER) + 1)}
    lists = {}
    for name, (begin, end) in spans.items():
        both = [set(one.between(begin, end)) for one in others]
        kept = set.intersection(*both)
        lists[name] = [one for one in others[0].between(begin, end) if one in kept]
        lists[f"{name}_first"] = first.between(begin, end)
    return lists


if __name__ == "__main__":
    print(json.dumps(told(asyncio.run(traced()))))
