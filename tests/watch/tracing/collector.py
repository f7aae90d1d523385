"""A collector for tests: takes traces by OTLP over HTTP, and can fail as a real one does.

It decodes with the protobuf messages that OpenTelemetry publishes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as PbSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.gateways import until
from tests.transport.raw import Peer, raw_server

LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span; ids in hexadecimal digits, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool
    service: str


@dataclass(slots=True)
class Collector:
    """What has come, and how it answers."""

    url: str = ""
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    """Of every request; empty: it never answers."""
    drips: bool = False
    """After its answer comes one more byte each 50 ms, without end."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        """Spans of this name in the order of their beginning."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start)

    def children(self, of: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.parent_id == of.span_id]
        return sorted(found, key=lambda span: span.start)

    async def roots(self, count: int) -> list[ReceivedSpan]:
        """The requests' own spans, once there are so many."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans if span.kind == "server"]

        await until(lambda: len(found()) >= count, LIMIT, lambda: self.spans)
        return found()

    async def serve(self, peer: Peer) -> None:
        """Requests of one connection."""
        while True:
            head, _, body = (await peer.request()).partition(b"\r\n\r\n")
            self.heads.append(head.decode("latin-1"))
            self.bodies.append(body)
            if self.answer.startswith(b"HTTP/1.1 200"):
                self.spans += decoded(body)
            await peer.say(self.answer)
            while self.drips:
                await peer.say(b"x")
                await asyncio.sleep(0.05)


def decoded(body: bytes) -> list[ReceivedSpan]:
    """The spans of a message."""
    return [
        ReceivedSpan(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            PbSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {one.key: _value(one.value) for one in span.attributes},
            span.status.code == Status.StatusCode.STATUS_CODE_ERROR,
            {one.key: _value(one.value) for one in of.resource.attributes}["service.name"],
        )
        for of in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()
    async with raw_server(collector.serve) as server:
        collector.url = f"http://127.0.0.1:{server.port}/v1/traces"
        yield collector
