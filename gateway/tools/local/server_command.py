"""The command line of one server, whether it is the embedded one or a llama-server binary.

Both are started through `gateway.tools.local.launch`, which sees to pinning and to their end.
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
from gateway.tools.local.cache import cache_folder
from gateway.tools.local.embedded import batch_sizes, openmp_folder
from gateway.tools.local.errors import ServerBinaryError
from gateway.tools.local.plan import MIB, ServerSpec

BINARY_NAME = "llama-server"

HELP_TIMEOUT = 30.0  # seconds for --help

FLAG_PATTERN = re.compile(r"(?<![\w-])(--?[a-z][a-z0-9-]*)")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A llama-server and the flags its own help lists."""

    path: Path
    flags: frozenset[str]


def find_binary(named: Path | None, search_path: str | None = None) -> ServerBinary | None:
    """The llama-server named, else the one on PATH, else None for the embedded server.

    Asks it for its flags. Raises ServerBinaryError when the one named isn't a program, or when
    either doesn't answer.
    """
    found = shutil.which(str(named) if named else BINARY_NAME, path=search_path)
    if found is None:
        if named is None:
            return None
        raise ServerBinaryError(f"{named}: no such program; name a llama-server with --server-bin")
    path = Path(found).absolute()
    try:
        asked = subprocess.run(
            [str(path), "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HELP_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerBinaryError(f"{path} --help: {error}; it must be a llama-server") from error
    flags = parse_flags((asked.stdout + asked.stderr).decode(errors="replace"))
    if not {"--model", "--port", "--parallel"} <= flags:
        raise ServerBinaryError(
            f"{path}: its --help (exit status {asked.returncode}) is not a llama-server's; name "
            "one with --server-bin, or take it off PATH to have the embedded server used"
        )
    return ServerBinary(path, flags)


def parse_flags(help_text: str) -> frozenset[str]:
    """Every flag that a help text names."""
    return frozenset(FLAG_PATTERN.findall(help_text))


def server_command(
    spec: ServerSpec, port: int, *, parent: int, binary: ServerBinary | None = None
) -> list[str]:
    """What to run for this server; it dies with the process `parent`, which must start it."""
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
    """The environment a server needs to find this package and the OpenMP runtime.

    Raises OSError when the cache folder must be written for that and can't be.
    """
    made = dict(os.environ if env is None else env)
    root = str(Path(gateway.__file__).parent.parent)
    made["PYTHONPATH"] = os.pathsep.join(filter(None, [root, made.get("PYTHONPATH")]))
    if openmp := openmp_folder(cache_folder(made)):
        found = made.get("LD_LIBRARY_PATH")
        made["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [found, str(openmp)]))
    return made


def _embedded(spec: ServerSpec, port: int) -> list[str]:
    command = [
        *(sys.executable, "-P", "-m", "gateway.tools.local.embedded"),
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
    # Flags come and go between versions: the first of each row that this one has.
    wanted: list[list[list[str]]] = [
        [["--metrics"]],
        [["--slots"]],
        [["--jinja"]],
        [["--no-ui"], ["--no-webui"]],
        [["--cors-origins", f"http://{spec.host}:{port}"]],
        [["--cache-ram", str(spec.prompt_cache_bytes // MIB)]],
    ]
    if spec.mlock and "--load-mode" in binary.flags:
        wanted.append([["--load-mode", "mlock" if spec.no_mmap else "mmap+mlock"]])
    elif spec.mlock:
        wanted += [[["--mlock"]], [["--no-mmap"]] if spec.no_mmap else []]
    elif spec.no_mmap:
        wanted.append([["--load-mode", "none"], ["--no-mmap"]])
    if spec.embedding:
        wanted += [[["--embeddings"], ["--embedding"]], [["--pooling", "mean"]]]
    for row in wanted:
        command += next((words for words in row if words[0] in binary.flags), [])
    return command
