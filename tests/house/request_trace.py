"""Prints the modules that a streaming chat request enters, as JSON.

Run by its path with a checkout's root on `PYTHONPATH`: of the checkout it needs only
`tests/gateways.py`, `tests/emulator` and the functions that `STAGES` names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

STAGES: Mapping[str, frozenset[str]] = {
    "received": frozenset(
        {"_Exchange.serve", "_HandledRequest.serve", "HandledRequest.serve", "RequestHandler.serve"}
    ),
    "forwarded": frozenset(
        {"Relay.__call__", "Forwarder.__call__", "Forwarder.forward", "Forwarder.run"}
    ),
    "granted": frozenset({"Scheduler.lease_now", "Leases.grant"}),
    "closed": frozenset(
        {
            "_Exchange.close",
            "_HandledRequest.close",
            "_HandledRequest._close",
            "HandledRequest.close",
            "RequestHandler.close",
        }
    ),
}
"""The functions that mark each stage, by their qualified names at any time; add the new name when
one is renamed. The functions of the first two stages mark it when they are called, the others when
they return, that of `granted` with a value other than None; these must not be coroutines."""
STAGE_NAMES = tuple(STAGES)
REQUESTS = 12
"""The first request fills caches; the modules count that most of the later ones enter. One of them
may find an idle connection, and any may meet work of the clock."""
QUIET_SECONDS = 0.2
"""Before each request: what the one before has left to do is done by then."""


class ModuleTracer:
    """Records which modules of the gateway one request enters, and in which stage."""

    def __init__(self) -> None:
        self.stages_passed = 0
        """How many stages the request has passed."""
        self.entered: list[dict[str, None]] = [{} for _ in range(len(STAGE_NAMES) + 1)]
        """The modules entered, in order, by the number of stages passed before."""

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Called by `sys.setprofile`."""
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "gateway":
            return
        code = frame.f_code
        if event == "call":
            if (
                self.stages_passed < 2
                and code.co_qualname in STAGES[STAGE_NAMES[self.stages_passed]]
            ):
                self.stages_passed += 1
            # Neither generated methods of dataclasses nor modules that are imported count.
            if code.co_filename[:1] != "<" and code.co_name != "<module>":
                self.entered[self.stages_passed].setdefault(name)
        elif event == "return" and 2 <= self.stages_passed < len(STAGE_NAMES):
            wanted = code.co_qualname in STAGES[STAGE_NAMES[self.stages_passed]]
            if wanted and (value is not None or STAGE_NAMES[self.stages_passed] == "closed"):
                self.stages_passed += 1

    def between(self, first: int, last: int) -> list[str]:
        """Modules entered after `first` passed stages and before `last`, in order."""
        return list({name: None for part in self.entered[first:last] for name in part})


async def trace_requests() -> list[ModuleTracer]:
    """Send requests one after the other through a gateway and an emulated node."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with EmulatedNode() as node, running_gateway(Path(folder), [node.url]) as running:
            for number in range(REQUESTS):
                await asyncio.sleep(QUIET_SECONDS)
                tracer = ModuleTracer()
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
                if reply.status_code != 200 or tracer.stages_passed != len(STAGE_NAMES):
                    at = STAGE_NAMES[min(tracer.stages_passed, len(STAGE_NAMES) - 1)]
                    raise SystemExit(f"status {reply.status_code}; no function of the stage {at!r}")
                found.append(tracer)
    return found


def figures(found: Sequence[ModuleTracer]) -> dict[str, list[str]]:
    """The modules of each figure."""
    first, *others = found
    spans = {"to_lease": (1, 3), "forwarder_to_lease": (2, 3), "entered": (0, len(STAGE_NAMES) + 1)}
    lists = {}
    for name, (begin, end) in spans.items():
        entered = Counter(module for one in others for module in one.between(begin, end))
        lists[name] = [one for one, number in entered.items() if 2 * number > len(others)]
        lists[f"{name}_first"] = first.between(begin, end)
    return lists


if __name__ == "__main__":
    print(json.dumps(figures(asyncio.run(trace_requests()))))
