"""Tests of the edge's HTTP run as those of its endpoints do."""

from __future__ import annotations

from tests.http.authority import authority
from tests.hurry import hurried
from tests.web.conftest import gate, pytest_asyncio_loop_factories, shared_gateway

__all__ = ["authority", "gate", "hurried", "pytest_asyncio_loop_factories", "shared_gateway"]
