"""A real PostgreSQL server for tests, of the distribution's package, on a free port.

    with running_postgres() as server:
        url = server.new_database()

It may be used in any number of pytest workers at once. PostgreSQL refuses to run as root: then it
runs as the user `postgres`, else `nobody`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.processes import free_port

START_LIMIT = 60.0  # seconds until a server must answer, or must have ended


def postgres_binaries() -> Path | None:
    """Return the folder of PostgreSQL's programs, the newest version's; None: not installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3])
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path and shutil.which("postgres") else None


MISSING = "PostgreSQL's server is not installed here (apt-get install postgresql)"

needs_postgres = pytest.mark.skipif(postgres_binaries() is None, reason=MISSING)
"""For tests that start a server of their own."""


def server_account() -> str | None:
    """Whom the server must run as; None: ourselves."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """One server with a folder of its own; it can be stopped, killed, halted and started again.

    It listens at `address`, which other network namespaces may reach.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        binaries = postgres_binaries()
        assert binaries is not None
        self._binaries = binaries
        self._folder = folder
        self._data = folder / "data"
        self._copy = folder / "copy"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self.address = address
        self.port = free_port()
        if (account := server_account()) is not None:
            entry = pwd.getpwnam(account)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        options = ("-A", "trust", "-U", "gateway", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", "-D", self._data, *options)
        if address != "127.0.0.1":
            with (self._data / "pg_hba.conf").open("a") as file:
                file.write("host all all samenet trust\n")

    def _run(self, program: str, *arguments: str | Path) -> None:
        """Run one of PostgreSQL's programs to its end."""
        account = server_account()
        subprocess.run(
            [self._binaries / program, *arguments],
            check=True,
            capture_output=True,
            timeout=START_LIMIT,
            cwd=self._folder,
            user=account,
            extra_groups=None if account is None else [],
        )

    def url(self, database: str = "postgres") -> str:
        """Return the URL of one of its databases."""
        return f"postgresql://gateway:secret-of-tests@{self.address}:{self.port}/{database}"

    def new_database(self) -> str:
        """Make an empty database, and return its URL."""
        name = f"store_{os.getpid()}_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement of SQL, and return its rows."""
        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        assert self._process is None
        log = (self._folder / "log").open("ab")
        account = server_account()
        settings = {
            "listen_addresses": ",".join({"127.0.0.1", self.address}),
            "port": self.port,
            "unix_socket_directories": "",
            # A killed process loses nothing without it; only a machine's power cut does.
            "fsync": "off",
            "max_connections": 50,
            "shared_buffers": "16MB",
        }
        given = [f"--{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [self._binaries / "postgres", "-D", self._data, *given],
            stdout=log,
            stderr=log,
            cwd=self._folder,
            user=account,
            extra_groups=None if account is None else [],
        )
        log.close()
        until = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(), connect_timeout=5).close()
                return
            assert self._process.poll() is None, (self._folder / "log").read_text()[-4000:]
            assert time.monotonic() < until, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """Shut it down, and break its connections (a fast shutdown)."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill all of its processes (SIGKILL)."""
        self._end(signal.SIGKILL)

    def halt(self) -> None:
        """Stop all of its processes (SIGSTOP): connections stay, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let all of its processes go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Let it be halted inside this context."""
        self.halt()
        try:
            yield
        finally:
            self.go_on()

    def copy_data(self) -> None:
        """Keep a copy of all data as it is now, as a standby has it that then loses touch."""
        shutil.rmtree(self._copy, ignore_errors=True)
        to = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "gateway", "--no-sync", "-c", "fast")
        self._run("pg_basebackup", "-D", self._copy, *to)

    def promote_copy(self) -> None:
        """Kill the server; what was copied serves in its place."""
        self.kill()
        shutil.rmtree(self._data)
        self._copy.rename(self._data)
        self.start()

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        """Send it to all of its processes, and return these."""
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                parent = psutil.Process(self._process.pid)
                # The parent first: halted, it makes no new ones.
                processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return processes

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        processes = self._signal(number if number == signal.SIGKILL else signal.SIGCONT)
        self._process.send_signal(number)
        self._process.wait(START_LIMIT)
        psutil.wait_procs(processes[1:], timeout=START_LIMIT)
        self._process = None


@contextlib.contextmanager
def running_postgres(address: str = "127.0.0.1") -> Iterator[PostgresServer]:
    """Run a server of its own inside this context."""
    with tempfile.TemporaryDirectory(
        prefix="llama-gateway-pg-", ignore_cleanup_errors=True
    ) as made:
        server = PostgresServer(Path(made), address)
        try:
            server.start()
            yield server
        finally:
            server.kill()
