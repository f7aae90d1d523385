"""Logging set-up: structlog, readable on a terminal and JSON lines otherwise, to stderr.

No prompt, completion or key can get here: our events carry none, exceptions are logged by type and
place without their message (which may quote what a client sent), and other libraries are heard
from warnings on, one line each.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import structlog

from gateway.observe.sink import Sink

Format = Literal["auto", "console", "json"]

STDERR = 2

VALUE_CHARACTERS = 2000
"""Longer texts are cut: a line has an end."""

CHAINED_EXCEPTIONS = 5
FRAMES = 30

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

    def __init__(self, sink: Sink, *, json: bool, colours: bool) -> None:
        self.sink = sink
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
            logger_factory=lambda *_: _Output(self.sink.write),
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

    def heard(self, level: int) -> bool:
        """Whether lines of this level (`logging`'s numbers) are written."""
        return level >= self._level

    def line(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write a JSON line at once, past structlog's chain; its level was looked at before.

        For what is written once a request: a tenth of the chain's time.
        """
        self.sink.write(
            _encoded({"timestamp": now(), "level": level, "event": event, **fields}) + b"\n"
        )

    def close(self) -> None:
        """Write what waits and stop listening to `logging`; what structlog is told now is lost."""
        root = logging.getLogger()
        if self._handler in root.handlers:
            root.handlers[:] = self._replaced
        logging.captureWarnings(capture=False)
        self.sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def set_up(
    level: str = "info",
    format: Format = "auto",  # noqa: A002 - the word the settings use
    *,
    fd: int = STDERR,
    environment: Mapping[str, str] = os.environ,
) -> Logs:
    """Send everything that is logged in this process to `fd`, in one form."""
    terminal = _is_terminal(fd)
    json = format == "json" or (format == "auto" and not terminal)
    colours = terminal and not environment.get("NO_COLOR")

    def lost(lines: int) -> bytes:
        fields = {"timestamp": now(), "level": "warning", "event": "log lines lost"}
        render = _json if json else _console(colours=colours)
        return render(None, "warning", {**fields, "lines": lines}) + b"\n"

    logs = Logs(Sink(fd, lost), json=json, colours=colours)
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
    return {"timestamp": now(), "level": level, **event}


def now() -> str:
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
        event["exception"] = told(given)
    event.pop("stack_info", None)
    return event


def told(error: BaseException) -> str:
    """Type and place of an exception and of those that it came from, innermost call last."""
    parts = []
    seen: BaseException | None = error
    for _ in range(CHAINED_EXCEPTIONS):
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
        frames = traceback.extract_tb(seen.__traceback__, limit=-FRAMES)
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        parts.append("\n  ".join([name, *places]))
        suppressed = seen.__suppress_context__
        seen = seen.__cause__ or (None if suppressed else seen.__context__)
    return "\nfrom ".join(parts)


def _clean(_: object, __: str, event: EventDict) -> EventDict:
    """Cut long texts; take control characters out, which a terminal would obey."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value, keep="\n" if key == "exception" else "")
    return event


def printable(text: str, keep: str = "") -> str:
    """The text in bounded length, what is not printable escaped."""
    if len(text) <= VALUE_CHARACTERS and text.isprintable():
        return text
    shown = "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text[:VALUE_CHARACTERS]
    )
    return shown if len(text) <= VALUE_CHARACTERS else shown + "..."


_encoder = msgspec.json.Encoder(enc_hook=repr)


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return _encoder.encode(fields)
    except (UnicodeEncodeError, TypeError, ValueError, msgspec.MsgspecError):
        # Half a surrogate pair, a key that is no text: still worth a line.
        plain = {str(key): printable(str(value)) for key, value in fields.items()}
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
