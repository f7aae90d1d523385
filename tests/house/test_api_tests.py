from __future__ import annotations

import pytest

from tests.house.api_tests import api_tests
from tests.house.sample_checkout import Tree, texts
from tests.house.source import Figure, modules

APIS = {
    "gateway/proxy/__init__.py": "",
    "gateway/proxy/api/__init__.py": "from gateway.proxy.api.chat import CHAT",
    "gateway/proxy/api/chat.py": """
        class Chat:
            name = "chat"
            def handles(self, path, api):
                return path == "/v1/chat" or api.name == "chat"
        CHAT = Chat()
        """,
    "gateway/proxy/routes.py": """
        TABLE = (Route("/v1/chat", 1), Route("/v1/messages", 2), Route("/infill", 3))
        SHORT = frozenset({"/v1/chat"})
        ROUTES = {route.path: route for route in TABLE}
        def odd(path):
            return path == "/infill"
        """,
}


@pytest.mark.parametrize(
    "line",
    [
        "path == '/v1/chat'",
        "path == '/chat'",
        "'/v1/messages' in path",
        "path in {'/infill', '/other'}",
        "path in SHORT",
        "path != OWN",
        "path.startswith('/v1/messages')",
        "dialect.name == 'messages'",
        "self._api not in ('chat', 'native')",
        "api is CHAT",
        "isinstance(api, (int, Chat))",
        "{'/infill': 1}",
        "{'chat': 1, 'messages': 2}",
    ],
)
def test_a_test_of_an_api_counts(tree: Tree, line: str) -> None:
    assert texts(found_in(tree, line)) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "path == '/health'",
        "path == '/messages'",
        "path in ROUTES",
        "'messages' in body",
        "request.endpoint == 'chat'",
        "node.name == 'chat'",
        "api.name == other",
        "ask('/infill')",
        "{'messages': 1}",
        "{'/health': '/infill'}",
        "{path: 1}",
        "isinstance(api, str)",
    ],
)
def test_other_comparisons_do_not_count(tree: Tree, line: str) -> None:
    assert texts(found_in(tree, line)) == []


def found_in(tree: Tree, line: str) -> Figure:
    head = (
        "from gateway.proxy.api import CHAT\n"
        "from gateway.proxy.api.chat import Chat\n"
        "from gateway.proxy.routes import ROUTES, SHORT\n"
        "OWN = '/infill'\n"
    )
    return api_tests(modules(tree(APIS | {"gateway/web.py": f"{head}print({line})\n"})))


def test_a_case_of_an_api_counts(tree: Tree) -> None:
    text = """
        match route.api.name:
            case "chat": ...
        match word:
            case "chat": ...
            case "/infill": ...
        """
    assert texts(api_tests(modules(tree(APIS | {"gateway/web.py": text})))) == [
        "'chat'",
        "'/infill'",
    ]
