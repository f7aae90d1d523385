"""Tests of the edge's HTTP run as those of its endpoints do."""

from __future__ import annotations

from tests.http.authority import authority
from tests.web.conftest import gate, hurried, pytest_asyncio_loop_factories, shared_gateway

__all__ = ["authority", "gate", "hurried", "pytest_asyncio_loop_factories", "shared_gateway"]
