"""An emulated router that records what it is asked, and answers otherwise where a test says so."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.response import Response
from tests.emulator.router import EmulatedRouter


class RecordedRouter(EmulatedRouter):
    """`asked` counts targets: method, path and query. `told` has other answers for some of them.

    An answer is a status and a body; None: the connection breaks off.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked = Counter[str]()
        self.told: dict[str, tuple[int, bytes] | None] = {}

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        target = f"{request.method} {request.path}"
        target += f"?{request.query}" if request.query else ""
        self.asked[target] += 1
        if target not in self.told:
            super().handle(connection, request)
        elif (answer := self.told[target]) is None:
            connection.reset()
        else:
            response = self._open(connection, request, Response)
            response.write_plain(*answer)
            connection.finished(response)

    def asked_of(self, model: str) -> Counter[str]:
        """What was asked of this model alone, by a query."""
        return Counter({one: n for one, n in self.asked.items() if f"model={model}&" in one})
