"""`llama-gateway up` as a process, with the real servers that it starts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme
import yaml
from structlog.testing import capture_logs

from gateway.cli.progress import StartupProgress
from gateway.local.cache import DOWNLOADS
from gateway.local.gguf import read_model
from gateway.local.memory import ServerSettings, server_needs
from gateway.local.server import ServerEvent, server_environment
from tests.cli.running import refusal, run_on_terminal, run_process
from tests.each_case import each_case
from tests.known import known
from tests.local.file_server import Fault, FileServer, digest
from tests.polling import eventually
from tests.processes import wait_until_gone
from tests.servers import demo_model, server_binary, server_path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "gateway", "up", "--port", "0", "--admin-port", "0")
START_LIMIT = 120.0  # seconds
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
real = [pytest.mark.real, pytest.mark.slow]


@dataclass(slots=True)
class Up:
    """The process, and its lines on stderr."""

    process: Process
    lines: list[str] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip("\n"))
            self.more.set()
        self.more.set()

    async def line_with(self, *parts: str) -> str:
        """Wait for a line with one of these texts."""
        async with asyncio.timeout(START_LIMIT):
            while True:
                self.more.clear()
                for line in self.lines:
                    if any(part in line for part in parts):
                        return line
                await self.more.wait()

    async def url(self) -> str:
        line = await self.line_with("Serving an OpenAI-compatible API at")
        return known(ADDRESS.search(line))[0]

    def servers(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    async def listed(self, what: str) -> dict[str, Any]:
        """What the admin API lists at this path, by name."""
        admin = json.loads(await self.line_with('"listening"'))["admin"]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = (await client.get(f"{admin}/admin/{what}")).json()
        return {one["name"]: one for one in answer[what]}

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A good answer to a request to the gateway's API."""
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            answer = await client.request(method, f"{await self.url()}/v1/{path}", **options)
        assert answer.status_code == 200, answer.text
        return answer

    async def chat(self, **model: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **model}
        return await self.request("POST", "chat/completions", json=body)

    async def models(self) -> list[dict[str, Any]]:
        """The models that clients see."""
        found: list[dict[str, Any]] = (await self.request("GET", "models")).json()["data"]
        return found

    async def ready(self) -> bool | None:
        states = {node["state"] for node in (await self.listed("nodes")).values()}
        return states == {"ready"} or None

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), START_LIMIT)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    given = {"LLAMA_GATEWAY_CACHE": str(tmp_path / "cache"), "PATH": server_path()}
    state = str(tmp_path / "state")
    return server_environment({**given, "TMPDIR": str(tmp_path), "XDG_STATE_HOME": state})


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"health": {"interval": 0.2, "timeout": 30}}))
    return path


@asynccontextmanager
async def running(
    environment: dict[str, str], *arguments: str | Path, command: Sequence[str] = COMMAND
) -> AsyncIterator[Up]:
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=environment,
        cwd=environment["TMPDIR"], start_new_session=True,
    )  # fmt: skip
    started = Up(process)
    listening = asyncio.create_task(started.listen())
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await asyncio.wait_for(listening, START_LIMIT)


async def all_gone(processes: list[psutil.Process]) -> None:
    await asyncio.to_thread(wait_until_gone, [one.pid for one in processes])


def left_behind(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["TMPDIR"]).glob("llama-gateway-*"))


class TestServing:
    pytestmark = real

    @pytest.mark.smoke
    async def test_it_starts_servers_serves_and_ends_them(
        self, environment: dict[str, str], settings: Path
    ) -> None:
        async with running(
            environment, "--servers", "2", "--slots", "3", "--config", settings
        ) as it:
            url = await it.url()
            assert "llama-gateway top" in await it.line_with("See the fleet at http://127.0.0.1:")
            output = "\n".join(it.lines)
            assert "random" in output
            for name in ("local-0", "local-1"):
                for told in (r"started on http://127\.0\.0\.1:\d+", r"ready after \d+\.\d s"):
                    assert re.search(f"^  {name}: {told}$", output, re.MULTILINE)
            assert "\x1b" not in output
            assert ("not the embedded server" in output) is (server_binary() is not None)
            line = await it.line_with("curl")
            curl = re.fullmatch(rf"  curl {url}/v1/chat/completions -d '(.*)'", line)
            answer = await it.request("POST", "chat/completions", content=known(curl)[1])
            assert answer.json()["choices"][0]["message"]["content"].strip()
            await eventually(it.ready)
            nodes = await it.listed("nodes")
            labels = {"numa": "0", "started_by": "llama-gateway up"}
            for name in ("local-0", "local-1"):
                assert (nodes[name]["slots_total"], nodes[name]["labels"]) == (3, labels)
                assert (nodes[name]["host"], nodes[name]["models"]) == ("localhost", ["demo"])
            servers = it.servers()
            assert len(servers) == 2
            assert await it.end() == 0
            await all_gone(servers)
        assert left_behind(environment) == []

    async def test_context_and_embeddings_are_as_asked_and_an_overflow_says_how_to_get_more(
        self, environment: dict[str, str], settings: Path
    ) -> None:
        long = "Tell me about rivers. " * 1500
        flags = ("--context", "8192", "--embedding", "--slots", "1", "--config", settings)
        async with running(environment, *flags) as it:
            await it.line_with("a llama.cpp server with 1 slot of 8,192 tokens; logs")
            url = await it.url()
            assert (await it.listed("nodes"))["local-0"]["context"] == 8192
            async with httpx.AsyncClient(trust_env=False, base_url=url, timeout=120) as client:
                for _ in range(2):  # a server of embeddings also chats
                    found = await it.request("POST", "embeddings", json={"input": long[:9000]})
                    assert any(found.json()["data"][0]["embedding"])
                    await it.chat()
                content = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
                for path, body in (
                    ("chat/completions", content),
                    ("chat/completions", {**content, "stream": True}),
                    ("messages", content),
                    ("responses", {"input": long}),
                    ("completions", {"prompt": long}),
                    ("embeddings", {"input": long}),
                ):
                    found = await client.post(f"/v1/{path}", json=body)
                    assert found.status_code == 400, (path, found.text[:300], found.text[-900:])
                    assert found.json()["error"]["message"].endswith(
                        " Or start 'llama-gateway up' with '--context 16384'."
                    )

    @pytest.mark.binary_only("the wheel's server has no router mode")
    async def test_a_folder_of_models_is_loaded_on_demand_and_followed(
        self, environment: dict[str, str], settings: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "models"
        folder.mkdir()
        for name in ("a", "b"):
            (folder / f"{name}.gguf").symlink_to(demo_model())
        (folder / "broken.gguf").write_text("no model")
        arguments = ("--models-dir", folder, "--servers", "1", "--slots", "3")
        async with running(environment, *arguments, "--config", settings) as it:
            assert "not a GGUF model" in await it.line_with("not served: broken.gguf")

            async def names(expected: list[str]) -> bool | None:
                return [one["id"] for one in await it.models()] == expected or None

            async def answers(name: str) -> None:
                answer = await it.chat(model=name)
                assert answer.headers["x-gateway-node"] == f"local-0/{name}"
                assert answer.json()["model"] == name

            assert await names(["a", "b"])
            assert len(it.servers()) == 1  # nothing is loaded by being looked at
            for name in ("a", "b", "a"):
                await answers(name)
            assert (await it.listed("nodes"))["local-0/a"]["slots_total"] == 3
            # What the files need and what prompts may take: known without a load.
            needed = {one["memory"] for one in (await it.listed("placements")).values()}
            alone, _ = server_needs(read_model(demo_model()), ServerSettings(3, 4096))
            assert min(needed) > alone + (1 << 20)
            part = folder / "c.part"
            shutil.copyfile(demo_model(), part)
            part.rename(folder / "c.gguf")
            found = json.loads(await it.line_with('"models folder"'))
            assert (found["added"], found["removed"], found["not_served"]) == (["c"], [], [])

            await eventually(lambda: names(["a", "b", "c"]))
            await answers("c")
            servers = it.servers()
            assert len(servers) == 4
            assert await it.end() == 0
            await all_gone(servers)
        assert left_behind(environment) == []

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        "router",
        [False, pytest.param(True, marks=pytest.mark.binary_only("the wheel's has no router"))],
    )
    async def test_no_server_outlives_a_killed_gateway(
        self, environment: dict[str, str], tmp_path: Path, router: bool
    ) -> None:
        (tmp_path / "a.gguf").symlink_to(demo_model())
        arguments = ("--models-dir", tmp_path, "--servers", "1") if router else ("--servers", "2")
        async with running(environment, *arguments) as it:
            await it.chat(**{"model": "a"} if router else {})
            servers = it.servers()
            assert len(servers) == 2
            await it.end(signal.SIGKILL)
            await all_gone(servers)

    async def test_a_killed_server_comes_back(
        self, environment: dict[str, str], settings: Path
    ) -> None:
        async with running(environment, "--servers", "2", "--config", settings) as it:
            await eventually(it.ready)
            port = (await it.listed("nodes"))["local-0"]["url"].rpartition(":")[2]
            (victim,) = (one for one in it.servers() if port in one.cmdline())
            # It can't come back before the answer that comes from the other one.
            model = Path(environment["LLAMA_GATEWAY_CACHE"], "models", demo_model().name)
            away = shutil.move(model, model.with_suffix(".away"))
            victim.kill()
            exited = json.loads(await it.line_with('"server exited"'))
            assert (exited["server"], exited["how"]) == ("local-0", "killed by SIGKILL")
            assert (await it.chat()).headers["x-gateway-node"] == "local-1"
            shutil.move(away, model)
            await it.line_with('"server ready"')
            await eventually(it.ready)
            assert (await it.listed("nodes"))["local-0"]["url"].endswith(f":{port}")
            servers = it.servers()
            assert len(servers) == 2
            assert victim not in servers
            assert await it.end(signal.SIGINT) == 0
            await all_gone(servers)

    @pytest.mark.smoke
    @pytest.mark.skipif(
        not (ROOT / ".venv/bin/llama-gateway").exists(), reason="make test sets up .venv"
    )
    async def test_make_run_serves_until_ctrl_c_and_leaves_no_process(
        self, environment: dict[str, str]
    ) -> None:
        command = ["make", "-C", str(ROOT), "run", "ARGS=--servers 1 --port 0 --admin-port 0"]
        environment["PATH"] = os.environ["PATH"]
        async with running(environment, command=command) as it:
            assert (await it.chat()).json()["usage"]["completion_tokens"] == 4
            started = it.servers()
            # A terminal sends the signal to all processes of its foreground.
            os.killpg(it.process.pid, signal.SIGINT)
            await asyncio.wait_for(it.process.wait(), START_LIMIT)
            await all_gone(started)

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
    async def test_a_signal_ends_it_while_servers_start(
        self, environment: dict[str, str], number: signal.Signals, status: int
    ) -> None:
        slow = Path(environment["TMPDIR"]) / "llama-server"
        slow.write_text(
            "#!/bin/sh\n"
            'case "$1" in --help) echo --model --port --parallel;; --version) ;; '
            "*) exec /bin/sleep 600;; esac\n"
        )
        slow.chmod(0o755)
        async with running(environment, "--servers", "2", "--server-bin", slow) as it:
            await it.line_with("local-1: started")
            servers = it.servers()
            assert len(servers) == 2
            assert await it.end(number) == status
            await all_gone(servers)
            assert "Traceback" not in "".join(it.lines)
        assert left_behind(environment) == []


# Refusing.


@each_case(
    ("arguments", "status", "words"),
    [
        (("--model", "missing.gguf"), 1, ("missing.gguf: no such file",)),
        (("--model", "text.gguf"), 1, ("not a GGUF model", "download it again")),
        (
            ("--model", str(demo_model()), "--context", "131073"),
            1,
            ("take --context 131072 at most, or another model",),
        ),
        (("--model", "large.gguf"), 1, ("not enough memory", "--force-memory")),
        (("--server-bin", "missing"), 1, ("--server-bin",)),
        (("--models-dir", "."), 1, ("no router mode", "make llama-server", "--server-bin")),
        (("--models-dir", ".", "--model", "text.gguf"), 2, ("exclude each other",)),
        (("--models-dir", ".", "--max-bytes", "1GiB"), 2, ("--max-bytes is for a download",)),
        (
            ("--model", str(demo_model()), "--model", "large.gguf"),
            1,
            ("not enough memory", "--models-dir"),
        ),
        (("--model", str(demo_model()), "--model", "text.gguf"), 1, ("not a GGUF model",)),
        (("--model", str(demo_model())) * 2, 1, ("both models are named demo-", "rename one")),
        (("--model", "a.gguf", "--model", "b.gguf", "--servers", "2"), 2, ("of several",)),
        (("--host", "0.0.0.0"), 2, ("--allow-anonymous",)),
    ],
)
def test_a_start_that_can_not_succeed_is_refused_with_the_remedy(
    folder: Path, arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    told = refusal("up", *arguments, status=status)
    assert told.startswith("error: ") or status == 2
    assert all(word in told for word in words), told
    if "large.gguf" in arguments:
        assert len(re.findall(r"\d+\.\d GiB", told)) >= 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that are no models for this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a fetched llama-server
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "text.gguf").write_text("hello")
    large = tmp_path / "large.gguf"
    # Of an architecture that is not known, the file's size decides.
    large.write_bytes(demo_model().read_bytes().replace(b"llama", b"lxama"))
    with large.open("r+b") as file:
        file.truncate(psutil.virtual_memory().total)  # a hole: it takes no room on the disk
    return tmp_path


@pytest.mark.real
@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_reported_before_a_server_starts(flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = {"--port": "0", "--admin-port": "0", flag: str(other.getsockname()[1])}
        ran = run_process(["up", *(word for pair in ports.items() for word in pair)])
    assert ran.status == 1
    assert f"choose another with {flag}" in ran.err
    assert "started on" not in ran.err


def test_after_the_start_a_server_that_exits_and_returns_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StartupProgress(["one"]) as progress:
        pass
    with capture_logs() as logged:
        progress.show(ServerEvent("one", "exited", "exit status 1", 4.0))
        progress.show(ServerEvent("one", "loading"))
        progress.show(ServerEvent("one", "ready", seconds=3.14))
    assert capsys.readouterr().err.strip() == ""
    assert logged == [
        {"event": "server exited", "log_level": "warning", "server": "one",
         "how": "exit status 1", "restart_in": 4.0},
        {"event": "server ready", "log_level": "info", "server": "one", "seconds": 3.1},
    ]  # fmt: skip


# Models from a real HTTPS server.


TOKEN = "hf_" + "secret" * 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    issuer = trustme.CA()
    issuer.cert_pem.write_to_path(tmp_path / "authority.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert("127.0.0.1").configure_cert(context)
    with FileServer(demo_model().read_bytes()).serving(context) as server:
        yield server


@pytest.fixture
def with_token(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The environment of the command, here and in other processes, with a token."""
    environment |= {"SSL_CERT_FILE": str(tmp_path / "authority.pem"), "HF_TOKEN": TOKEN}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


def parts(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["LLAMA_GATEWAY_CACHE"], DOWNLOADS).glob("*/*.part"))


@pytest.mark.real
@pytest.mark.slow
async def test_a_model_is_downloaded_served_and_not_downloaded_again(
    server: FileServer, with_token: dict[str, str]
) -> None:
    cdn = f"{server.origin}/cdn/x?X-Signature=hunter2"
    server.faults.extend([Fault(302, {"Location": cdn}), Fault(cut=1_000_000)])
    url = f"{server.origin}/models/tiny-Q8.gguf?key=hunter2"
    arguments = ("--model", url, "--sha256", digest(server.content), "--token-env", "HF_TOKEN")
    for _ in range(2):
        async with running(with_token, *arguments) as it:
            await it.chat()
            assert [model["id"] for model in await it.models()] == ["tiny-Q8"]
            assert await it.end() == 0
        output = "\n".join(it.lines)
        assert "Traceback" not in output
        for secret in ("hunter2", TOKEN):
            assert secret not in output
    targets = [target for target, _ in server.requests]
    assert targets == [
        "/models/tiny-Q8.gguf?key=hunter2", "/cdn/x?X-Signature=hunter2",
        "/models/tiny-Q8.gguf?key=hunter2",
    ]  # fmt: skip
    assert server.ranges_asked == [None, None, "bytes=1000000-"]
    assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, headers in server.requests)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_has_arrived(
    server: FileServer, with_token: dict[str, str], number: signal.Signals
) -> None:
    held = threading.Event()
    server.faults.append(Fault(hold=held))
    with subprocess.Popen(
        [*COMMAND, "--model", f"{server.origin}/m.gguf"], env=with_token,
        stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        try:
            assert server.half_way.wait(60)
            while not (found := parts(with_token)) or not found[0].stat().st_size:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            held.set()
            process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err
    assert ("the same command goes on" in err) is (number == signal.SIGINT)
    (part,) = parts(with_token)
    assert 0 < part.stat().st_size <= len(server.content) // 2


@pytest.mark.slow
def test_what_does_not_fit_or_is_refused_is_not_downloaded_and_a_terminal_shows_a_bar(
    server: FileServer, with_token: dict[str, str]
) -> None:
    url = f"{server.origin}/m.gguf"
    status, shown = run_on_terminal(
        "up", "--model", url, "--sha256", "0" * 64, environment={**with_token, "COLUMNS": "100"}
    )
    assert status == 1
    assert "Downloading https://127.0.0.1" in shown
    assert "MB" in shown or "MiB" in shown
    assert "not 0000000000" in shown.replace("\r\n", "")
    server.always = Fault(401)
    told = refusal("up", "--model", url, status=1)
    assert ("HTTP 401 Unauthorized" in told, "--token-env" in told) == (True, True)
    assert all("authorization" not in headers for _, headers in server.requests)
    server.always = Fault(announce=psutil.virtual_memory().total)
    assert "not enough memory" in refusal("up", "--model", url, status=1)
    assert parts(with_token) == []


URL, TWO = "--model https://h/m.gguf ", "--model https://h/a.gguf --model https://h/b?k=hunter2 "
SUM = f"--sha256 {'0' * 64} "


@each_case(
    ("words", "text"),
    [
        ("--model http://models.example/m.gguf?k=hunter2", "only https"),
        ("--model ftp://me:hunter2@models.example/m.gguf", "only https"),
        (URL + "--sha256 hunter2", "64 hexadecimal digits"),
        (URL + SUM * 2, "given 2 times"),
        ("--model https://h/m-00001-of-00003.gguf " + SUM, "1 times, but the model has 3 files"),
        (URL + "--token-env NO_SUCH_TOKEN", "not set"),
        (URL + "--token-env BAD_TOKEN", "holds no token"),
        ("--model https://a:hunter2@h/m --token-env HF_TOKEN", "give one only"),
        ("--model m.gguf " + SUM, "names no URL"),
        (TWO + "--token-env HF_TOKEN", "--token-env is for one URL"),
    ],
)
def test_wrong_usage_is_2_and_tells_no_secret(
    with_token: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: str, text: str
) -> None:
    monkeypatch.setenv("BAD_TOKEN", "hunter2\nX-Injected: 1")
    told = refusal("up", *words.split())
    assert text in told
    assert "hunter2" not in told
