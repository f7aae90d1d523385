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

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(slots=True)
class Collector:
    """What has come, and how it answers."""

    port: int = 0
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    """Of every request; empty: it never answers."""
    drips: bool = False
    """After its answer comes one more byte each 50 ms, without end."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def named(self, name: str, trace_id: str | None = None) -> list[ReceivedSpan]:
        """Spans of this name in the order of their beginning."""
        found = [
            span
            for span in self.spans
            if span.name == name and (trace_id is None or span.trace_id == trace_id)
        ]
        return sorted(found, key=lambda span: span.start)

    def children(self, of: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.parent_id == of.span_id]
        return sorted(found, key=lambda span: span.start)

    def roots(self) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.kind == "server"]

    async def until_roots(self, count: int) -> list[ReceivedSpan]:
        """The requests' own spans, once there are so many."""
        await until(lambda: len(self.roots()) >= count, LIMIT, lambda: self.spans)
        return self.roots()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection."""
        self.connections += 1
        self._open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next(
                    int(line.partition(":")[2])
                    for line in head.lower().splitlines()
                    if line.startswith("content-length:")
                )
                body = await reader.readexactly(length)
                self.heads.append(head)
                self.bodies.append(body)
                if self.answer.startswith(b"HTTP/1.1 200"):
                    self.spans += decoded(body)
                if self.answer:
                    writer.write(self.answer)
                    await writer.drain()
                while self.drips:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
        self._open.discard(writer)
        writer.close()

    def drop_connections(self) -> None:
        """End those that are open."""
        for writer in self._open:
            writer.transport.abort()


def decoded(body: bytes) -> list[ReceivedSpan]:
    """The spans of a message."""
    message = ExportTraceServiceRequest.FromString(body)
    found = []
    for resource in message.resource_spans:
        service = next(
            value.value.string_value
            for value in resource.resource.attributes
            if value.key == "service.name"
        )
        for scope in resource.scope_spans:
            found += [
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
                    service,
                )
                for span in scope.spans
            ]
    return found


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    collector.port = server.sockets[0].getsockname()[1]
    try:
        yield collector
    finally:
        server.close()
        collector.drop_connections()
        await asyncio.sleep(0)
