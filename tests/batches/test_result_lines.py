"""The lines of output and error files, as clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batches.line_reader import LineError
from gateway.batches.request_rows import RequestState
from gateway.batches.results import (
    broken_line,
    is_output,
    response_line,
    unanswered_line,
)

BROKEN = LineError(3, 10, 5, "ä", True, "invalid_url", "It does not match.", "url")


def read(line: bytes) -> Any:
    """The value of a line, read as Python's clients do: by `str.splitlines`."""
    (text,) = line.decode().splitlines()
    assert line.endswith(b"\n")
    return json.loads(text)


def response(content: bytes, api: str = "openai", status: int = 200) -> Any:
    return read(response_line("r1", "c", api, status=status, request_id="q", content=content))


def test_an_answer_is_an_output_line() -> None:
    found = response(b'{"a": 1,\n "b": [1.10, 1e400]}\r\n')
    assert list(found) == ["id", "custom_id", "response", "error"]
    assert found["response"]["status_code"] == 200
    assert found["response"]["request_id"] == "q"
    assert found["error"] is None
    line = response_line(
        "r", "c", "openai", status=200, request_id="q", content=b'{"n": 0.10000000000000000001}'
    )
    assert b"0.10000000000000000001" in line


@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
)
def test_no_character_divides_a_line(end: str) -> None:
    escaped = json.dumps({"text": f"a{end}b"}).encode()
    assert response(escaped)["response"]["body"] == {"text": f"a{end}b"}
    raw = json.dumps({"text": f"a{end}b"}, ensure_ascii=False).encode()
    assert response(raw)["response"]["body"] == {"text": f"a{end}b"}
    line = response_line("r", f"a{end}b", "openai", status=200, request_id="q", content=b"{}")
    assert read(line)["custom_id"] == f"a{end}b"


@pytest.mark.parametrize("content", [b"", b"nothing\n", b'{"a": "\xff"}', b'{"a": 1} x', b"[1,]"])
def test_what_is_no_json_becomes_a_text(content: bytes) -> None:
    assert response(content)["response"]["body"] == content.decode("utf-8", "replace")


def test_an_error_s_response_is_an_error_line() -> None:
    content = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}})
    found = response(content.encode(), status=404)
    assert (found["error"], found["response"]["status_code"]) == (None, 404)
    assert found["response"]["body"]["error"]["message"] == "no"
    assert is_output("openai", 200)
    assert not is_output("openai", 404)
    assert not is_output("openai", None)
    assert is_output("anthropic", 404)
    assert is_output("anthropic", None)


def test_a_broken_line_names_its_number() -> None:
    found = read(broken_line("r1", "openai", BROKEN))
    assert (found["custom_id"], found["response"]) == ("ä", None)
    assert found["error"] == {
        "code": "invalid_url", "message": "It does not match.", "param": "url", "line": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "code", "type_"),
    [
        (RequestState.EXPIRED, "batch_expired", "expired"),
        (RequestState.CANCELLED, "batch_cancelled", "canceled"),
        (RequestState.DONE, "result_lost", "errored"),
    ],
)
def test_a_line_without_an_answer_says_why(state: RequestState, code: str, type_: str) -> None:
    found = read(unanswered_line("r1", "c", "openai", 3, state))
    assert found["custom_id"] == "c"
    assert found["response"] is None
    assert found["error"]["code"] == code
    assert "line" in read(unanswered_line("r1", None, "openai", 3, state))["error"]
    found = read(unanswered_line("r1", "c", "anthropic", 3, state))
    assert (found["custom_id"], found["result"]["type"]) == ("c", type_)


def test_anthropic_s_errors_are_nested_twice() -> None:
    own = {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
    found = response(json.dumps(own).encode(), "anthropic", 529)
    assert found["custom_id"] == "c"
    assert found["result"]["type"] == "errored"
    assert found["result"]["error"]["error"] == own["error"]
    assert found["result"]["error"]["request_id"] == "q"
    broken = read(broken_line("r1", "anthropic", BROKEN))
    assert broken["result"]["error"]["error"]["type"] == "invalid_request_error"
    message = {"type": "message", "content": []}
    succeeded = response(json.dumps(message).encode(), "anthropic")
    assert succeeded["result"] == {"type": "succeeded", "message": message}


@pytest.mark.parametrize(
    ("content", "status", "type_", "message"),
    [
        (b'{"error": {"message": "m"}}', 404, "not_found_error", "m"),
        (b'{"error": "m"}', 400, "invalid_request_error", "m"),
        (b"<html>", 502, "api_error", "The request failed with status 502."),
        (b"[]", 418, "invalid_request_error", "The request failed with status 418."),
        (b'{"error": {"message": 7}}', 429, "rate_limit_error", "The request failed with status"),
    ],
)
def test_other_errors_are_told_in_anthropic_s_form(
    content: bytes, status: int, type_: str, message: str
) -> None:
    error = response(content, "anthropic", status)["result"]["error"]
    assert error["type"] == "error"
    assert error["error"]["type"] == type_
    assert error["error"]["message"].startswith(message)
