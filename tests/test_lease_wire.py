"""The messages of the lease interface are plain values: they could pass over a wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway import lease
from gateway.lease import (
    AttemptCharge,
    AttemptReport,
    BatchRoom,
    ExpectedReading,
    Fault,
    LeaseCaller,
    LeaseRequest,
    NodeError,
    NodeInfo,
    PromptKey,
    QueuePosition,
    RequestSize,
    Tried,
    Usage,
    UsageReport,
    WantedNode,
)
from tests.forward.granted_lease import a_granted_lease, a_node_info
from tests.lease_requests import a_lease_request

USAGE = Usage(12, 3, 40, {"prompt_n": 9, "predicted_ms": 812.5})
REQUEST = a_lease_request(
    prompt_key=PromptKey((1,), 1.0), resume_key=("model", None), time_limit=3.5
)
MESSAGES: list[Any] = [
    PromptKey((1, -2), 100.0, (200, 400), 410),
    REQUEST,
    REQUEST.caller,
    REQUEST.wanted,
    REQUEST.size,
    Tried().failed_on("a").refused_by("b").unsupported_by("c", "start it with --rerank"),
    QueuePosition("req_1", 3, 1.5),
    BatchRoom(16, 3, 2, 1, 4),
    a_node_info(silence_timeout=20.0, resume_key=("model", "Q4_0"), query="autoload=false"),
    a_granted_lease(fallback="gpu_full", seconds=2.5),
    ExpectedReading(40, 2.5, 30.0),
    NodeError(retry_after=2.0, lacks_endpoint=True, hint="start it with --embeddings"),
    AttemptReport(7, "reset", 200, True, False, True, Fault.NODE_OR_REQUEST),
    AttemptReport(8, "busy", 503, True, True, False, error=NodeError(is_loading=True)),
    USAGE,
    UsageReport(7, USAGE, None, 41),
    AttemptCharge(0.25, 12.5, 400, 100, 7),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_a_wire(message: Any) -> None:
    received = msgspec.json.decode(msgspec.json.encode(message), type=type(message))
    assert msgspec.to_builtins(received) == msgspec.to_builtins(message)


def test_every_message_is_tested() -> None:
    messages = {
        one
        for one in vars(lease).values()
        if isinstance(one, type) and (issubclass(one, msgspec.Struct) or one is Tried)
    }
    assert messages - {msgspec.Struct} == {type(message) for message in MESSAGES}


def test_only_a_nodes_connections_ride_along_within_a_process() -> None:
    info = a_node_info(connections=object())
    with pytest.raises(TypeError):
        msgspec.json.encode(info)
    plain = replace(info, connections=None)
    assert msgspec.json.decode(msgspec.json.encode(plain), type=NodeInfo).name == info.name


def test_a_lease_request_says_nothing_of_what_it_is_about() -> None:
    """Neither its path and headers nor its text: they are the proxy's."""
    parts = (LeaseRequest, LeaseCaller, WantedNode, RequestSize)
    fields = {one.name for part in parts for one in msgspec.structs.fields(part)}
    assert not fields & {"path", "header_lines", "body", "bodies", "prompt", "messages", "deadline"}
