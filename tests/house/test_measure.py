from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.house import measure
from tests.house.apis import api_tests
from tests.house.reach import instruction_counts, patches, private_accesses
from tests.house.shape import circles, classes_twice, import_circles, mirrored, sizes
from tests.house.source import Figure, Function, modules, with_scopes
from tests.house.way import MARKS, Tracer, told
from tests.house.writes import across, of_others

Tree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files, by their paths, and returns the root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    return write


def texts(figure: Figure) -> list[str]:
    return [str(place).split(": ", 1)[1] for place in figure.places]


def test_a_module_of_sixty_lines_is_short_and_one_of_six_hundred_not_long(tree: Tree) -> None:
    lines = {"a": 60, "b": 61, "c": 600, "d": 601}
    root = tree({f"gateway/{name}.py": "x = 1\n" * count for name, count in lines.items()})
    figures = sizes(modules(root))
    assert figures["modules"].value == 4
    assert figures["modules_short"].places == ["gateway/a.py: 60"]
    assert figures["modules_long"].places == ["gateway/d.py: 601"]
    assert figures["lines"].value == sum(lines.values())


def test_a_circle_is_found_and_a_way_without_return_is_none() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": ()}
    assert circles(edges) == [["a", "b", "c"]]


def test_imports_in_functions_and_relative_ones_make_circles(tree: Tree) -> None:
    root = tree(
        {
            "gateway/__init__.py": "",
            "gateway/x/__init__.py": "from gateway.x.one import One",
            "gateway/x/one.py": "from . import two",
            "gateway/x/two.py": "def late():\n    from gateway.x.one import One",
            "gateway/x/three.py": "from gateway.x import one",
            "gateway/y/__init__.py": "",
            "gateway/y/down.py": "from gateway.x import three, One",
        }
    )
    figures = import_circles(modules(root))
    assert figures["circles"].places == ["gateway.x.one gateway.x.two"]
    assert figures["circles_of_packages"].value == figures["circles_of_folders"].value == 0


def test_packages_that_import_each_other_are_a_circle_though_no_modules_are(tree: Tree) -> None:
    root = tree(
        {
            "gateway/x/__init__.py": "",
            "gateway/x/one.py": "import gateway.y.one",
            "gateway/x/two.py": "",
            "gateway/y/__init__.py": "",
            "gateway/y/one.py": "from gateway.x import two",
            "gateway/x/a.py": "from gateway.x.deep import one",
            "gateway/x/deep/__init__.py": "",
            "gateway/x/deep/one.py": "",
            "gateway/x/deep/two.py": "from gateway.x.a import b",
        }
    )
    figures = import_circles(modules(root))
    assert figures["circles"].value == 0
    assert figures["circles_of_packages"].places == ["x y"]
    assert figures["circles_of_folders"].places == [
        "gateway.x gateway.y",
        "gateway.x.a gateway.x.deep",
    ]


def test_a_class_name_counts_when_two_modules_define_it(tree: Tree) -> None:
    root = tree(
        {
            "gateway/a.py": "class One: ...\nclass Two:\n    class Inner: ...\nclass _Own: ...",
            "gateway/b.py": "class Inner: ...\nclass _Own: ...\nfrom gateway.a import One",
            "gateway/c.py": "def made():\n    class Two: ...",
        }
    )
    figures = classes_twice(modules(root))
    assert figures["classes_twice"].places == ["Inner: gateway.a gateway.b"]
    assert figures["classes_twice_private"].places == ["_Own: gateway.a gateway.b"]


def test_tests_mirror_a_module_by_its_name_and_the_longest_name_is_meant(tree: Tree) -> None:
    names = ["a", "x/pool", "x/pool_size", "x/__init__", "x/deep/__init__", "x/deep/one"]
    root = tree(
        {
            **{f"gateway/{name}.py": "" for name in names},
            "tests/test_a.py": "",
            "tests/x/test_pool_size_in_steps.py": "",
            "tests/x/test_deep.py": "",
            "tests/x/test_poolside.py": "",
            "tests/test_pool.py": "",
            "tests/x/build.py": "",
        }
    )
    figures = mirrored(modules(root), modules(root, "tests"))
    assert figures["tests_in_all"].value == 5
    assert figures["tests_that_mirror"].places == [
        "tests/test_a.py",
        "tests/x/test_deep.py",
        "tests/x/test_pool_size_in_steps.py",
    ]
    assert figures["modules_without_test"].places == ["gateway/x/deep/one.py", "gateway/x/pool.py"]


WRITES = {
    "gateway/a.py": """
        class Node:
            free = 0
            def set(self, other: "Node") -> None:
                self.free = 1
                other.free = 2
            @classmethod
            def make(cls) -> "Node":
                cls.free = 3
                made = cls()
                made.free = 4
                return made
        def fresh() -> None:
            node = Node()
            node.free = 5
            again = Node()
            again = again
            again.free = 6
        """,
    "gateway/x/__init__.py": "",
    "gateway/x/b.py": """
        from typing import Any
        from gateway.a import Node
        class Kept(Node):
            own = 0
        class Holder:
            def __init__(self, node: Node, kept: Kept | None, any_: Any) -> None:
                self.node, self.kept = node, kept
                self.node.free += 7
                kept.own, kept.free = 8, 9
                any_.free = 10
                setattr(kept, "free", 11)
                setattr(self, "extra", 12)
                del node.free
                print(node.free)
        """,
}


def test_writes_to_what_is_not_ones_own_count(tree: Tree) -> None:
    assert texts(of_others(modules(tree(WRITES)))) == [
        "other.free",
        "made.free",
        "again.free",
        "self.node.free",
        "kept.own",
        "kept.free",
        "any_.free",
        "setattr(kept, 'free', 11)",
        "node.free",
    ]


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


def test_types_tell_writes_across_packages_and_the_names_of_the_request(tree: Tree) -> None:
    pytest.importorskip("mypy", reason="`make dev` installs it")
    from tests.house.names import request_names
    from tests.house.typed import Types

    root = tree(WRITES | VALUE)
    found = modules(root)
    types = Types(root, found)
    figures = across(found, types)
    assert texts(figures["writes_across"]) == [
        "self.node.free of gateway.a",
        "kept.free of gateway.a",
        "setattr(kept, 'free', 11) of gateway.a",
        "node.free of gateway.a",
    ]
    assert texts(figures["writes_untyped"]) == ["any_.free"]

    names = request_names(found, types)
    assert names["request_names"].places == ["before: Live", "one: Live", "request: Request"]
    assert names["request_names_in_proxy"].places == ["request: Request"]
    assert names["request_spellings"].places == [
        "before",
        "before.request",
        "one",
        "request",
        "self.request",
    ]
    assert names["request_classes"].places == ["gateway.relay.live.Live", "gateway.request.Request"]
    assert names["request_stays"].places == ["gateway.relay.live.Live", "gateway.web.edge.serve"]
    assert names["request_rooms"].value == 2


APIS = {
    "gateway/relay/__init__.py": "",
    "gateway/relay/dialects/__init__.py": "from gateway.relay.dialects.chat import CHAT",
    "gateway/relay/dialects/chat.py": """
        class Chat:
            name = "chat"
            def asks(self, path, dialect):
                return path == "/v1/chat" or dialect.name == "chat"
        CHAT = Chat()
        """,
    "gateway/relay/routes.py": """
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
        "dialect is CHAT",
        "isinstance(dialect, (int, Chat))",
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
        "dialect.name == other",
        "ask('/infill')",
        "{'messages': 1}",
        "{'/health': '/infill'}",
        "{path: 1}",
        "isinstance(dialect, str)",
    ],
)
def test_what_asks_no_api_does_not(tree: Tree, line: str) -> None:
    assert texts(found_in(tree, line)) == []


def found_in(tree: Tree, line: str) -> Figure:
    head = (
        "from gateway.relay.dialects import CHAT\n"
        "from gateway.relay.dialects.chat import Chat\n"
        "from gateway.relay.routes import ROUTES, SHORT\n"
        "OWN = '/infill'\n"
    )
    return api_tests(modules(tree(APIS | {"gateway/web.py": f"{head}print({line})\n"})))


def test_a_case_of_an_api_counts(tree: Tree) -> None:
    text = """
        match route.dialect.name:
            case "chat": ...
        match word:
            case "chat": ...
            case "/infill": ...
        """
    assert texts(api_tests(modules(tree(APIS | {"gateway/web.py": text})))) == [
        "'chat'",
        "'/infill'",
    ]


REACHES = {
    "gateway/a.py": """
        from typing import NamedTuple
        _LIMIT = 3
        class Pool:
            def __init__(self):
                self._idle = []
        """,
    "tests/test_a.py": """
        import os
        from gateway import __version__, a
        from gateway.a import _LIMIT, Pool
        from tests.counting import instructions
        class Fake:
            def __init__(self):
                self._idle = 1
                self.pool = Pool()
            def same(self, other):
                return other._idle == self._idle
        def test_it(monkeypatch, pool, point):
            assert pool._idle
            assert a._LIMIT
            point._replace(x=1)._asdict()
            os._exit(1)
            monkeypatch.setattr(a, "_LIMIT", 4)
            monkeypatch.setattr("gateway.a.Pool", Fake)
            monkeypatch.setattr(os, "getpid", lambda: 1)
            monkeypatch.setenv("A", "b")
            assert instructions(lambda: 1) < 5
            assert pool.instructions < 5
        """,
    "tests/counting.py": "def instructions(run): ...\ninstructions(1)",
}


def test_what_tests_reach_into_counts(tree: Tree) -> None:
    root = tree(REACHES)
    found, tests = modules(root), modules(root, "tests")
    assert texts(private_accesses(found, tests)) == [
        "from gateway.a import _LIMIT",
        "pool._idle",
        "a._LIMIT",
    ]
    figures = patches(found, tests)
    assert figures["monkeypatches"].value == 3
    assert texts(figures["monkeypatches_of_gateway"]) == [
        "monkeypatch.setattr(a, '_LIMIT', 4)",
        "monkeypatch.setattr('gateway.a.Pool', Fake)",
    ]
    assert texts(instruction_counts(tests)) == ["instructions(lambda: 1)"]


class Code:
    """A frame and its code, as the tracer reads them."""

    def __init__(self, module: str, function: str, file: str = "a.py") -> None:
        self.f_globals = {"__name__": module}
        self.f_code = self
        self.co_qualname = self.co_name = function
        self.co_filename = file


def traced(*, learnt: bool = False) -> Tracer:
    tracer = Tracer()
    received, asked, granted, over = (min(names) for names in MARKS.values())
    steps: list[tuple[Code, str, object]] = [
        (Code("gateway.protocol", "data"), "call", None),
        (Code("gateway.edge", received), "call", None),
        (Code("gateway.value", "__init__", "<string>"), "call", None),
        (Code("gateway.late", "<module>"), "call", None),
        (Code("httpx", "send"), "call", None),
        (Code("gateway.keys", "find"), "call" if learnt else "line", None),
        (Code("gateway.relay", asked), "call", None),
        (Code("gateway.node", "take"), "call", None),
        (Code("gateway.scheduler", granted), "return", None),
        (Code("gateway.retry", "spend"), "call", None),
        (Code("gateway.scheduler", granted), "return", 1),
        (Code("gateway.reply", "read"), "call", None),
        (Code("gateway.edge", over), "return", None),
    ]
    for frame, event, value in steps:
        tracer(frame, event, value)  # type: ignore[arg-type]  # what it reads of a frame
    assert tracer.passed == len(MARKS)
    return tracer


def test_a_trace_tells_what_is_entered_up_to_the_lease_and_in_all() -> None:
    lists = told([traced(learnt=True), traced(), traced(learnt=True), traced()])
    way = ["gateway.edge", "gateway.relay", "gateway.node", "gateway.retry"]
    assert lists["to_lease"] == way
    assert lists["to_lease_first"] == [way[0], "gateway.keys", *way[1:]]
    assert lists["asked_to_lease"] == lists["asked_to_lease_first"] == way[1:]
    assert lists["entered"] == ["gateway.protocol", *way, "gateway.reply"]


def test_each_mark_is_a_function_of_this_checkout() -> None:
    methods = {
        f"{scopes[-1].name}.{node.name}"
        for module in modules(measure.ROOT)
        for node, scopes in with_scopes(module.tree)
        if isinstance(node, Function) and scopes
    }
    assert [mark for mark, names in MARKS.items() if not names & methods] == []


def test_every_figure_is_explained_and_told(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(REACHES)
    assert set(measure.measured(root, typed=False)) == set(measure.PLAIN)
    assert measure.main([str(root), "--quick"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [*measure.PLAIN]
    assert measure.main([str(root), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["private_in_tests"]["value"] == 3
    assert measure.main([str(root), "--list", "instruction_counts"]) == 0
    assert capsys.readouterr().out.startswith("instruction_counts: 1\n  tests/test_a.py:")


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        measure.main([str(tmp_path)])
    assert "has no folder gateway" in capsys.readouterr().err
