from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.events import (
    AttemptEnded,
    EventBus,
    InventoryChanged,
    ModelLoadChanged,
    ModelsDiffer,
    NodeChanged,
    NodeDrift,
    SettingsChanged,
)
from gateway.terms import Priority
from gateway.watch.event_log import EventLog
from gateway.watch.logs import (
    MOST_BUFFERED_LOG_BYTES,
    MOST_VALUE_CHARACTERS,
    LogFormat,
    Logs,
    LogWriter,
    set_up_logging,
)
from tests.polling import wait_until
from tests.watch.test_metrics import finished

SECRET = "the prompt nobody may see"
PATIENT_SECONDS = 30.0
"""Closing waits for the last lines, however long a slow machine takes to write them."""


class Written:
    """Logging to a file, read back at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR)
        self.logs: Logs | None = None
        self.bus = EventBus()

    def set_up(
        self,
        level: str = "info",
        form: LogFormat = "auto",
        *,
        draws: Iterable[float] = (),
        names: Mapping[str, str] | None = None,
    ) -> Logs:
        self.logs = set_up_logging(
            level, form, fd=self.fd, environment={}, flush_seconds=PATIENT_SECONDS
        )
        self.event_log = EventLog(
            self.bus, self.logs, iter(draws).__next__, name_of=(names or {}).get
        )
        return self.logs

    def text(self) -> str:
        assert self.logs is not None
        self.logs.close()
        return self.path.read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    log = Written(tmp_path / "log")
    yield log
    if log.logs is not None:
        log.logs.close()
    os.close(log.fd)


def test_the_level_can_change_while_it_runs(written: Written) -> None:
    logs = written.set_up("error")
    log = structlog.get_logger()
    log.info("unheard")
    logs.configure("debug")
    log.debug("heard")
    logging.getLogger("gateway.something").debug("heard too")
    assert [line["event"] for line in written.lines()] == ["heard", "heard too"]


def test_other_libraries_are_logged_from_warning_on(written: Written) -> None:
    written.set_up("debug")
    logging.getLogger("httpx").info("HTTP Request: POST %s", SECRET)
    logging.getLogger("asyncio").debug(SECRET)
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    (line,) = written.lines()
    assert line["event"] == "Invalid HTTP request received."
    assert (line["level"], line["logger"]) == ("warning", "uvicorn.error")


def test_an_exception_is_logged_by_type_and_place_without_its_message(written: Written) -> None:
    written.set_up()

    def parse() -> None:
        try:
            Path("/nonexistent").read_bytes()
        except OSError as error:
            raise ValueError(SECRET) from error

    try:
        parse()
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
        structlog.get_logger().exception("it broke")
    text = written.text()
    assert SECRET not in text
    for line in map(json.loads, text.splitlines()):
        assert line["level"] == "error"
        assert "ValueError" in line["exception"]
        assert "FileNotFoundError: No such file or directory" in line["exception"]
        assert "test_logs.py" in line["exception"]
        assert "in parse" in line["exception"]


async def test_an_unawaited_tasks_exception_is_logged_without_its_message(written: Written) -> None:
    written.set_up()

    async def work() -> None:
        raise ValueError(SECRET)

    def handle(data: bytes) -> None:
        raise ValueError(data)

    task = asyncio.create_task(work())
    asyncio.get_running_loop().call_soon(handle, SECRET.encode())
    await asyncio.wait([task], timeout=30)
    del task
    text = written.text()
    assert "never retrieved" in text
    assert "in work" in text
    assert SECRET not in text


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_text_breaks_out_of_its_line(written: Written, form: LogFormat) -> None:
    written.set_up(form=form)
    evil = "/a\nb\x1b[2J\x9b\u2028\ud800"
    written.bus.publish(finished(path=evil, x_request_id="i" * 100_000))
    structlog.get_logger().info("message", value=evil, odd={1: object()})
    deep = {"a\x9b": ["31m\x7f\u202e", {"\u2028": "\x9b2J\U000e0041"}], "ä": 1}
    structlog.get_logger().info("message", value=deep)
    arguments = ("one argument too few",)
    logging.getLogger("gateway").warning("%s %s", *arguments)
    text = written.text()
    lines = text.split("\n")
    assert len(lines) == 5
    assert lines[-1] == ""
    assert all(line.isprintable() for line in lines)
    assert len(lines[0]) < MOST_VALUE_CHARACTERS + 1000
    assert "/a\\nb\\x1b" in lines[0].replace("\\\\", "\\")
    if form == "json":
        assert json.loads(lines[2])["value"] == deep
    assert "could not be read" in lines[3]


def test_a_terminal_gets_coloured_text_and_a_file_gets_json(tmp_path: Path) -> None:
    def shown(environment: dict[str, str]) -> str:
        main, terminal = pty.openpty()
        try:
            logs = set_up_logging(fd=terminal, environment=environment)
            bus = EventBus()
            EventLog(bus, logs)
            bus.publish(finished(x_request_id="req-1"))
            logs.close()
            return os.read(main, 10_000).decode()
        finally:
            os.close(terminal)
            os.close(main)

    coloured = shown({})
    assert "\x1b[" in coloured
    plain = shown({"NO_COLOR": "1"})
    assert "\x1b[" not in plain
    assert "id=req-1" in plain
    assert "status=200" in plain
    assert not plain.startswith("{")


def log_writer(fd: int, format_dropped: Callable[[int], bytes] | None = None) -> LogWriter:
    """A writer that waits for its last lines, however long a slow machine takes to write them."""
    return LogWriter(fd, format_dropped, flush_seconds=30.0)


def thread_of(make: Callable[[], LogWriter]) -> tuple[LogWriter, threading.Thread]:
    """A writer and its thread."""
    before = set(threading.enumerate())
    writer = make()
    (thread,) = set(threading.enumerate()) - before
    return writer, thread


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    ends = [reader, writer]
    try:
        yield reader, writer
    finally:
        for end in ends:
            with suppress(OSError):  # the test may have closed it
                os.close(end)


def test_a_reader_that_does_not_read_loses_lines_and_blocks_nobody() -> None:
    with pipe() as (reader, writer):
        log = log_writer(writer, lambda lines: b"lost %d\n" % lines)
        line = b"x" * 1023 + b"\n"
        count = 4 * MOST_BUFFERED_LOG_BYTES // len(line)
        for _ in range(count):
            log.write(line)  # It would never return if it waited.
        # Besides the waiting lines, the thread may hold as many.
        assert log.dropped_lines > count // 3
        # When the reader continues it learns how many lines it missed.
        got = bytearray()

        def outcome_of() -> int:
            return sum(map(int, re.findall(rb"lost (\d+)\n", got)))

        end = time.monotonic() + 30
        while b"lost" not in got or outcome_of() < log.dropped_lines:
            assert time.monotonic() < end
            got += os.read(reader, 1 << 20)
            log.write(b"again\n")
        assert outcome_of() == log.dropped_lines
        assert len(got) < 3 * MOST_BUFFERED_LOG_BYTES
        log.close()


def test_closing_waits_a_limited_time_for_a_reader_that_does_not_read() -> None:
    with pipe() as (reader, writer):
        log, thread = thread_of(lambda: LogWriter(writer, flush_seconds=0.2))
        log.write(b"x" * 1_000_000)
        log.close()  # It would never return if it waited for its thread.
        assert thread.is_alive()
        os.close(reader)
        wait_until(lambda: not thread.is_alive())


def test_closing_the_given_descriptor_later_can_t_send_lines_into_another_file() -> None:
    with pipe() as (reader, writer):
        log = log_writer(writer)
        other_reader, other_writer = os.pipe()
        os.dup2(other_writer, writer)  # This closes the old file.
        try:
            log.write(b"for the log\n")
            assert os.read(reader, 100) == b"for the log\n"
            log.close()
            os.set_blocking(other_reader, False)
            try:
                leaked = os.read(other_reader, 100)
            except BlockingIOError:
                leaked = b""
            assert leaked == b""
        finally:
            os.close(other_reader)
            os.close(other_writer)


def test_a_descriptor_made_non_blocking_by_another_loses_nothing() -> None:
    with pipe() as (reader, writer):
        os.set_blocking(writer, False)
        log = log_writer(writer)
        sent = b"".join(b"%07d\n" % n for n in range(100_000))
        for start in range(0, len(sent), 8000):
            log.write(sent[start : start + 8000])
        got = bytearray()
        end = time.monotonic() + 30
        while len(got) < len(sent):
            assert time.monotonic() < end
            got += os.read(reader, 1 << 16)
        assert bytes(got) == sent
        assert log.dropped_lines == 0
        log.close()


def test_a_full_disk_loses_a_batch_and_later_ones_are_written() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        log, thread = thread_of(lambda: log_writer(fd))
        log.write(b"one\n")
        wait_until(lambda: log.dropped_lines == 1)
        assert thread.is_alive()
        log.close()
    finally:
        os.close(fd)


def test_a_request_is_one_json_line(written: Written) -> None:
    written.set_up()
    measured = {"attempts": 2, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 7}
    written.bus.publish(finished(queue_seconds=0.25, ttft=1.5, duration_seconds=4.0, **measured))
    (line,) = written.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "info", "event": "request", "id": "r1", "path": "/v1/chat/completions",
        "status": 200, "class": "normal", "model": "mistral-7b", "node": "a", "queue": 0.25,
        "ttft": 1.5, "duration": 4.0, "stream": True, "caller": "team", **measured,
    }  # fmt: skip


def test_requests_that_differ_in_one_thing_have_lines_that_tell_it(written: Written) -> None:
    written.set_up()
    others: dict[str, Any] = {
        "path": "/v1/50%d", "model": "other", "priority": Priority.BATCH, "caller": "bob",
        "status": 404, "reason": "10%_off", "stream": False, "node": "b", "attempts": 7,
    }  # fmt: skip
    for name, value in others.items():
        written.bus.publish(finished())
        written.bus.publish(finished(**{name: value}))
    told = {**others, "priority": "batch"}
    for name, value, line in zip(told, told.values(), written.lines()[1::2], strict=True):
        assert line["class" if name == "priority" else name] == value


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_request_has_the_name_of_its_key_as_it_is_now(written: Written, form: LogFormat) -> None:
    names = {"team": 'The "Team"\n\u202e'}
    written.set_up(form=form, names=names)
    written.bus.publish(finished())
    names["team"] = "Renamed"
    written.bus.ended.forget_kinds()
    written.bus.publish(finished())
    written.bus.publish(finished(caller="anonymous:10.0.0.1"))
    first, second, third = written.text().splitlines()
    assert "\u202e" not in first
    if form == "json":
        assert json.loads(first)["caller_name"] == 'The "Team"\\n\\u202e'
    assert "Renamed" in second
    assert "caller_name" not in third


def test_a_failed_request_says_why(written: Written) -> None:
    written.set_up("warning")
    written.bus.publish(finished(status=503, reason="no_node", node=None, ttft=None))
    written.bus.publish(finished())
    (line,) = written.lines()
    assert (line["level"], line["status"], line["reason"]) == ("warning", 503, "no_node")
    assert line["node"] is None
    assert line["ttft"] is None


def test_a_share_of_the_requests_has_a_line_and_every_failed_one(written: Written) -> None:
    written.set_up(draws=[0.24, 0.25, 0.99])
    written.event_log.configure(0.25)
    for name in ("first", "second", "third"):
        written.bus.publish(finished(x_request_id=name))
    written.bus.publish(finished(x_request_id="failed", status=502, reason="node_failed"))
    assert [line["id"] for line in written.lines()] == ["first", "failed"]


def test_changes_of_nodes_and_models_are_lines_with_their_reason(written: Written) -> None:
    written.set_up()
    load = ModelLoadChanged("r1", "m\n1", "loaded", 12.3456, "3 wait for it", by_others=False)
    for event in (
        NodeChanged("a", "ready", "down", "connection refused"),
        NodeChanged("a", "down", "ready", "answers again"),
        NodeChanged("r1/m", "unloaded", "ready", "as its router has it"),
        load,
        replace(load, seconds=None),  # as it was found
        replace(load, change="unloaded", seconds=None, by_others=True, cause="others"),
        replace(load, change="failed", by_others=True),
        AttemptEnded("r", "a", "ok", 1.0, 200),
        AttemptEnded("r", "a", "client_closed", 1.0),
        AttemptEnded("r", "b", "reset", 0.5),
        ModelsDiffer(("demo: build: b1 on a; b2 on b",)),
        ModelsDiffer(()),
    ):
        written.bus.publish(event)
    lines = written.lines()
    assert [(line["level"], line["event"]) for line in lines] == [
        ("warning", "node"), ("info", "node"), ("info", "model"), ("info", "model"),
        ("warning", "model"), ("warning", "attempt"), ("warning", "nodes of one model differ"),
        ("info", "nodes of each model are alike again"),
    ]  # fmt: skip
    assert (lines[0]["node"], lines[0]["reason"]) == ("a", "connection refused")
    assert (lines[2]["seconds"], lines[2]["reason"]) == (12.346, "3 wait for it")
    assert "\n" not in lines[2]["model"]
    assert [line.get("by") for line in lines[2:5]] == [None, "others", "others"]
    assert [line.get("cause") for line in lines[2:5]] == [None, "others", None]
    assert lines[5]["outcome"] == "reset"


def test_drift_and_reloads_are_logged(written: Written) -> None:
    written.set_up()
    written.bus.publish(NodeDrift("a", ("slots: 2 declared, 4 said",)))
    written.bus.publish(NodeDrift("a", ()))
    written.bus.publish(InventoryChanged(added=["b"], removed=["c"]))
    written.bus.publish(InventoryChanged(error="nodes.yaml:3: a\nnodes.yaml:4: b"))
    written.bus.publish(SettingsChanged())
    written.bus.publish(SettingsChanged(needs_restart=("listen.port",)))
    written.bus.publish(SettingsChanged(error="gateway.yaml:1: c"))
    lines = written.lines()
    assert [line["level"] for line in lines] == [
        "warning", "info", "info", "error", "info", "warning", "error",
    ]  # fmt: skip
    assert lines[0]["differences"] == "slots: 2 declared, 4 said"
    assert lines[2]["added"] == ["b"]
    assert lines[3]["error"] == "nodes.yaml:3: a; nodes.yaml:4: b"
    assert lines[5]["needs_restart"] == ["listen.port"]
