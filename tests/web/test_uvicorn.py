"""What the edge takes of uvicorn without its promise: `RequestResponseCycle` and `FlowControl`.

When one of these fails after an update of uvicorn, read its change to the named class, adapt the
named module, and then the test.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

INSTALLED = version("uvicorn")
ROOT = Path(__file__).resolve().parents[2]


def changed(what: str, where: str) -> str:
    return f"uvicorn {INSTALLED}: {what}; check gateway/web/{where}"


def attributes_of(kind: type, owner: str, context: type[ast.expr_context]) -> set[str]:
    """Names that the class reads or sets of `owner`, such as `self.flow`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and ast.unparse(node.value) == owner
    }


def test_the_bound_admits_the_tested_minor_version_and_no_later_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = (
        requirement.specifier
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "uvicorn"
    )
    tested = Version(INSTALLED)
    assert tested in bound
    assert Version(f"{tested.major}.{tested.minor + 1}.0") not in bound, "test it, then raise it"


def test_a_cycle_takes_what_the_protocol_gives_it() -> None:
    taken = list(inspect.signature(RequestResponseCycle).parameters)
    assert taken == [
        *("scope", "transport", "flow", "logger", "access_logger", "access_log"),
        *("default_headers", "message_event", "expect_100_continue", "keep_alive", "on_response"),
    ], changed(f"RequestResponseCycle{tuple(taken)}", "protocol.py")
    assert list(inspect.signature(RequestResponseCycle.run_asgi).parameters) == ["self", "app"]


def test_a_cycle_has_what_the_protocol_reads_and_sets_of_it() -> None:
    missing = {
        *("body", "more_body", "disconnected", "keep_alive", "message_event"),
        *("response_started", "response_complete"),
    } - attributes_of(RequestResponseCycle, "self", ast.Store)
    assert not missing, changed(f"RequestResponseCycle lacks {missing}", "protocol.py")


def test_flow_control_has_the_methods_and_attributes_that_are_known() -> None:
    methods = {name for name, value in vars(FlowControl).items() if callable(value)}
    difference = methods ^ {
        *("__init__", "drain", "pause_reading", "resume_reading"),
        *("pause_writing", "resume_writing"),
    }
    assert not difference, changed(f"methods of FlowControl differ: {difference}", "connections.py")
    missing = {"read_paused", "write_paused"} - attributes_of(FlowControl, "self", ast.Store)
    assert not missing, changed(f"FlowControl lacks {missing}", "connections.py")


def test_a_cycle_pauses_and_resumes_reading_through_its_flow_alone() -> None:
    used = attributes_of(RequestResponseCycle, "self.transport", ast.Load)
    assert not used & {"pause_reading", "resume_reading"}, changed(
        "uvicorn pauses or resumes a transport past FlowControl", "connections.py"
    )
