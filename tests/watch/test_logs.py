from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
from pathlib import Path

import pytest
import structlog

from gateway.events import EventBus
from gateway.watch.event_log import EventLog
from gateway.watch.logs import MOST_VALUE_CHARACTERS, LogFormat, set_up_logging
from tests.watch.test_metrics import finished
from tests.watch.written import Written

SECRET = "the prompt nobody may see"


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
            os.environ[SECRET]
        except KeyError as error:
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
        assert "KeyError" in line["exception"]
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
