"""Logging set-up: structlog, readable on a terminal and JSON lines otherwise, to stderr.

No prompt, completion or key can get here: our events carry none, exceptions are logged by type and
place without their message (which may quote what a client sent), and other libraries are heard
from warnings on, one line each.
"""

from __future__ import annotations

import contextlib
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
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import structlog

LogFormat = Literal["auto", "console", "json"]

STDERR = 2

MOST_VALUE_CHARACTERS = 2000
"""Longer texts are cut: a line has an end."""

MOST_CHAINED_EXCEPTIONS = 5

MOST_FRAMES = 30

# asyncio shows a callback with its arguments: bytes of a body, for a protocol's data_received.
_QUOTING_ARGUMENTS = ("Exception in callback", "Executing")

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

EventDict = MutableMapping[str, Any]


class Logs:
    """The process's logging, from `set_up` to `close`; a context manager."""

    def __init__(self, sink: LogWriter, *, json: bool, colours: bool) -> None:
        self.writer = sink
        self.json = json
        self._render = _json if json else _console(colours=colours)
        self._level = logging.INFO
        self._handler = _Bridge()
        self._replaced = logging.getLogger().handlers[:]

    def configure(self, level: str) -> None:
        """Log from `level` on; may be called again when the settings change."""
        self._level = LEVELS[level]
        structlog.configure(
            processors=[_stamped, _without_message, _clean, self._render],
            wrapper_class=structlog.make_filtering_bound_logger(self._level),
            logger_factory=lambda *_: _Output(self.writer.write),
            cache_logger_on_first_use=False,
        )
        root = logging.getLogger()
        if self._handler not in root.handlers:
            root.handlers[:] = [self._handler]
        root.setLevel(max(self._level, logging.WARNING))
        logging.getLogger("gateway").setLevel(self._level)
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        logging.captureWarnings(capture=True)

    def is_enabled_for(self, level: int) -> bool:
        """Whether lines of this level (`logging`'s numbers) are written."""
        return level >= self._level

    def write_json(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write a JSON line at once, past structlog's chain; its level was looked at before.

        For what is written once a request: a tenth of the chain's time.
        """
        self.writer.write(
            _encoded({"timestamp": utc_timestamp(), "level": level, "event": event, **fields})
            + b"\n"
        )

    def close(self) -> None:
        """Write what waits and stop listening to `logging`; what structlog is told now is lost."""
        root = logging.getLogger()
        if self._handler in root.handlers:
            root.handlers[:] = self._replaced
        logging.captureWarnings(capture=False)
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def set_up_logging(
    level: str = "info",
    format: LogFormat = "auto",  # noqa: A002 - the word the settings use
    *,
    fd: int = STDERR,
    environment: Mapping[str, str] = os.environ,
) -> Logs:
    """Send everything that is logged in this process to `fd`, in one form."""
    terminal = _is_terminal(fd)
    json = format == "json" or (format == "auto" and not terminal)
    colours = terminal and not environment.get("NO_COLOR")

    def lost(lines: int) -> bytes:
        fields = {"timestamp": utc_timestamp(), "level": "warning", "event": "log lines lost"}
        render = _json if json else _console(colours=colours)
        return render(None, "warning", {**fields, "lines": lines}) + b"\n"

    logs = Logs(LogWriter(fd, lost), json=json, colours=colours)
    logs.configure(level)
    return logs


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class _Output:
    """The end of structlog's chain: takes the rendered line."""

    __slots__ = ("_write",)

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def msg(self, line: bytes) -> None:
        self._write(line + b"\n")

    debug = info = warning = error = critical = exception = msg


class _Bridge(logging.Handler):
    """Hands records of `logging` to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # asyncio's further lines quote the exception, uvicorn's begin a traceback.
            message = record.getMessage().strip().partition("\n")[0]
            if record.name == "asyncio" and message.startswith(_QUOTING_ARGUMENTS):
                message = message.partition("(")[0]
            fields: dict[str, Any] = {"logger": record.name}
            if record.exc_info and record.exc_info[1] is not None:
                fields["exc_info"] = record.exc_info[1]
            structlog.get_logger().log(record.levelno, message, **fields)
        except Exception:  # noqa: BLE001 - a record that can't be worded must not hurt its author
            structlog.get_logger().warning("a log record could not be read", logger=record.name)


def _stamped(_: object, method: str, event: EventDict) -> EventDict:
    level = "error" if method == "exception" else method
    return {"timestamp": utc_timestamp(), "level": level, **event}


def utc_timestamp() -> str:
    """UTC, ISO 8601, milliseconds."""
    return _moment(int(time.time() * 1000))


@lru_cache(maxsize=2)
def _moment(milliseconds: int) -> str:
    # Many lines are written within one of them.
    seconds, rest = divmod(milliseconds, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def _without_message(_: object, __: str, event: EventDict) -> EventDict:
    """An exception by type and place; its message only where the system wrote it."""
    given = event.pop("exc_info", None)
    if given is True:
        given = sys.exc_info()[1]
    elif isinstance(given, tuple):
        given = given[1]
    if isinstance(given, BaseException):
        event["exception"] = format_exception(given)
    event.pop("stack_info", None)
    return event


def format_exception(error: BaseException) -> str:
    """Type and place of an exception and of those that it came from, innermost call last."""
    parts = []
    seen: BaseException | None = error
    for _ in range(MOST_CHAINED_EXCEPTIONS):
        if seen is None:
            break
        kind = type(seen)
        name = (
            kind.__qualname__
            if kind.__module__ == "builtins"
            else (f"{kind.__module__}.{kind.__qualname__}")
        )
        if isinstance(seen, OSError) and seen.strerror:
            name += f": {seen.strerror}"
        frames = traceback.extract_tb(seen.__traceback__, limit=-MOST_FRAMES)
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        parts.append("\n  ".join([name, *places]))
        suppressed = seen.__suppress_context__
        seen = seen.__cause__ or (None if suppressed else seen.__context__)
    return "\nfrom ".join(parts)


def _clean(_: object, __: str, event: EventDict) -> EventDict:
    """Cut long texts; take control characters out, which a terminal would obey."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = escape_unprintable(value, keep="\n" if key == "exception" else "")
    return event


def escape_unprintable(text: str, keep: str = "") -> str:
    """The text in bounded length, what is not printable escaped."""
    if len(text) <= MOST_VALUE_CHARACTERS and text.isprintable():
        return text
    shown = "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text[:MOST_VALUE_CHARACTERS]
    )
    return shown if len(text) <= MOST_VALUE_CHARACTERS else shown + "..."


_encoder = msgspec.json.Encoder(enc_hook=repr)


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return _encoder.encode(fields)
    except (UnicodeEncodeError, TypeError, ValueError, msgspec.MsgspecError):
        # Half a surrogate pair, a key that is no text: still worth a line.
        plain = {str(key): escape_unprintable(str(value)) for key, value in fields.items()}
        return _encoder.encode(plain)


def _json(_: object, __: str, event: EventDict) -> bytes:
    return _encoded(event)


def _console(*, colours: bool) -> Callable[[object, str, EventDict], bytes]:
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


MOST_BUFFERED_LOG_BYTES = 4 * 1024 * 1024
"""Lines kept for a reader that lags; what comes beyond is dropped."""

LOG_BATCH_SECONDS = 0.05
"""How long lines are gathered into one write."""

LOG_FLUSH_SECONDS = 2.0
"""How long the last lines are waited for at the end."""

_CLOSED = frozenset({errno.EPIPE, errno.EBADF, errno.ECONNRESET})


class LogWriter:
    """Writes lines to a file descriptor from a thread of its own.

    The descriptor is duplicated: should somebody close it, its number may come to mean a client's
    socket. Without a usable one every line is dropped.
    """

    def __init__(self, fd: int, format_dropped: Callable[[int], bytes] | None = None) -> None:
        """`lost` words the line that tells how many lines were dropped."""
        self._lost = format_dropped
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self.dropped_lines = 0
        self._untold = 0
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
        """Hand over one line, its newline included. Never waits, never raises."""
        if self._fd < 0 or self._closing or self._waiting > MOST_BUFFERED_LOG_BYTES:
            self.dropped_lines += 1
            self._untold += 1
            return
        self._lines.append(line)
        # The two threads' sums may race by a line or so; the bound needs no more than that.
        self._waiting += len(line)
        if not self._work.is_set():
            self._work.set()

    def close(self) -> None:
        """Write what waits, for as long as `CLOSE_SECONDS` at most; later lines are dropped."""
        if self._closing:
            return
        self._closing = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(LOG_FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._work.wait()
            if not self._closing:
                time.sleep(LOG_BATCH_SECONDS)
            self._work.clear()
            if self._untold and self._lost is not None:
                untold, self._untold = self._untold, 0
                self._lines.append(self._lost(untold))
            batch = self._taken()
            if batch and not self._written(batch):
                break
            if self._closing and not self._lines:
                break
        fd, self._fd = self._fd, -1
        self._lines.clear()
        os.close(fd)

    def _taken(self) -> bytes:
        lines = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        batch = b"".join(lines)
        self._waiting = 0
        return batch

    def _written(self, batch: bytes) -> bool:
        """Write all of it; False when there is nobody left to write for."""
        rest = memoryview(batch)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Somebody who shares the open file has made it non-blocking.
                if self._closing and not select.select((), (self._fd,), (), LOG_FLUSH_SECONDS)[1]:
                    return False
                select.select((), (self._fd,), (), 1.0)
            except OSError as error:
                if error.errno in _CLOSED:
                    return False
                # A full disk, a lost terminal: this batch is lost, the next may be written.
                self.dropped_lines += batch.count(b"\n")
                return True
        return True
