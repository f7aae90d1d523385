from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.watch.written import Written


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    log = Written(tmp_path / "log")
    yield log
    if log.logs is not None:
        log.logs.close()
    os.close(log.fd)
