from __future__ import annotations

from tests.hurry import hurried

__all__ = ["hurried"]
