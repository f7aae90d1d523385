from __future__ import annotations

import pytest

from tests.hurry import hurried

__all__ = ["hurried"]


@pytest.fixture(autouse=True)
def _traces_come_soon(hurried: None) -> None:
    """Tests need not wait for a full batch."""
