"""What the client gets of a node's response: rewritten, and with errors in its API's form."""

from __future__ import annotations

import json

import pytest

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy.api.base import ResponseRewriter
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.relayed import RELAYED
from gateway.proxy.client_response import (
    EventsForClient,
    ProxyResponse,
    node_error,
    node_error_body,
    rewrite_body,
)
from gateway.transport.errors import InvalidResponse

SAID = b'{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'


class Shouting(ResponseRewriter):
    """Makes letters large, and fails on a question mark."""

    def rewrite_events(self, events: bytes) -> bytes:
        if b"?" in events:
            raise InvalidResponse("That is a question")
        return events.upper()

    def rewrite_body(self, content: bytes) -> bytes:
        return self.rewrite_events(content)


def test_an_invalid_plain_response_is_an_error() -> None:
    assert rewrite_body(Shouting(), b"a") == b"A"
    with pytest.raises(GatewayError) as raised:
        rewrite_body(Shouting(), b"?")
    assert (raised.value.status, raised.value.code) == (502, "node_failed")


def test_invalid_events_end_a_stream_with_one_error() -> None:
    record = RequestFinished("req_1", "/v1/chat/completions")
    events = EventsForClient(Shouting(), RELAYED, record)
    assert (events.rewrite(b"a"), events.failed) == (b"A", False)
    assert events.rewrite(b"?").startswith(b'data: {"error":{"message":"That is a question.')
    assert (events.rewrite(b"b"), events.failed) == (b"", True)
    assert (record.status, record.reason) == (502, "node_failed")


def test_a_nodes_error_is_in_the_form_of_the_clients_api() -> None:
    response = ProxyResponse(400, b"", SAID)
    assert node_error_body(response, RELAYED, "x") is SAID
    told = json.loads(node_error_body(response, MESSAGES, "x"))
    assert told["error"] == {"type": "invalid_request_error", "message": "No such thing"}


def test_an_error_that_is_not_json_is_described_by_its_status() -> None:
    error = node_error(ProxyResponse(500, b"", b"<html>"))
    assert (error.code, error.message) == ("node_error", "The node answered with status 500.")
