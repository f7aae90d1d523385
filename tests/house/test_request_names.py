from __future__ import annotations

import pytest

from tests.house.sample_checkout import Tree
from tests.house.source import modules

VALUE = {
    "gateway/request.py": "class Request:\n    id = ''\n",
    "gateway/tools/__init__.py": "",
    "gateway/tools/ask.py": """
        from gateway.request import Request
        def send(asked: Request) -> str:
            return asked.id
        """,
    "gateway/proxy/__init__.py": "",
    "gateway/proxy/in_flight.py": """
        from gateway.request import Request
        class InFlight:
            def __init__(self, request: Request, number: int) -> None:
                self.request = request
                self.number = number
        class All:
            def __init__(self) -> None:
                self.every: list[InFlight] = []
        """,
    "gateway/web/__init__.py": "",
    "gateway/web/handler.py": """
        from gateway.proxy.in_flight import All, InFlight
        def serve(found: All, before: InFlight | None) -> int:
            assert before is not None
            one = found.every[0]
            print(InFlight, before.request.id)
            return one.number
        """,
}


def test_every_name_of_the_request_and_of_its_carriers_counts(tree: Tree) -> None:
    pytest.importorskip("mypy", reason="`make dev` installs it")
    from tests.house.mypy_types import ModuleTypes
    from tests.house.request_names import request_names

    root = tree(VALUE)
    found = modules(root)
    figures = request_names(found, ModuleTypes(root, found))
    assert figures["request_attributes"].places == ["id"]
    assert figures["request_names"].places == [
        "before: InFlight",
        "one: InFlight",
        "request: Request",
    ]
    assert figures["request_names_in_proxy"].places == ["request: Request"]
    assert figures["request_names_by_module"].places == [
        "gateway.proxy.in_flight: request",
        "gateway.web.handler: before",
        "gateway.web.handler: one",
        "gateway.web.handler: request",
    ]
    assert figures["request_spellings"].places == [
        "before",
        "before.request",
        "one",
        "request",
        "self.request",
    ]
    assert figures["request_classes"].places == [
        "gateway.proxy.in_flight.InFlight",
        "gateway.request.Request",
    ]
    assert figures["request_functions"].places == [
        "gateway.proxy.in_flight.InFlight",
        "gateway.web.handler.serve",
    ]
    assert figures["request_modules"].value == 2
