"""A lease on a node without connections, and the request that it is for."""

from __future__ import annotations

from typing import Any

from gateway.lease import ExpectedReading, GrantedLease, NodeInfo
from gateway.request.preparation import Request
from tests.lease_requests import a_lease_request


def a_node_info(name: str = "a", **keys: Any) -> NodeInfo:
    """A node without exceptions to the settings."""
    values = {"connect_timeout": None, "first_byte_timeout": None, "silence_timeout": None,
              "total_timeout": None, "context": 4096, "resume_key": ()}  # fmt: skip
    return NodeInfo(name, "cpu", "llama.cpp", **{**values, **keys})


def a_granted_lease(**keys: Any) -> GrantedLease:
    """A lease on a node without connections; keys of its `reading` among the others."""
    fields = ExpectedReading.__struct_fields__
    reading = ExpectedReading(**{name: keys.pop(name) for name in fields if name in keys})
    return GrantedLease(
        **{
            "id": 1,
            "node": a_node_info(),
            "model": "demo",
            "served_name": "demo",
            "stream": True,
            "reading": reading,
            **keys,
        }
    )


def a_proxy_request(received_at: float = 0.0, body: bytes = b"{}", **keys: Any) -> Request:
    return Request(
        "req_1",
        "req_1",
        "/v1/chat/completions",
        received_at,
        a_lease_request(**{"stream": True, **keys}),
        header_lines=b"content-type: application/json\r\n",
        bodies={"demo": body},
        stream=True,
    )
