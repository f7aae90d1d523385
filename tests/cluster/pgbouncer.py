"""A real pgbouncer in transaction mode in front of a PostgreSQL server of the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres import START_LIMIT, PostgresServer, server_account
from tests.processes import free_port

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

needs_pgbouncer = pytest.mark.skipif(
    PROGRAM is None, reason="pgbouncer is not installed here (apt-get install pgbouncer)"
)


@contextlib.contextmanager
def running_pgbouncer(server: PostgresServer, connections: int = 1) -> Iterator[int]:
    """Run it inside this context, with so many connections to each database; its port.

    It listens where the server does.
    """
    assert PROGRAM is not None
    port = free_port()
    account = server_account()
    with tempfile.TemporaryDirectory(prefix="llama-gateway-pgb-") as made:
        folder = Path(made)
        (folder / "users").write_text('"gateway" "secret-of-tests"\n')
        (folder / "ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
            f"listen_addr = {server.address}\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {folder}/users\n"
            f"pool_mode = transaction\ndefault_pool_size = {connections}\n"
            "tcp_keepidle = 5\ntcp_keepintvl = 2\ntcp_keepcnt = 3\ntcp_user_timeout = 10000\n"
        )
        if account is not None:
            entry = pwd.getpwnam(account)
            for path in (folder, folder / "users", folder / "ini"):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [PROGRAM, str(folder / "ini")],
                stdout=log,
                stderr=log,
                cwd=folder,
                user=account,
                extra_groups=None if account is None else [],
            )
        try:
            until = time.monotonic() + START_LIMIT
            while True:
                with contextlib.suppress(psycopg.OperationalError):
                    url = server.url().replace(f":{server.port}/", f":{port}/")
                    psycopg.connect(url, connect_timeout=5).close()
                    break
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, "pgbouncer does not start"
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait(START_LIMIT)
