from __future__ import annotations

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from gateway.cli.client import GatewayAway, GatewayRefused, Patience, PublicFlags
from gateway.cli.progress import (
    StartupProgress,
)
from gateway.cli.terminal import CommandFailed
from gateway.local.server import ServerEvent
from tests.cli.local_server import Answer, answering
from tests.each_case import each_case


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.notes: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, lambda: self.now, self.sleep, note=self.notes.append)


def failing(times: int, retry_after: float | None = None) -> Callable[[], str]:
    left = [times]

    def job() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise GatewayAway("nobody answers", retry_after)
        return "done"

    return job


def test_a_gateway_that_is_away_is_asked_again_at_growing_intervals() -> None:
    time = Time()
    assert time.patience(600.0).call(failing(6)) == "done"
    assert 10.0 < time.now < 25.0
    assert time.notes == [
        "nobody answers; trying again for up to 600 s",
        f"the gateway answers again after {time.now:.0f} s",
    ]


def test_patience_waits_as_long_as_the_gateway_says_and_ends() -> None:
    time = Time()
    assert time.patience(600.0).call(failing(1, retry_after=42.0)) == "done"
    assert time.now == 42.0
    time = Time()
    with pytest.raises(GatewayAway):
        time.patience(30.0).call(failing(10_000))
    assert time.now == pytest.approx(30.0)
    with pytest.raises(GatewayAway):
        time.patience(0.0).call(failing(1))


@each_case(
    ("status", "headers", "error"),
    [
        (503, {"retry-after": "7"}, GatewayAway),
        (429, {}, GatewayAway),
        (429, {"x-should-retry": "false"}, GatewayRefused),
        (507, {}, GatewayRefused),
        (404, {}, GatewayRefused),
    ],
)
def test_which_errors_are_worth_another_try(
    status: int, headers: dict[str, str], error: type[Exception]
) -> None:
    no = {"error": {"message": "no", "type": "invalid_request_error", "code": None}}
    answers: list[Answer] = [(status, headers, no), (200, {}, b"<html>")]
    with (
        answering(lambda *_: answers.pop(0)) as url,
        PublicFlags(url=url).connect() as client,
    ):
        with pytest.raises(error) as raised:
            client.batch("batch_1")
        assert f"answers {status}: no" in str(raised.value)
        with pytest.raises(CommandFailed, match="is no gateway with /v1/batches"):
            client.batch("batch_1")
        if isinstance(raised.value, GatewayAway):
            assert raised.value.retry_after == (7.0 if headers else None)


# Progress where the output is no terminal.


def test_after_the_start_a_server_that_exits_and_returns_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StartupProgress(["one"]) as progress:
        pass
    with capture_logs() as logged:
        progress.show(ServerEvent("one", "exited", "exit status 1", 4.0))
        progress.show(ServerEvent("one", "loading"))
        progress.show(ServerEvent("one", "ready", seconds=3.14))
    assert capsys.readouterr().err.strip() == ""
    assert logged == [
        {"event": "server exited", "log_level": "warning", "server": "one",
         "how": "exit status 1", "restart_in": 4.0},
        {"event": "server ready", "log_level": "info", "server": "one", "seconds": 3.1},
    ]  # fmt: skip
