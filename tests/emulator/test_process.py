from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.emulator import expected_text

PROMPT = {"prompt": "hello", "max_tokens": 3}
LIMIT = 30.0


@contextmanager
def emulator(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A node in a process of its own: the process, its URL, and that of its admin server."""
    command = [sys.executable, "-m", "tests.emulator", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip(), process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_process_executes_commands_even_while_it_refuses_connections() -> None:
    with (
        emulator("--slots", "3", "--model", "m") as (process, url, admin_url),
        httpx.Client(timeout=LIMIT) as client,
    ):
        assert client.get(url + "/props").json()["total_slots"] == 3

        def command(**what: object) -> httpx.Response:
            return client.post(admin_url + "/__faults", json=what)

        assert command(do="next", kind="status", status=500, n=2).status_code == 200
        assert client.post(url + "/v1/completions", json=PROMPT).status_code == 500
        command(do="clear")
        reply = client.post(url + "/v1/completions", json=PROMPT)
        assert reply.json()["choices"][0]["text"] == expected_text("hello", 3)

        assert "there are: hang" in command(do="set", kind="rset").json()["error"]["message"]
        assert "no command" in command(do="dance").json()["error"]["message"]
        assert client.post(url + "/__faults", json={"do": "clear"}).json()["requests"] == 2

        command(do="kill")
        with pytest.raises(httpx.ConnectError):
            client.get(url + "/health")
        command(do="revive", loading=True)
        assert client.get(url + "/health").status_code == 503
        command(do="loading", on=False)
        assert client.get(url + "/health").status_code == 200
        stats = client.get(admin_url + "/__stats").json()
        assert (stats["requests"], stats["faults_fired"], stats["failures"]) == (2, 1, [])

        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
