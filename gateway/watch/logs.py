"""Sets up structlog: readable lines on a terminal, else JSON lines, to stderr.

No prompt, completion or key is ever logged: the gateway's events contain none, exceptions are
logged by type and place without their message (which may quote a client), and other libraries are
logged from `warning` on, with one line each.
"""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401 - else the first such value reads it, on the event loop
import errno
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, Self

import msgspec
import structlog

from gateway.config.errors import escape_json

LogFormat = Literal["auto", "console", "json"]
STDERR = 2
MOST_VALUE_CHARACTERS = 2000  # Longer values are cut
# Bytes of lines that wait to be written; further lines are dropped.
MOST_BUFFERED_LOG_BYTES = 4 * 1024 * 1024
LOG_BATCH_SECONDS = 0.05  # Seconds for which lines are collected into one write
LOG_FLUSH_SECONDS = 2.0  # Most seconds that `close` waits for the last lines to be written
MOST_CHAINED_EXCEPTIONS = 5
MOST_FRAMES = 30
# asyncio logs a callback with its arguments: bytes of a body, for a protocol's data_received.
_MESSAGES_WITH_ARGUMENTS = ("Exception in callback", "Executing")

LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

EventDict = MutableMapping[str, Any]
Renderer = Callable[[object, str, EventDict], bytes]


class Logs:
    """The process's logging, from `set_up_logging` to `close`; a context manager."""

    def __init__(self, writer: LogWriter, render: Renderer, *, json: bool) -> None:
        self.writer = writer
        self.json = json
        self._render = render
        self.level = logging.INFO
        """Lines from this level on are written, a number of `logging`."""
        self._handler = _StructlogHandler()
        self._replaced = logging.getLogger().handlers[:]
        self._levels = {name: logging.getLogger(name).level for name in ("", "gateway")}

    def configure(self, level: str) -> None:
        """Log from `level` on; called again when the settings change."""
        self.level = LEVELS[level]
        structlog.configure(
            processors=[_prepared, self._render],
            wrapper_class=structlog.make_filtering_bound_logger(self.level),
            logger_factory=lambda *_: _LineLogger(self.writer.write),
            cache_logger_on_first_use=False,
        )
        root = logging.getLogger()
        if self._handler not in root.handlers:
            root.handlers[:] = [self._handler]
        root.setLevel(max(self.level, logging.WARNING))
        logging.getLogger("gateway").setLevel(self.level)
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        logging.captureWarnings(capture=True)

    def write_json(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write a JSON line without structlog's chain; the caller has checked the level.

        For lines that are written for every request: a tenth of the chain's time.
        """
        self.writer.write(
            _encode({"timestamp": utc_timestamp(), "level": level, "event": event, **fields})
            + b"\n"
        )

    def close(self) -> None:
        """Write the waiting lines and restore `logging`; later lines are lost."""
        root = logging.getLogger()
        if self._handler in root.handlers:
            root.handlers[:] = self._replaced
        for name, before in self._levels.items():
            logging.getLogger(name).setLevel(before)
        logging.captureWarnings(capture=False)
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def set_up_logging(
    level: str = "info",
    format: LogFormat = "auto",  # noqa: A002 - the word the settings use
    *,
    fd: int = STDERR,
    environment: Mapping[str, str] = os.environ,
    flush_seconds: float = LOG_FLUSH_SECONDS,
) -> Logs:
    """Write all log lines of this process to `fd`, in one format."""
    terminal = os.isatty(fd)
    json = format == "json" or (format == "auto" and not terminal)
    colours = terminal and not environment.get("NO_COLOR")
    render: Renderer = (
        (lambda _, __, line: _encode(line)) if json else _console_renderer(colours=colours)
    )

    def format_dropped(lines: int) -> bytes:
        fields = {"timestamp": utc_timestamp(), "level": "warning", "event": "log lines lost"}
        return render(None, "warning", {**fields, "lines": lines}) + b"\n"

    logs = Logs(LogWriter(fd, format_dropped, flush_seconds=flush_seconds), render, json=json)
    logs.configure(level)
    return logs


class _LineLogger:
    __slots__ = ("_write",)

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def msg(self, line: bytes) -> None:
        self._write(line + b"\n")

    debug = info = warning = error = critical = exception = msg


class _StructlogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Further lines quote the exception (asyncio) or begin a traceback (uvicorn).
            message = record.getMessage().strip().partition("\n")[0]
            if record.name == "asyncio" and message.startswith(_MESSAGES_WITH_ARGUMENTS):
                message = message.partition("(")[0]
            fields: dict[str, Any] = {"logger": record.name}
            if record.exc_info and record.exc_info[1] is not None:
                fields["exc_info"] = record.exc_info[1]
            structlog.get_logger().log(record.levelno, message, **fields)
        except Exception:  # noqa: BLE001 - a record that can't be formatted must not break its caller
            structlog.get_logger().warning("a log record could not be read", logger=record.name)


def _prepared(_: object, method: str, event: EventDict) -> EventDict:
    """The line with its time and level, an exception by its type and place, and escaped texts."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    elif isinstance(error, tuple):
        error = error[1]
    if isinstance(error, BaseException):
        event["exception"] = format_exception(error)
    event.pop("stack_info", None)
    level = "error" if method == "exception" else method
    fields = {"timestamp": utc_timestamp(), "level": level, **event}
    for key, value in fields.items():
        if isinstance(value, str):  # A terminal would obey control characters.
            fields[key] = escape_unprintable(value, keep="\n" if key == "exception" else "")
    return fields


def utc_timestamp() -> str:
    """UTC, ISO 8601, milliseconds."""
    second, milliseconds = utc_second()
    return f"{second.decode()}.{milliseconds:03d}Z"


def utc_second() -> tuple[bytes, int]:
    """UTC, ISO 8601, without the milliseconds, which follow."""
    now = time.time()
    second = int(now)
    return _format_second(second), int(now * 1000) - 1000 * second


@lru_cache(maxsize=2)
def _format_second(second: int) -> bytes:
    # Many lines are written within one second.
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}".encode()


def format_exception(error: BaseException) -> str:
    """Type and place of an exception and its causes, the innermost call last.

    The message is left out, except the operating system's of an OSError.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < MOST_CHAINED_EXCEPTIONS:
        kind = type(current)
        name = kind.__qualname__
        if kind.__module__ != "builtins":
            name = f"{kind.__module__}.{name}"
        if isinstance(current, OSError) and current.strerror:
            name += f": {current.strerror}"
        frames = traceback.extract_tb(current.__traceback__, limit=-MOST_FRAMES)
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        parts.append("\n  ".join([name, *places]))
        suppressed = current.__suppress_context__
        current = current.__cause__ or (None if suppressed else current.__context__)
    return "\nfrom ".join(parts)


def escape_unprintable(text: str, keep: str = "") -> str:
    """The text, cut to `MOST_VALUE_CHARACTERS`, with unprintable characters escaped."""
    if len(text) <= MOST_VALUE_CHARACTERS and text.isprintable():
        return text
    escaped = "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text[:MOST_VALUE_CHARACTERS]
    )
    return escaped if len(text) <= MOST_VALUE_CHARACTERS else escaped + "..."


_encoder = msgspec.json.Encoder(enc_hook=repr)


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        line = _encoder.encode(fields)
    except (UnicodeEncodeError, TypeError, ValueError, msgspec.MsgspecError):
        # Half of a surrogate pair, or a key that is not a text.
        plain = {str(key): escape_unprintable(str(value)) for key, value in fields.items()}
        line = _encoder.encode(plain)
    # The encoder escapes the controls of ASCII only, and of these not the last.
    return line if line.isascii() and b"\x7f" not in line else escape_json(line.decode()).encode()


def _console_renderer(*, colours: bool) -> Renderer:
    renderer = structlog.dev.ConsoleRenderer(
        colors=colours,
        sort_keys=False,
        pad_event_to=10,
        exception_formatter=structlog.dev.plain_traceback,
    )

    def render(logger: object, method: str, event: EventDict) -> bytes:
        event["timestamp"] = event["timestamp"][11:19]
        return renderer(logger, method, event).encode("utf-8", "backslashreplace")

    return render


_CLOSED = frozenset({errno.EPIPE, errno.EBADF, errno.ECONNRESET})


class LogWriter:
    """Writes lines to a file descriptor in a thread of its own.

    The descriptor is duplicated: if somebody closed it, its number could become a client's socket.
    If it can't be used, every line is dropped.
    """

    def __init__(
        self,
        fd: int,
        format_dropped: Callable[[int], bytes] | None = None,
        *,
        flush_seconds: float = LOG_FLUSH_SECONDS,
    ) -> None:
        """`format_dropped` makes the line that says how many lines were dropped."""
        self._format_dropped = format_dropped
        self._flush_seconds = flush_seconds
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.dropped_lines = 0
        self._unreported_lines = 0  # Dropped lines that no line has reported
        self._closing = False
        self._work = threading.Event()
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._fd = -1
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        if self._fd >= 0:
            self._thread.start()

    def write(self, line: bytes) -> None:
        """Write a line, which ends with a newline. Never waits and never raises."""
        if self._fd < 0 or self._closing or self._waiting_bytes > MOST_BUFFERED_LOG_BYTES:
            self.dropped_lines += 1
            self._unreported_lines += 1
            return
        self._lines.append(line)
        # The two threads may race by a line or so, which the bound allows.
        self._waiting_bytes += len(line)
        if not self._work.is_set():
            self._work.set()

    def close(self) -> None:
        """Write the waiting lines, for at most `flush_seconds`; later lines are dropped."""
        if self._closing:
            return
        self._closing = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(self._flush_seconds)

    def _run(self) -> None:
        while True:
            self._work.wait()
            if not self._closing:
                time.sleep(LOG_BATCH_SECONDS)
            self._work.clear()
            if self._unreported_lines and self._format_dropped is not None:
                dropped, self._unreported_lines = self._unreported_lines, 0
                self._lines.append(self._format_dropped(dropped))
            batch = b"".join(self._lines.popleft() for _ in range(len(self._lines)))
            self._waiting_bytes = 0
            if batch and not self._write_batch(batch):
                break
            if self._closing and not self._lines:
                break
        fd, self._fd = self._fd, -1
        self._lines.clear()
        os.close(fd)

    def _write_batch(self, batch: bytes) -> bool:
        """Write the batch; False if nobody reads the descriptor any more."""
        rest = memoryview(batch)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Another process that shares the open file has made it non-blocking.
                closing = self._closing
                seconds = self._flush_seconds if closing else 1.0
                if not select.select((), (self._fd,), (), seconds)[1] and closing:
                    return False
            except OSError as error:
                if error.errno in _CLOSED:
                    return False
                # A full disk or a lost terminal: later batches may succeed.
                self.dropped_lines += batch.count(b"\n")
                return True
        return True
