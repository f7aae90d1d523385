"""The command line of one server: the embedded one, or a llama-server binary.

Both are started through `gateway.tools.local.launch`, which pins them and ends them with their
parent.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gateway
from gateway.tools.local import ServerBinaryError
from gateway.tools.local.cache import cache_folder
from gateway.tools.local.embedded import batch_sizes, openmp_folder

MIB = 1 << 20

BINARY_NAME = "llama-server"

MEAN = "mean"
"""How a model that was not made for embeddings makes them; without any, a server refuses texts."""

HELP_TIMEOUT = 30.0  # seconds for --help, and for --version

VERSION_PATTERN = re.compile(r"^version: (.+)$", re.MULTILINE)

FLAG_PATTERN = re.compile(r"(?<![\w-])(--?[a-z][a-z0-9-]*)")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One llama.cpp server to start."""

    name: str
    model: Path
    alias: str  # the model's name as the server reports it
    slots: int
    context: int  # tokens of one slot
    threads: int
    numa_node: int  # the node that it is planned for
    cpus: tuple[int, ...] | None = None  # None: any
    memory_node: int | None = None  # None: any
    no_mmap: bool = False
    mlock: bool = False
    prompt_cache_bytes: int = 0  # of evicted prompts
    embedding: bool = False
    own_pooling: bool = False  # the model says how its embeddings are made
    host: str = "127.0.0.1"
    batch: int | None = None  # tokens of one step; None: by its context
    micro_batch: int | None = None  # tokens of one computation


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A llama-server, the flags that its own help lists, and its version with the build."""

    path: Path
    flags: frozenset[str]
    version: str | None = None


def find_binary(named: Path | None, search_path: str | None = None) -> ServerBinary | None:
    """Find the llama-server named, else the one on PATH, else None for the embedded server.

    Its `--help` is read for the flags, and its `--version`. Raises ServerBinaryError when the named
    one is no program, or when the help is not a llama-server's.
    """
    found = shutil.which(str(named) if named else BINARY_NAME, path=search_path)
    if found is None:
        if named is None:
            return None
        raise ServerBinaryError(f"{named}: no such program; name a llama-server with --server-bin")
    path = Path(found).absolute()
    try:
        status, help_text = _output(path, "--help")
        flags = parse_flags(help_text)
        if not {"--model", "--port", "--parallel"} <= flags:
            raise ServerBinaryError(
                f"{path}: its --help (exit status {status}) is not a llama-server's; name "
                "one with --server-bin, or take it off PATH to have the embedded server used"
            )
        version = VERSION_PATTERN.search(_output(path, "--version")[1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerBinaryError(f"{path}: {error}; it must be a llama-server") from error
    return ServerBinary(path, flags, version[1] if version else None)


def _output(program: Path, flag: str) -> tuple[int, str]:
    """Exit status and output of a program with one flag. Raises OSError and TimeoutExpired."""
    done = subprocess.run(
        [str(program), flag],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=HELP_TIMEOUT,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def parse_flags(help_text: str) -> frozenset[str]:
    """Return every flag that a help text names."""
    return frozenset(FLAG_PATTERN.findall(help_text))


def server_command(
    spec: ServerSpec, port: int, *, parent: int, binary: ServerBinary | None = None
) -> list[str]:
    """Return the command of a server. It dies with the process `parent`, which must start it."""
    launch = [sys.executable, "-P", "-m", "gateway.tools.local.launch", "--parent", str(parent)]
    if spec.cpus is not None:
        launch += ["--cpus", ",".join(map(str, spec.cpus))]
    if spec.memory_node is not None:
        launch += ["--memory-node", str(spec.memory_node)]
    if spec.mlock:
        launch.append("--mlock")
    server = _embedded(spec, port) if binary is None else _llama_server(spec, port, binary)
    return [*launch, "--", *server]


def server_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a server finds this package and the OpenMP runtime.

    Raises OSError when the cache folder must be written for that, and can't be.
    """
    result = dict(os.environ if env is None else env)
    root = str(Path(gateway.__file__).parent.parent)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [root, result.get("PYTHONPATH")]))
    if openmp := openmp_folder(cache_folder(result)):
        folders = [result.get("LD_LIBRARY_PATH"), str(openmp)]
        result["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return result


def _embedded(spec: ServerSpec, port: int) -> list[str]:
    command = [
        *(sys.executable, "-P", "-m", "gateway", "node-server"),
        *("--model", str(spec.model), "--alias", spec.alias),
        *("--host", spec.host, "--port", str(port)),
        *("--slots", str(spec.slots), "--ctx", str(spec.slots * spec.context)),
        *("--threads", str(spec.threads)),
        *("--cache-ram", str(spec.prompt_cache_bytes // MIB)),
    ]
    if spec.batch is not None:
        command += ["--batch", str(spec.batch)]
    if spec.micro_batch is not None:
        command += ["--ubatch", str(spec.micro_batch)]
    if spec.no_mmap:
        command.append("--no-mmap")
    if spec.mlock:
        command.append("--mlock")
    if spec.embedding:
        command.append("--embedding")
        command += [] if spec.own_pooling else ["--pooling", MEAN]
    return command


def _llama_server(spec: ServerSpec, port: int, binary: ServerBinary) -> list[str]:
    batch, micro_batch = batch_sizes(spec.context, embedding=spec.embedding)
    command = [
        *(str(binary.path), "-m", str(spec.model), "--alias", spec.alias),
        *("--host", spec.host, "--port", str(port)),
        *("-np", str(spec.slots), "-c", str(spec.slots * spec.context)),
        *("-t", str(spec.threads), "-tb", str(spec.threads)),
        *("-b", str(spec.batch or batch), "-ub", str(spec.micro_batch or micro_batch)),
    ]
    # Flags change between versions: of each row the first one that this binary has.
    rows: list[list[list[str]]] = [
        [["--metrics"]],
        [["--slots"]],
        [["--jinja"]],
        [["--no-ui"], ["--no-webui"]],
        [["--cors-origins", f"http://{spec.host}:{port}"]],
        [["--cache-ram", str(spec.prompt_cache_bytes // MIB)]],
    ]
    if spec.mlock and "--load-mode" in binary.flags:
        rows.append([["--load-mode", "mlock" if spec.no_mmap else "mmap+mlock"]])
    elif spec.mlock:
        rows += [[["--mlock"]], [["--no-mmap"]] if spec.no_mmap else []]
    elif spec.no_mmap:
        rows.append([["--load-mode", "none"], ["--no-mmap"]])
    if spec.embedding:
        rows.append([["--embeddings"], ["--embedding"]])
        rows += [] if spec.own_pooling else [[["--pooling", MEAN]]]
    for row in rows:
        command += next((words for words in row if words[0] in binary.flags), [])
    return command
