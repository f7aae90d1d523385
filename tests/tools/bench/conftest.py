from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _heap_of_one_test() -> Iterator[None]:
    """Each load begins with a collection: half a second, if all that other tests have loaded is in it."""
    gc.freeze()
    yield
    gc.unfreeze()
