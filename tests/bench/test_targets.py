from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from tests.bench.targets import Target, running

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
