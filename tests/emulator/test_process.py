from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from tests.emulator import expected_text
from tests.emulator.admin import send_command
from tests.emulator.process import emulator_process

PROMPT = {"prompt": "hello", "max_tokens": 3}
LIMIT = 30.0


@pytest.mark.slow
def test_a_process_executes_commands_even_while_it_refuses_connections() -> None:
    with (
        emulator_process("--slots", "3", "--model", "m") as node,
        httpx.Client(timeout=LIMIT) as client,
    ):
        assert client.get(node.url + "/props").json()["total_slots"] == 3

        def command(**what: object) -> dict[str, str]:
            return asyncio.run(send_command(node.commands, **what))

        assert command(do="next", kind="status", status=500, n=2) == {}
        assert client.post(node.url + "/v1/completions", json=PROMPT).status_code == 500
        command(do="clear")
        reply = client.post(node.url + "/v1/completions", json=PROMPT)
        assert reply.json()["choices"][0]["text"] == expected_text("hello", 3)

        assert "there are: hang" in command(do="set", kind="rset")["error"]
        assert "no command" in command(do="dance")["error"]

        command(do="kill")
        with pytest.raises(httpx.ConnectError):
            client.get(node.url + "/health")
        command(do="revive", loading=True)
        assert client.get(node.url + "/health").status_code == 503
        command(do="loading", on=False)
        assert client.get(node.url + "/health").status_code == 200

        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(LIMIT) == 0
