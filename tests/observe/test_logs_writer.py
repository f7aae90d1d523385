from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gateway.observe import logs as sink_module
from gateway.observe.logs import MOST_BUFFERED_LOG_BYTES, LogWriter


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the last lines, however long a slow machine takes to write them."""
    monkeypatch.setattr(sink_module, "LOG_FLUSH_SECONDS", 30.0)


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


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_lines_arrive_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"line %d\n" % n for n in range(5000)]
    with path.open("wb") as file:
        sink = LogWriter(file.fileno())
        for line in lines:
            sink.write(line)
        sink.close()
    assert path.read_bytes() == b"".join(lines)
    assert sink.dropped_lines == 0


def test_a_line_arrives_without_a_close() -> None:
    with pipe() as (reader, writer):
        sink = LogWriter(writer)
        sink.write(b"one\n")
        assert os.read(reader, 100) == b"one\n"
        sink.write(b"two\n")
        assert os.read(reader, 100) == b"two\n"
        sink.close()


def test_a_reader_that_does_not_read_costs_lines_and_no_time() -> None:
    with pipe() as (reader, writer):
        sink = LogWriter(writer, lambda lines: b"lost %d\n" % lines)
        line = b"x" * 1023 + b"\n"
        count = 4 * MOST_BUFFERED_LOG_BYTES // len(line)
        for _ in range(count):
            sink.write(line)  # would never return if it waited
        # So many wait, and before, its thread may have taken as many to be written.
        assert sink.dropped_lines > count // 3
        # When it reads again it is told what it has missed.
        got = bytearray()

        def told() -> int:
            return sum(map(int, re.findall(rb"lost (\d+)\n", got)))

        end = time.monotonic() + 30
        while b"lost" not in got or told() < sink.dropped_lines:
            assert time.monotonic() < end
            got += os.read(reader, 1 << 20)
            sink.write(b"again\n")
        assert told() == sink.dropped_lines
        assert len(got) < 3 * MOST_BUFFERED_LOG_BYTES
        sink.close()


def test_closing_waits_a_bounded_time_for_a_reader_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "LOG_FLUSH_SECONDS", 0.2)
    with pipe() as (reader, writer):
        sink = LogWriter(writer)
        sink.write(b"x" * 1_000_000)
        sink.close()  # would never return if it waited for its thread
        assert sink._thread.is_alive()
        os.close(reader)
        until(lambda: not sink._thread.is_alive())


def test_a_reader_that_has_left_harms_nobody() -> None:
    with pipe() as (reader, writer):
        sink = LogWriter(writer)
        os.close(reader)
        sink.write(b"into the void\n")
        until(lambda: not sink._thread.is_alive())
        for _ in range(10):
            sink.write(b"into the void\n")
        assert sink.dropped_lines == 10
        sink.close()


def test_a_closed_descriptor_at_the_start_drops_every_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    sink = LogWriter(writer)
    sink.write(b"nowhere\n")
    sink.close()
    assert sink.dropped_lines == 1


def test_closing_the_given_descriptor_later_can_t_send_lines_into_another_file() -> None:
    with pipe() as (reader, writer):
        sink = LogWriter(writer)
        other_reader, other_writer = os.pipe()
        os.dup2(other_writer, writer)  # which closes what was there
        try:
            sink.write(b"for the log\n")
            assert os.read(reader, 100) == b"for the log\n"
            sink.close()
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
        sink = LogWriter(writer)
        sent = b"".join(b"%07d\n" % n for n in range(100_000))
        for start in range(0, len(sent), 8000):
            sink.write(sent[start : start + 8000])
        got = bytearray()
        end = time.monotonic() + 30
        while len(got) < len(sent):
            assert time.monotonic() < end
            got += os.read(reader, 1 << 16)
        assert bytes(got) == sent
        assert sink.dropped_lines == 0
        sink.close()


def test_a_full_disk_loses_its_batch_and_is_tried_again() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        sink = LogWriter(fd)
        sink.write(b"one\n")
        until(lambda: sink.dropped_lines == 1)
        assert sink._thread.is_alive()
        sink.close()
    finally:
        os.close(fd)


def test_a_process_whose_log_nobody_reads_still_ends() -> None:
    code = (
        "import gateway.observe.logs as s\n"
        "s.LOG_FLUSH_SECONDS = 0.2\n"
        "k = s.LogWriter(2)\n"
        "k.write(b'x' * 1_000_000)\n"
        "k.close()\n"
        "print('ended')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ended\n"
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
