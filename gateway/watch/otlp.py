"""Sends traces by OTLP over HTTP, in the messages that OpenTelemetry publishes (the extra `otel`).

They are built directly: OpenTelemetry's SDK and exporter took three times as many instructions for
each trace. Imported late, where traces are on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import httpx
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status

from gateway import __version__
from gateway.config.settings import TracesSettings
from gateway.watch.spans import Attribute, EndedRequest, spans_of

# Bytes of a collector's response that are read, so that its connection can be used again.
MOST_RESPONSE_BYTES = 64 * 1024
QUIET_SECONDS = 60.0  # seconds between two log lines about failures
# Seconds, give or take a fifth, before the second try; twice as long before each further one.
FIRST_BACKOFF = 1.0
# Statuses after which OTLP wants a message to be sent again.
RETRYABLE = frozenset({429, 502, 503, 504})

_KINDS = {
    "server": SpanMessage.SPAN_KIND_SERVER,
    "client": SpanMessage.SPAN_KIND_CLIENT,
    "internal": SpanMessage.SPAN_KIND_INTERNAL,
}

_SAMPLED = 1
_KNOWN = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
log = structlog.get_logger()


class OtlpSender:
    """Sends traces to one collector, and tries again as OTLP asks for.

    For one thread, which must not run an event loop: a try runs in one of its own, since only there
    can a limit end it whatever the collector does.
    """

    def __init__(
        self, settings: TracesSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert settings.endpoint is not None
        self._url, self._timeout = settings.endpoint, settings.timeout
        self._service, self._clock = settings.service_name, clock
        self._interrupted = threading.Event()
        self._quiet_until = -math.inf
        # The environment's proxies and passwords are not for this.
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            verify=ssl.create_default_context(cafile=settings.ca_file),
            trust_env=False,
            headers={
                "content-type": "application/x-protobuf",
                "user-agent": f"llama-gateway/{__version__}",
                **settings.header_fields(),
            },
        )

    def send(self, requests: Sequence[EndedRequest]) -> bool:
        """Send the spans of these requests; False if the collector did not take them in time."""
        body = encode(requests, self._service)
        deadline, backoff = self._clock() + self._timeout, FIRST_BACKOFF
        while True:
            wait, why = backoff * random.uniform(0.8, 1.2), ""
            try:
                status, retry_after = self._runner.run(self._post(body, deadline))
            except (httpx.HTTPError, TimeoutError) as error:
                why = type(error).__name__
            else:
                if status < 300:
                    return True
                why = f"status {status}"
                if status not in RETRYABLE:
                    return self._failed(why)
                wait = wait if retry_after is None else retry_after
            if self._clock() + wait >= deadline or self._interrupted.wait(wait):
                return self._failed(why)
            backoff *= 2

    def interrupt(self) -> None:
        """Give up what is being tried again, and try nothing any more."""
        self._interrupted.set()

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _post(self, body: bytes, deadline: float) -> tuple[int, float | None]:
        """Status and `Retry-After` of one try. Raises: httpx.HTTPError, TimeoutError."""
        request = self._client.build_request("POST", self._url, content=body, timeout=None)
        async with asyncio.timeout(max(0.001, deadline - self._clock())):
            response = await self._client.send(request, stream=True)
        try:
            # The status counts, however the rest of the response ends.
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(max(0.001, deadline - self._clock())):
                    # As it came: what it would decompress to is not bounded.
                    async for _ in response.aiter_raw():
                        if response.num_bytes_downloaded > MOST_RESPONSE_BYTES:
                            break
        finally:
            await response.aclose()
        return response.status_code, _seconds(response.headers.get("retry-after"))

    def _failed(self, why: str) -> bool:
        now = self._clock()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning("the collector takes no traces", url=self._url, why=why)
        return False


def encode(requests: Iterable[EndedRequest], service: str) -> bytes:
    """The message that has the spans of these requests."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    _set(resource.resource.attributes.add(key="service.name"), service)
    _set(resource.resource.attributes.add(key="service.version"), __version__)
    scope = resource.scope_spans.add()
    scope.scope.name, scope.scope.version = "llama-gateway", __version__
    add = scope.spans.add
    for request in requests:
        trace, offset = request.trace, request.clock_offset
        trace_id = bytes.fromhex(trace.trace_id)
        for span in spans_of(request):
            parent = span.parent_id
            flags = _SAMPLED | _KNOWN
            if parent is not None and parent == trace.parent_id:
                flags |= _REMOTE
            made = add(
                trace_id=trace_id,
                span_id=bytes.fromhex(span.span_id),
                parent_span_id=b"" if parent is None else bytes.fromhex(parent),
                name=span.name,
                kind=_KINDS[span.kind],
                start_time_unix_nano=offset + round(span.start * 1e9),
                end_time_unix_nano=offset + round(span.end * 1e9),
                flags=flags,
            )
            if span.error is not None:
                made.status.code = Status.STATUS_CODE_ERROR
                made.status.message = span.error
            attribute = made.attributes.add
            for key, value in span.attributes.items():
                # JSON, into which collectors turn them, has no infinite expectations.
                if not isinstance(value, float) or math.isfinite(value):
                    _set(attribute(key=key), value)
    data: bytes = message.SerializeToString()
    return data


def _set(attribute: KeyValue, value: Attribute) -> None:
    if isinstance(value, str):
        # Half of a surrogate pair, which a client may have sent, is no UTF-8.
        attribute.value.string_value = value.encode("utf-8", "replace").decode()
    elif isinstance(value, bool):
        attribute.value.bool_value = value
    elif isinstance(value, int):
        attribute.value.int_value = value
    elif isinstance(value, float):
        attribute.value.double_value = value
    else:
        for item in value:
            attribute.value.array_value.values.add(string_value=item)


def _seconds(retry_after: str | None) -> float | None:
    """A `Retry-After` in seconds; None: there is none, or it is a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
