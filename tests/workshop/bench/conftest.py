from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _heap_of_one_test() -> Iterator[None]:
    """Each load begins with a collection, which takes long where other tests have loaded much."""
    gc.freeze()
    yield
    gc.unfreeze()
