"""A node's own error on its way to the client: the contract's word for it, its API's form."""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.relay.dialects import Dialect
from gateway.relay.reply import Reply
from gateway.relay.values import NoJson, any_of

_CODES = {400: "invalid_request", 413: "request_too_large", 422: "invalid_request"}
_OTHER = "node_error"


def as_error(reply: Reply) -> GatewayError:
    """The error that a node's reply of 400 or more tells."""
    try:
        message = str(any_of(reply.content)["error"]["message"])
    except (NoJson, KeyError, TypeError):
        message = f"The node answered with status {reply.status}."
    return GatewayError(reply.status, _CODES.get(reply.status, _OTHER), message)


def body_of(reply: Reply, dialect: Dialect, tag: str) -> bytes:
    """Its body as it is, unless it is empty or the API has a form that llama.cpp doesn't use."""
    if reply.content and (dialect.name != "messages" or _is_anthropics(reply.content)):
        return reply.content
    return dialect.error_body(as_error(reply), tag)


def fields_of(reply: Reply, content: bytes) -> bytes:
    """The lines of its head for this body."""
    lines = reply.fields
    if content is not reply.content:
        kept = (line for line in lines.splitlines(True) if not line.startswith(b"content-type:"))
        lines = b"".join(kept) + b"content-type: application/json\r\n"
    return lines + b"x-gateway-reason: %b\r\n" % _CODES.get(reply.status, _OTHER).encode()


def _is_anthropics(content: bytes) -> bool:
    try:
        value = any_of(content)
    except NoJson:
        return False
    return isinstance(value, dict) and value.get("type") == "error" and "error" in value
