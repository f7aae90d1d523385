"""`llama-gateway up --model URL` as a process, from a real HTTPS server."""

from __future__ import annotations

import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme

from gateway.local.cache import downloads_folder
from gateway.local.server import server_environment
from tests.cli.running import refusal, run_on_terminal
from tests.cli.test_up import COMMAND, running
from tests.each_case import each_case
from tests.local.file_server import Fault, FileServer, digest
from tests.servers import demo_model, server_path

TOKEN = "hf_" + "secret" * 5


@pytest.fixture(scope="module")
def content() -> bytes:
    return demo_model().read_bytes()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """The file of the authority that the server's certificate is of."""
    return tmp_path / "authority.pem"


@pytest.fixture
def server(content: bytes, authority: Path) -> Iterator[FileServer]:
    issuer = trustme.CA()
    issuer.cert_pem.write_to_path(authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert("127.0.0.1").configure_cert(context)
    with FileServer(content).serving(context) as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path, authority: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the command, here and in other processes."""
    given = {
        "LLAMA_GATEWAY_CACHE": str(tmp_path / "cache"),
        "PATH": server_path(),
        "SSL_CERT_FILE": str(authority),
        "HF_TOKEN": TOKEN,
        "TMPDIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return server_environment(given)


def parts(environment: dict[str, str]) -> list[Path]:
    return list(downloads_folder(Path(environment["LLAMA_GATEWAY_CACHE"])).glob("*/*.part"))


@pytest.mark.real
@pytest.mark.slow
async def test_a_model_is_downloaded_served_and_not_downloaded_again(
    server: FileServer, environment: dict[str, str], content: bytes
) -> None:
    cdn = f"{server.origin}/cdn/x?X-Signature=hunter2"
    server.faults.extend([Fault(302, {"Location": cdn}), Fault(cut=1_000_000)])
    url = f"{server.origin}/models/tiny-Q8.gguf?key=hunter2"
    arguments = ("--model", url, "--sha256", digest(content), "--token-env", "HF_TOKEN")
    for _ in range(2):
        async with running(environment, *arguments) as it:
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
    server: FileServer, environment: dict[str, str], content: bytes, number: signal.Signals
) -> None:
    held = threading.Event()
    server.faults.append(Fault(hold=held))
    with subprocess.Popen(
        [*COMMAND, "--model", f"{server.origin}/m.gguf"], env=environment,
        stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        try:
            assert server.half_way.wait(60)
            while not (found := parts(environment)) or not found[0].stat().st_size:
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
    (part,) = parts(environment)
    assert 0 < part.stat().st_size <= len(content) // 2


@pytest.mark.slow
def test_what_does_not_fit_or_is_refused_is_not_downloaded_and_a_terminal_shows_a_bar(
    server: FileServer, environment: dict[str, str]
) -> None:
    url = f"{server.origin}/m.gguf"
    status, shown = run_on_terminal(
        "up", "--model", url, "--sha256", "0" * 64, **environment, COLUMNS="100"
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
    assert parts(environment) == []


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
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: str, text: str
) -> None:
    monkeypatch.setenv("BAD_TOKEN", "hunter2\nX-Injected: 1")
    told = refusal("up", *words.split())
    assert text in told
    assert "hunter2" not in told
