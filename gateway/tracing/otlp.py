"""Sends traces by OTLP over HTTP, with OpenTelemetry's own exporter (the extra `otel`).

Imported late: it takes a tenth of a second, and only where traces are on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway import __version__
from gateway.config.telemetry import TracesSettings
from gateway.tracing.spans import EndedRequest, Span, spans_of

MOST_RESPONSE_BYTES = 64 * 1024
"""Bytes of a collector's response that are read: an error's text, which nobody needs."""

QUIET_SECONDS = 60.0
"""Seconds between two log lines about failures."""

_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

_KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

_OK = Status(StatusCode.UNSET)


class OtlpSender:
    """Sends traces to one collector; the exporter tries again as its specification says."""

    def __init__(self, settings: TracesSettings) -> None:
        assert settings.endpoint is not None
        self._resource = _GatewayResource(
            {"service.name": settings.service_name, "service.version": __version__}
        )
        self._scope = InstrumentationScope("llama-gateway", __version__)
        _calm(logging.getLogger(_LOGGER))
        ca_file = settings.ca_file
        self._exporter = OTLPSpanExporter(
            settings.endpoint,
            certificate_file=None if ca_file is None else str(ca_file),
            headers=settings.header_fields(),
            timeout=settings.timeout,
            session=_BoundedSession(),
        )

    def send(self, requests: Sequence[EndedRequest]) -> bool:
        """Send the spans of these requests; False if the collector did not take them."""
        spans = [span for request in requests for span in self._spans(request)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def interrupt(self) -> None:
        """Give up what is being tried again, and try nothing any more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, request: EndedRequest) -> Iterator[ReadableSpan]:
        trace = request.trace
        trace_id, offset = int(trace.trace_id, 16), request.clock_offset
        for span in spans_of(request):
            parent = None
            if span.parent_id is not None:
                remote = span.parent_id == trace.parent_id
                parent = SpanContext(trace_id, int(span.parent_id, 16), remote, _SAMPLED)
            yield ReadableSpan(
                span.name,
                context=SpanContext(
                    trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED
                ),
                parent=parent,
                resource=self._resource,
                attributes=_finite(span),
                kind=_KINDS[span.kind],
                status=_OK if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=offset + round(span.start * 1e9),
                end_time=offset + round(span.end * 1e9),
                instrumentation_scope=self._scope,
            )


def _finite(span: Span) -> Mapping[str, Any]:
    """Its attributes without expectations that have no bound, which JSON could not hold."""
    return {
        key: value
        for key, value in span.attributes.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


class _GatewayResource(Resource):
    """Equal only to itself: its hash, which the exporter wants for every span, costs nothing.

    That of a `Resource` is computed from JSON each time: a tenth of what a span costs.
    """

    __hash__ = object.__hash__


class _BoundedSession(requests.Session):
    """Speaks to the collector itself, whatever the environment says of proxies and passwords.

    It reads little of what the collector answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        response = super().request(*arguments, **{**options, "stream": True})
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) <= MOST_RESPONSE_BYTES:
            # To its end, even of nothing: else the connection could not be used again.
            response.raw.read(decode_content=False)
            response.raw.release_conn()
        else:
            response.close()
        return response


class _Calm(logging.Filter):
    """Lets one failure in `QUIET_SECONDS` pass, and no word about what is tried again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if record.levelno < logging.ERROR or now < self._next:
            return False
        self._next = now + QUIET_SECONDS
        return True


def _calm(logger: logging.Logger) -> None:
    for one in list(logger.filters):
        if isinstance(one, _Calm):
            logger.removeFilter(one)
    logger.addFilter(_Calm())
