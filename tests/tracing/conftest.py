from __future__ import annotations

import pytest

from gateway.tracing.export import TraceExporter


@pytest.fixture(autouse=True)
def _traces_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests need not wait for a full batch."""
    defaults = TraceExporter.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "batch_seconds", 0.1)
