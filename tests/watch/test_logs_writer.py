from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
