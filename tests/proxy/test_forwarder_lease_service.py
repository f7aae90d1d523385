"""The proxy needs nothing of scheduler and fleet but the lease interface: here is another one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import EventBus, RequestFinished
from gateway.lease import Fault
from gateway.proxy.accounting import ProxyContext
from gateway.proxy.attempt import TimeoutMonitor
from gateway.proxy.forwarder import Forwarder
from gateway.proxy.in_flight import InFlightRequest
from gateway.request import Priority
from gateway.transport.node_pool import node_address
from gateway.transport.pool import ConnectionPool
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.proxy.fake_lease_service import FakeLeaseService, a_proxy_request

BODY = b'{"messages":[{"role":"user","content":"say something"}],"stream":true,"temperature":0}'


@dataclass
class Proxy:
    """A forwarder over emulated nodes whose slots a fake service gives."""

    nodes: list[EmulatedNode]
    leases: FakeLeaseService
    context: ProxyContext
    requests: list[InFlightRequest] = field(default_factory=list)

    async def stream(self) -> bytes:
        """The whole response to a streamed chat."""
        request = a_proxy_request(time.monotonic(), BODY)
        record = RequestFinished("req_1", request.path, "demo", Priority.NORMAL, "c", stream=True)
        in_flight = InFlightRequest(request, record)
        self.requests.append(in_flight)
        response = await Forwarder(self.context).forward(in_flight)
        assert response.status == 200
        assert response.body_stream is not None
        body = response.content
        while chunk := await response.body_stream.next_chunk():
            body += chunk
        response.body_stream.close()
        self.context.bus.flush()
        return body


@asynccontextmanager
async def proxy_with_fake(*nodes: EmulatedNode) -> AsyncIterator[Proxy]:
    stack = AsyncExitStack()
    for node in nodes:
        await stack.enter_async_context(node)
    pools = [ConnectionPool(node_address(a_spec(url=node.url))) for node in nodes]
    leases = FakeLeaseService(zip("abc", pools, strict=False))
    settings = Settings.model_validate({"retries": {"backoff": 0.0, "backoff_max": 0.0}})
    monitor = TimeoutMonitor(time.monotonic)
    context = ProxyContext(leases, settings, EventBus(), monitor, time.monotonic)
    try:
        yield Proxy(list(nodes), leases, context)
        assert not leases.held
        assert not len(monitor)
    finally:
        monitor.close()
        for pool in pools:
            pool.close()
        await stack.aclose()


async def test_a_stream_is_reported_from_its_head_to_its_usage() -> None:
    async with proxy_with_fake(EmulatedNode(answer_tokens=9)) as proxy:
        assert (await proxy.stream()).endswith(b"data: [DONE]\n\n")
        leases = proxy.leases
        assert leases.progress == [("reading", 1), ("content", 1)]
        (report,) = leases.reports
        assert (report.lease_id, report.outcome, report.status) == (1, "ok", 200)
        assert (report.sent, report.node_done, report.response_began) == (True, True, True)
        assert (report.fault, report.error, report.unreachable) == (Fault.NOBODY, None, None)
        (usage,) = leases.usages
        assert usage.reported is not None
        assert usage.reported.completion_tokens == usage.attempt.completion_tokens == 9
        assert proxy.requests[0].record.cost == 0.5


async def test_a_node_that_is_gone_is_to_blame_and_another_is_asked_for() -> None:
    gone, other = EmulatedNode(), EmulatedNode()
    async with proxy_with_fake(gone, other) as proxy:
        await gone.kill()
        assert b"[DONE]" in await proxy.stream()
        failed, ended = proxy.leases.reports
        assert (failed.outcome, failed.fault, failed.sent) == ("connect_failed", Fault.NODE, False)
        assert failed.unreachable is not None
        assert ended.outcome == "ok"
        assert ("answered", 2) in proxy.leases.progress
        (_, nothing), (_, tried) = proxy.leases.asked
        assert not nothing.failed_nodes
        assert tried.failed_nodes == {"a"}


@pytest.mark.parametrize(
    ("status", "outcome"), [(503, "busy"), (429, "busy"), (401, "refused"), (500, "server_error")]
)
async def test_an_error_response_is_reported_with_its_status(status: int, outcome: str) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    async with proxy_with_fake(one, two) as proxy:
        one.faults.next("status", status=status, body="{}")
        assert b"[DONE]" in await proxy.stream()
        failed, _ = proxy.leases.reports
        assert (failed.outcome, failed.status, failed.fault) == (outcome, status, Fault.NOBODY)
        assert (failed.node_done, failed.response_began) == (True, False)


async def test_a_stream_whose_node_dies_is_resumed_under_another_lease() -> None:
    one, two = EmulatedNode(answer_tokens=20), EmulatedNode(answer_tokens=20)
    async with proxy_with_fake(one, two) as proxy:
        one.faults.next("reset", after_events=5)
        assert b"[DONE]" in await proxy.stream()
        died, ended = proxy.leases.reports
        assert (died.outcome, died.fault) == ("reset", Fault.NODE_OR_REQUEST)
        assert (died.response_began, died.node_done) == (True, False)
        assert (ended.outcome, ended.response_began) == ("ok", True)
        request, tried = proxy.leases.asked[-1]
        assert request.resume_key == ("model",)
        assert tried.excluded_nodes == {"a"}


async def test_an_error_of_the_service_is_the_clients() -> None:
    async with proxy_with_fake(EmulatedNode()) as proxy:
        proxy.leases.nodes.clear()
        with pytest.raises(GatewayError) as raised:
            await proxy.stream()
        assert raised.value.code == "no_node"
