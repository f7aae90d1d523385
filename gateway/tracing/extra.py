"""Whether the packages of the extra `otel` are installed; asks without importing them."""

from __future__ import annotations

import importlib.util

_MODULE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


def has_otel() -> bool:
    """Whether traces can be exported."""
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False
