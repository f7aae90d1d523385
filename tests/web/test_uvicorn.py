"""The private parts of uvicorn that `gateway.web` builds on, each with where to look if it changes.

When one of these fails after an update of uvicorn, read its change to the named class, adapt the
named module, and then the test.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server, ServerState

from gateway.web.connections import PipelineFlowControl
from gateway.web.http_exchange import HttpExchange
from gateway.web.listener import UvicornServer
from gateway.web.protocol import BoundedProtocol

INSTALLED = version("uvicorn")
ROOT = Path(__file__).resolve().parents[2]


def changed(what: str, where: str) -> str:
    return f"uvicorn {INSTALLED}: {what}; check gateway/web/{where}"


def source_of(kind: type) -> ast.Module:
    return ast.parse(inspect.getsource(kind))


def attributes_of(tree: ast.AST, *owners: str) -> set[str]:
    """Names that the code uses of these owners, written as `self.flow`, for example."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def own_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value)}


def assigned(kind: type) -> set[str]:
    """Attributes that methods of this class assign to `self`."""
    return {
        node.attr
        for node in ast.walk(source_of(kind))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


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


# HttpToolsProtocol, of which BoundedProtocol is a subclass.


def test_the_protocol_has_the_methods_that_are_known() -> None:
    known = {
        "__init__", "connection_made", "connection_lost", "eof_received", "data_received",
        "_unset_keepalive_if_required", "_get_upgrade", "_should_upgrade_to_ws",
        "_unsupported_upgrade_warning", "_should_upgrade", "handle_websocket_upgrade",
        "send_400_response", "on_message_begin", "on_url", "on_header", "on_headers_complete",
        "_start_asgi_task", "on_body", "on_message_complete", "on_response_complete", "shutdown",
        "pause_writing", "resume_writing", "timeout_keep_alive_handler",
    }  # fmt: skip
    difference = own_methods(HttpToolsProtocol) ^ known
    assert not difference, changed(f"methods of HttpToolsProtocol differ: {difference}", "protocol")


@pytest.mark.parametrize(
    "name", sorted(own_methods(BoundedProtocol) & own_methods(HttpToolsProtocol))
)
def test_an_overridden_method_of_the_protocol_has_the_same_parameters(name: str) -> None:
    ours = parameters(getattr(BoundedProtocol, name))
    theirs = parameters(getattr(HttpToolsProtocol, name))
    assert ours == theirs, changed(f"HttpToolsProtocol.{name}{tuple(theirs)}", "protocol.py")


def test_the_protocol_has_every_attribute_that_ours_uses() -> None:
    used = attributes_of(source_of(BoundedProtocol), "self")
    ours = assigned(BoundedProtocol) | set(vars(BoundedProtocol))
    ours |= set(BoundedProtocol.__annotations__)
    theirs = assigned(HttpToolsProtocol) | set(dir(HttpToolsProtocol))
    missing = used - ours - theirs
    assert not missing, changed(f"HttpToolsProtocol lacks {missing}", "protocol.py")


@pytest.mark.parametrize(
    "name",
    ["url", "headers", "expect_100_continue", "parser", "cycle", "flow", "timeout_keep_alive_task"],
)
def test_an_attribute_that_ours_sets_means_something_to_the_protocol(name: str) -> None:
    theirs = assigned(HttpToolsProtocol)
    assert name in theirs, changed(f"HttpToolsProtocol no longer sets {name}", "protocol.py")


# RequestResponseCycle, in whose place HttpExchange stands.


def test_an_exchange_has_what_the_protocol_uses_of_a_cycle() -> None:
    used = attributes_of(source_of(HttpToolsProtocol), "self.cycle", "existing_cycle")
    assert {"response_complete", "disconnected", "message_event", "more_body"} <= used
    missing = {name for name in used if not hasattr(HttpExchange, name)}
    assert not missing, changed(f"the protocol uses {missing} of its cycle", "http_exchange.py")


def test_only_these_of_a_cycle_are_assigned_by_the_protocol() -> None:
    stored = {
        node.attr
        for node in ast.walk(source_of(HttpToolsProtocol))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self.cycle"
    }
    known = {"body", "disconnected", "keep_alive", "more_body"}
    assert stored == known, changed(f"the protocol sets {stored} of its cycle", "http_exchange.py")


def test_of_a_cycles_event_only_set_is_called() -> None:
    used = attributes_of(source_of(HttpToolsProtocol), "self.cycle.message_event")
    assert used == {"set"}, changed(f"message_event: {used}", "http_exchange.py")


# FlowControl, of which PipelineFlowControl is a subclass.


def test_flow_control_has_the_methods_and_attributes_that_are_known() -> None:
    methods = {"__init__", "drain", "pause_reading", "resume_reading", "pause_writing"}
    difference = own_methods(FlowControl) ^ (methods | {"resume_writing"})
    assert not difference, changed(f"methods of FlowControl differ: {difference}", "connections.py")
    missing = {"read_paused", "write_paused"} - assigned(FlowControl)
    assert not missing, changed(f"FlowControl lacks {missing}", "connections.py")
    assert parameters(FlowControl) == ["transport"], changed("FlowControl()", "connections.py")


def test_reading_is_resumed_by_flow_control_alone() -> None:
    tree = ast.parse(inspect.getsource(httptools_impl))
    used = attributes_of(tree, "self.transport", "transport", "self.flow._transport")
    assert not used & {"pause_reading", "resume_reading"}, changed(
        "uvicorn pauses or resumes a transport past FlowControl", "connections.py"
    )
    missing = attributes_of(tree, "self.flow") - set(dir(PipelineFlowControl))
    missing -= assigned(FlowControl)
    assert not missing, changed(f"the protocol uses {missing} of its flow", "connections.py")


# Server, of which UvicornServer is a subclass.


@pytest.mark.parametrize("name", ["main_loop", "shutdown", "capture_signals"])
def test_an_overridden_method_of_the_server_is_still_called_by_it(name: str) -> None:
    theirs = getattr(Server, name, None)
    assert theirs is not None, changed(f"Server.{name} is gone", "listener.py")
    assert parameters(theirs) == parameters(getattr(UvicornServer, name))
    called = {
        ast.unparse(node.func) for node in ast.walk(source_of(Server)) if isinstance(node, ast.Call)
    }
    assert f"self.{name}" in called, changed(f"Server no longer calls {name}", "listener.py")


def test_the_server_has_the_attributes_by_which_it_is_ended() -> None:
    missing = {"should_exit", "force_exit", "server_state", "servers"} - assigned(Server)
    assert not missing, changed(f"Server lacks {missing}", "listener.py")
    ends = ast.parse(textwrap.dedent(inspect.getsource(Server.shutdown)))
    told = attributes_of(ends, "server", "connection")
    assert {"close", "shutdown"} <= told, changed("what ends a server differs", "listener.py")
    missing = {"connections", "tasks", "total_requests"} - set(vars(ServerState()))
    assert not missing, changed(f"ServerState lacks {missing}", "listener.py")
