"""Requests to a server on this machine, with a timeout for when the machine is busy."""

from __future__ import annotations

from typing import Any

import httpx

TIMEOUT = 120.0  # seconds


def get(url: str, **options: Any) -> httpx.Response:
    """GET on a new connection."""
    return httpx.get(url, timeout=TIMEOUT, trust_env=False, **options)


def post(url: str, **options: Any) -> httpx.Response:
    """POST on a new connection."""
    return httpx.post(url, timeout=TIMEOUT, trust_env=False, **options)
