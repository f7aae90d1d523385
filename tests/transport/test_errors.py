from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.transport import errors
from gateway.transport.errors import (
    ConnectionReset,
    NodeReportedError,
    StaleConnection,
    UpstreamError,
    UpstreamTimeout,
)


def classes(of: type[UpstreamError] = UpstreamError) -> Iterator[type[UpstreamError]]:
    for one in of.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from classes(one)


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    assert [one.__name__ for one in classes() if one.__name__ not in errors.__doc__] == []


def test_every_error_has_an_outcome_of_its_own_for_metrics_and_logs() -> None:
    outcomes = [one.outcome for one in classes() if one is not UpstreamTimeout]
    assert len(set(outcomes)) == len(outcomes)
    assert UpstreamError.outcome not in outcomes


@pytest.mark.parametrize("limit", ["first_byte", "silence", "total"])
def test_a_timeout_names_its_limit(limit: str) -> None:
    error = UpstreamTimeout(limit, "no byte in 5 s")
    assert (error.outcome, error.limit, str(error)) == (f"{limit}_timeout", limit, "no byte in 5 s")


def test_a_stale_connection_is_a_reset_one() -> None:
    assert issubclass(StaleConnection, ConnectionReset)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "request_error"),
        (413, "request_error"),
        (422, "request_error"),
        (404, "error_event"),
        (429, "error_event"),
        (500, "error_event"),
    ],
)
def test_an_error_that_every_node_would_report_is_the_requests_fault(
    status: int, outcome: str
) -> None:
    error = NodeReportedError("a reason", status)
    assert (error.is_request_fault, error.outcome) == (outcome == "request_error", outcome)
