from __future__ import annotations

import pytest

from tests.house.sample_checkout import Tree
from tests.house.source import modules

VALUE = {
    "gateway/request.py": "class Request:\n    id = ''\n",
    "gateway/cli/__init__.py": "",
    "gateway/cli/ask.py": """
        from gateway.request import Request
        def send(asked: Request) -> str:
            return asked.id
        """,
    "gateway/relay/__init__.py": "",
    "gateway/relay/live.py": """
        from gateway.request import Request
        class Live:
            def __init__(self, request: Request, number: int) -> None:
                self.request = request
                self.number = number
        class All:
            def __init__(self) -> None:
                self.every: list[Live] = []
        """,
    "gateway/web/__init__.py": "",
    "gateway/web/edge.py": """
        from gateway.relay.live import All, Live
        def serve(found: All, before: Live | None) -> int:
            assert before is not None
            one = found.every[0]
            print(Live, before.request.id)
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
    assert figures["request_names"].places == ["before: Live", "one: Live", "request: Request"]
    assert figures["request_names_in_proxy"].places == ["request: Request"]
    assert figures["request_names_by_module"].places == [
        "gateway.relay.live: request",
        "gateway.web.edge: before",
        "gateway.web.edge: one",
        "gateway.web.edge: request",
    ]
    assert figures["request_spellings"].places == [
        "before",
        "before.request",
        "one",
        "request",
        "self.request",
    ]
    assert figures["request_classes"].places == [
        "gateway.relay.live.Live",
        "gateway.request.Request",
    ]
    assert figures["request_functions"].places == [
        "gateway.relay.live.Live",
        "gateway.web.edge.serve",
    ]
    assert figures["request_modules"].value == 2
