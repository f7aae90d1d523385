"""Questions to a server of this machine, which may stand still before it answers."""

from __future__ import annotations

from typing import Any

import httpx

LIMIT = 120.0  # seconds


def get(url: str, **options: Any) -> httpx.Response:
    """GET on a connection of its own."""
    return httpx.get(url, timeout=LIMIT, trust_env=False, **options)


def post(url: str, **options: Any) -> httpx.Response:
    """POST on a connection of its own."""
    return httpx.post(url, timeout=LIMIT, trust_env=False, **options)
