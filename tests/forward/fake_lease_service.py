"""A lease service in memory: nodes in a list, a slot each, and everything that is reported."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

from gateway.errors import GatewayError
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptCharge,
    AttemptReport,
    GrantedLease,
    LeaseRequest,
    NodeInfo,
    Tried,
    UsageReport,
)
from gateway.request.preparation import Request
from gateway.terms import Caller, Priority
from gateway.transport.pool import ConnectionPool
from tests.lease_requests import a_lease_request

CALLER = Caller("c", "c", Priority.NORMAL)


def a_node_info(name: str = "a", **keys: Any) -> NodeInfo:
    """A node without exceptions to the settings."""
    values = {"connect_timeout": None, "first_byte_timeout": None, "silence_timeout": None,
              "total_timeout": None, "context": 4096, "resume_key": ()}  # fmt: skip
    return NodeInfo(name, "cpu", "llama.cpp", **{**values, **keys})


def a_granted_lease(**keys: Any) -> GrantedLease:
    """A lease on a node without connections."""
    return GrantedLease(
        **{
            "id": 1,
            "node": a_node_info(),
            "model": "demo",
            "served_name": "demo",
            "slots": 1,
            "stream": True,
            "prefill_grace": 0.0,
            "expected_prefill": None,
            **keys,
        }
    )


def a_proxy_request(received_at: float = 0.0, body: bytes = b"{}", **keys: Any) -> Request:
    """The request of a streamed chat."""
    return Request(
        "req_1",
        "req_1",
        "/v1/chat/completions",
        b"content-type: application/json\r\n",
        {"demo": body},
        None,
        CALLER,
        received_at,
        a_lease_request(**{"stream": True, **keys}),
        stream=True,
    )


class FakeLeaseService:
    """Grants the first free node that has not failed the request."""

    def __init__(self, pools: Iterable[tuple[str, ConnectionPool]]) -> None:
        self.nodes = [
            a_node_info(name, resume_key=("model",), connections=pool) for name, pool in pools
        ]
        self.held: dict[int, NodeInfo] = {}
        """The nodes of leases that have not ended."""
        self.asked: list[tuple[LeaseRequest, Tried]] = []
        self.reports: list[AttemptReport] = []
        self.usages: list[UsageReport] = []
        self.progress: list[tuple[str, int]] = []
        """What was reported of attempts under way, and of which lease."""
        self._freed = asyncio.Event()
        self._ids = itertools.count(1)

    def lease_now(self, request: LeaseRequest, tried: Tried, age: float) -> GrantedLease | None:
        assert age >= 0.0
        self.asked.append((request, tried))
        busy = {node.name for node in self.held.values()}
        for node in self.nodes:
            if node.name not in tried.failed_nodes | tried.excluded_nodes | busy:
                lease_id = next(self._ids)
                self.held[lease_id] = node
                return a_granted_lease(id=lease_id, node=node)
        return None

    async def wait_for_lease(
        self, request: LeaseRequest, tried: Tried, age: float, *, response_started: bool = False
    ) -> GrantedLease:
        if not self.has_other_node(request, tried):
            raise GatewayError(503, "no_node", "Every node has failed it.")
        while (granted := self.lease_now(request, tried, age)) is None:
            self._freed.clear()
            await self._freed.wait()
        return granted

    def keep_in_queue(self, request_id: str) -> None:
        pass

    def has_other_node(
        self, request: LeaseRequest, tried: Tried, *, but_paused: bool = False
    ) -> bool:
        return any(
            node.name not in tried.failed_nodes | tried.excluded_nodes for node in self.nodes
        )

    def has_larger_context(self, request: LeaseRequest, tried: Tried) -> bool:
        return False

    def has_cpu_node(self, request: LeaseRequest, tried: Tried) -> bool:
        return True

    def unsupported_error(self, request: LeaseRequest, tried: Tried) -> GatewayError | None:
        return None

    def resume_key_of(self, props: object) -> tuple[object, ...]:
        return ("model",)

    def most_slots_of_a_host(self) -> int:
        return len(self.nodes)

    def reading_began(self, lease_id: int) -> None:
        self.progress.append(("reading", lease_id))

    def pool_overflowed(self, lease_id: int) -> bool:
        return True

    def content_began(self, lease_id: int) -> None:
        self.progress.append(("content", lease_id))

    def content_went_on(self, lease_id: int, tokens: int) -> None:
        pass

    def response_received(self, lease_id: int) -> None:
        pass

    def answered(self, lease_id: int) -> None:
        self.progress.append(("answered", lease_id))

    def is_silence_excused(self, lease_id: int) -> bool:
        return False

    def ended(self, report: AttemptReport) -> AttemptCharge:
        del self.held[report.lease_id]
        self.reports.append(report)
        self._freed.set()
        return NOTHING_CHARGED

    def settle(self, report: UsageReport, request: LeaseRequest) -> AttemptCharge:
        self.usages.append(report)
        return AttemptCharge(0.5, 2.0)
