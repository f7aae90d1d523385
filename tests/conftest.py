"""Settings of every test: the machine's own environment must not matter."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

pytest_plugins = ["tests.ci.tiers", "tests.loop_watch.plugin", "tests.server_kind"]

# A proxy would sit between a test and its server on loopback; the gateway's own variables would
# override what a test sets up.
_FOREIGN = ("http_proxy", "https_proxy", "all_proxy")
_OURS = "LLAMA_GATEWAY_"
# Tests share the generated demo model with `make run`: it is the same, bit for bit.
_KEPT = {"LLAMA_GATEWAY_CACHE"}


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell lets what it starts in the background ignore Ctrl-C, and so would the processes
        # that tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name.lower() in _FOREIGN or (name.startswith(_OURS) and name not in _KEPT):
            del os.environ[name]
    # Where no gateway sets it up: rich takes half a second of an event loop for a traceback.
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
    # Where a test's processes keep their state if it names no folder: not in the user's home.
    folder = tempfile.mkdtemp(prefix="llama-gateway-state-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["XDG_STATE_HOME"] = folder


# In parallel runs the files with the longest tests go first: then no process is left alone with one
# at the end. These are rough means, in seconds.
_REAL, _SLOW, _FAST = 3.0, 3.0, 0.03


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        seconds[item.path] += _REAL if "real" in marks else _SLOW if "slow" in marks else _FAST
    items.sort(key=lambda item: seconds[item.path], reverse=True)


# How long one example takes depends on the machine's other work.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A commit passes or fails by what it changes, so each run tries the same examples; new ones are
# looked for on purpose: make test ARGS=--hypothesis-profile=explore
settings.register_profile("house", _ANY_SPEED, derandomize=True)
settings.register_profile("few", _ANY_SPEED, derandomize=True, max_examples=10)
settings.register_profile("explore", _ANY_SPEED, max_examples=1000)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _logging_of_one_test() -> Iterator[None]:
    """Give structlog back what it had: its settings are the process's, and outlive a gateway.

    A gateway that the tests of a session share passes the records of `logging` to structlog for as
    long as it runs; the tests after its own must not see each of them twice.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h).__module__ == "gateway.watch.logs"]:
        root.removeHandler(handler)
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    if before is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**before)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Return a real PostgreSQL server that tests share; each takes a `new_database` of it."""
    from tests.postgres import MISSING, postgres_binaries, running_postgres

    if postgres_binaries() is None:
        pytest.skip(MISSING)
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new store, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'gateway.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
