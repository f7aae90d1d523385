"""A pytest plugin: a test fails in which a gateway's event loop was held, or waited for something.

`known.toml` lists the exceptions, each with its reason; it only becomes shorter. With
`--loop-turns` the run ends with a table of all turns above 20 ms.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio._backends._asyncio  # noqa: F401 - as a gateway does before it has an event loop
import pytest

from tests.loop_watch import watch
from tests.loop_watch.watch import Record

HERE = Path(__file__).parent

MOST_SECONDS = 0.050
"""CPU time of a turn beyond which it fails a test."""

_records: list[Record] = []
"""Of this process."""


@dataclass(slots=True)
class Children:
    """What the gateways that this process starts report: a file each, in one folder."""

    folder: Path
    read: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that are known."""

    def take(self) -> list[Record]:
        """What is new."""
        found = []
        for entry in os.scandir(self.folder):
            with open(entry.path, "rb") as file:  # noqa: PTH123 - after each test: it is cheap
                file.seek(self.read.get(entry.name, 0))
                for line in iter(file.readline, b""):
                    if line.endswith(b"\n"):
                        self.read[entry.name] = file.tell()
                        found.append(Record(**json.loads(line)))
        return found


@functools.cache
def known() -> list[dict[str, str]]:
    """What is accepted: `at`, `reason`, and perhaps `kind`."""
    found: list[dict[str, str]] = tomllib.loads((HERE / "known.toml").read_text())["known"]
    return found


def is_known(record: Record) -> bool:
    """Whether `known.toml` names a function that the stack of this record is in."""
    places = {line.rpartition(":")[0] for line in record.stack}
    # A test's own work, and that of commands, whose loops serve nobody.
    return record.place.startswith(
        ("tests/", "gateway/cli/", "gateway/local/", "gateway/workshop/")
    ) or any(one["at"] in places and record.kind in one.get("kind", record.kind) for one in known())


def problems(records: Iterable[Record]) -> list[str]:
    """What is wrong with these records, and not known, for people."""
    return [
        f"{described(one)}\n    " + "\n    ".join(one.stack or ["(no stack)"])
        for one in records
        if (one.kind != "turn" or one.cpu > MOST_SECONDS) and not is_known(one)
    ]


def described(record: Record) -> str:
    """One line."""
    if record.kind != "turn":
        return f"the event loop waited: {record.kind} at {record.place}"
    return (
        f"a turn of the event loop took {1000 * record.cpu:.0f} ms of CPU time, "
        f"{1000 * record.wall:.0f} ms on the clock, {1000 * record.collecting:.0f} ms of it "
        f"collecting garbage, at {record.place}"
    )


def environment(folder: Path, *python_path: str) -> dict[str, str]:
    """What a process needs for its gateway to report to this folder."""
    return {"LOOP_WATCH": str(folder), "PYTHONPATH": os.pathsep.join([str(HERE), *python_path])}


def inherited() -> dict[str, str]:
    """`environment` of this process, for children that get no other variables."""
    return {name: os.environ[name] for name in ("LOOP_WATCH", "PYTHONPATH") if name in os.environ}


class _Watch:
    """Watches this process and its children."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._children = Children(Path(tempfile.mkdtemp(prefix="loop-watch-")))
        self._turns: list[Record] = []
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ.update(environment(self._children.folder, *paths))
        watch.begin(_records.append, whole=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        records = [*_records, *self._children.take()]
        _records.clear()
        if records:
            turns = [asdict(one) for one in records if one.kind == "turn"]
            item.user_properties += [("loop turn", one) for one in turns]
            if wrong := problems(records):
                pytest.fail("\n".join(wrong), pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found = [Record(**one) for name, one in report.user_properties if name == "loop turn"]  # type: ignore[arg-type]
            self._turns += found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("--loop-turns"):
            terminalreporter.section("turns of event loops above 20 ms")
            terminalreporter.write(table(self._turns))

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._children.folder, ignore_errors=True)


def table(turns: Iterable[Record]) -> str:
    """The turns by place, the longest first."""
    places: dict[str, list[Record]] = {}
    for one in sorted(turns, key=lambda one: -one.cpu):
        places.setdefault(one.place, []).append(one)
    lines = ["   CPU  clock     gc  turns  where (ms, of the longest)\n"]
    for place, (most, *others) in places.items():
        figures = (1000 * figure for figure in (most.cpu, most.wall, most.collecting))
        text = " ".join(f"{figure:>6.0f}" for figure in figures)
        lines.append(f"{text} {1 + len(others):>6}  {place}\n")
    return "".join(lines) if places else "no turn of an event loop took 20 ms\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop-turns", action="store_true", help="list long turns of event loops")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Watch(config), "loop watch")
