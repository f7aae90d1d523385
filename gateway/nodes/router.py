"""Routers: servers that hold many models and load them on demand."""

from __future__ import annotations

import enum


class LoadPhase(enum.Enum):
    """Whether a router has loaded one of its models."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # it ends its requests, gets no new ones, and is unloaded then
    UNLOADING = "unloading"
    FAILED = "failed"  # its load failed: it is not tried again before `retry_at`
