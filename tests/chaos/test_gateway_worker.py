from __future__ import annotations

from tests.chaos.gateway_worker import REQUEST_OBJECTS
from tests.house.module_figures import class_names
from tests.house.source import ROOT, modules


def test_the_leak_check_counts_classes_that_the_gateway_has() -> None:
    known = {name for module in modules(ROOT) for name in class_names(module.tree)}
    assert set(REQUEST_OBJECTS) <= known
