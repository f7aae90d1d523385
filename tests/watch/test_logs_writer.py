from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.watch.logs import MOST_BUFFERED_LOG_BYTES, LogWriter


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


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_lines_arrive_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"line %d\n" % n for n in range(5000)]
    with path.open("wb") as file:
        log = log_writer(file.fileno())
        for line in lines:
            log.write(line)
        log.close()
    assert path.read_bytes() == b"".join(lines)
    assert log.dropped_lines == 0


def test_a_line_arrives_without_a_close() -> None:
    with pipe() as (reader, writer):
        log = log_writer(writer)
        log.write(b"one\n")
        assert os.read(reader, 100) == b"one\n"
        log.write(b"two\n")
        assert os.read(reader, 100) == b"two\n"
        log.close()


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
        until(lambda: not thread.is_alive())


def test_a_closed_reader_is_no_error() -> None:
    with pipe() as (reader, writer):
        log, thread = thread_of(lambda: log_writer(writer))
        os.close(reader)
        log.write(b"into the void\n")
        until(lambda: not thread.is_alive())
        for _ in range(10):
            log.write(b"into the void\n")
        assert log.dropped_lines == 10
        log.close()


def test_a_closed_descriptor_at_the_start_drops_every_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    log = log_writer(writer)
    log.write(b"nowhere\n")
    log.close()
    assert log.dropped_lines == 1


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
        until(lambda: log.dropped_lines == 1)
        assert thread.is_alive()
        log.close()
    finally:
        os.close(fd)


def test_a_process_whose_log_nobody_reads_still_ends() -> None:
    code = (
        "import gateway.watch.logs as s\n"
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
