from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.bench import targets
from tests.bench.targets import TARGETS, Plan, Target, TargetError, running

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CORE = min(os.sched_getaffinity(0))


def python(code: str) -> Target:
    return Target(
        "sample",
        lambda: sys.executable,
        "nothing",
        lambda binary, plan: [binary, "-c", code, str(plan.port)],
        ready="/ready",
    )


async def test_a_target_is_ready_pinned_and_gone_afterwards(tmp_path: Path) -> None:
    async with running(python(SERVER), tmp_path, (1,), CORE) as proxy:
        assert proxy.pid is not None
        assert os.sched_getaffinity(proxy.pid) == {CORE}
        pid = proxy.pid
    assert not psutil.pid_exists(pid)


async def test_the_error_of_a_target_that_exits_has_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"sample exited with 3: no such luck \(.*sample\.log\)"):
        async with running(
            python("import sys; print('no such luck'); sys.exit(3)"), tmp_path, (1,), CORE
        ):
            pass


async def test_a_target_that_never_is_ready_is_ended_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "START_LIMIT", 0.5)
    with pytest.raises(TargetError, match="not ready after"):
        async with running(replace(python(SERVER), ready="/never"), tmp_path, (1,), CORE):
            pass


async def test_the_error_of_a_target_that_is_not_installed_has_the_remedy(tmp_path: Path) -> None:
    absent = replace(TARGETS["nginx"], program=lambda: None)
    with pytest.raises(TargetError, match="apt-get install nginx"):
        async with running(absent, tmp_path, (1,), CORE):
            pass


async def test_direct_is_the_upstream_itself(tmp_path: Path) -> None:
    async with running(TARGETS["direct"], tmp_path, (4711, 4712), CORE) as proxy:
        assert proxy == targets.Running(("127.0.0.1", 4711), None)


@pytest.mark.parametrize("name", ["gateway", "nginx", "haproxy"])
def test_every_proxy_is_configured_with_all_upstreams_and_its_port(
    tmp_path: Path, name: str
) -> None:
    command = TARGETS[name].command("/bin/proxy", Plan(tmp_path, 8123, (5001, 5002)))
    configured = " ".join([*command, *(file.read_text() for file in tmp_path.iterdir())])
    assert command[0] == "/bin/proxy"
    assert all(port in configured for port in ("8123", "5001", "5002"))
