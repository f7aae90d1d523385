"""`llama-gateway node-server --model F ...`: one llama.cpp server in this process.

The server is the one in the xllamacpp wheel. Once it has loaded its model it writes its address to
standard output; its log goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from gateway.local.launch import die_with_parent

# What llama-server's `--cache-type-k` and `--cache-type-v` take.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
DEFAULT_BATCH = 512  # tokens of one step; a larger batch stalls the other slots for longer
DEFAULT_MICRO_BATCH = 256
PROMPT_CACHE_MIB = 1024  # MiB of host memory; llama.cpp's own default is 8192
POOLING_TYPES = ("none", "mean", "cls", "last", "rank")


def argument_parser() -> argparse.ArgumentParser:
    """Build the command line; names follow llama-server's where it has the option."""
    parser = argparse.ArgumentParser(prog="llama-gateway node-server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--alias", help="the model's name (default: the file's)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--ctx", type=int, default=0, help="tokens over all slots; 0: as trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, help="tokens of one step")
    parser.add_argument("--ubatch", type=int, help="tokens of one computation")
    parser.add_argument("--cache-ram", type=int, default=PROMPT_CACHE_MIB, metavar="MiB")
    for name, of in (("k", "keys"), ("v", "values")):
        parser.add_argument(
            f"--cache-type-{name}", choices=KV_TYPES, default="f16", help=f"of a slot's {of}"
        )
    parser.add_argument(
        "--exact", action="store_true", help="no rounding by which prefill and decode differ"
    )
    parser.add_argument(
        "--no-mmap", action="store_true", help="read the model into memory of its own"
    )
    parser.add_argument("--mlock", action="store_true", help="lock the model in memory")
    parser.add_argument("--embedding", action="store_true", help="serve embeddings too")
    parser.add_argument(
        "--pooling", choices=POOLING_TYPES, help="of embeddings (default: the model's)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file of API keys, one a line"
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="die with this process")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal; exit 1 when the server can't start."""
    options = argument_parser().parse_args(arguments)
    die_with_parent(options.parent or os.getppid())
    # There is nothing to clean up: either signal ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # When llama.cpp aborts it would first run gdb, if installed, for a backtrace.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        server = start_server(options)
    except ModuleNotFoundError as error:
        from gateway.system import install_command

        sys.exit(
            f"embedded: the package {error.name!r} is not installed: "
            f"{install_command('local')}, or name a llama-server with --server-bin FILE"
        )
    except ImportError as error:
        sys.exit(f"embedded: the package {error.name!r} can't be loaded: {error}")
    except ValueError as error:
        sys.exit(f"embedded: {error}")
    except RuntimeError as error:
        sys.exit(f"embedded: llama.cpp could not serve {options.model}: {error}")
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    while True:
        signal.pause()


def batch_sizes(context: int, *, embedding: bool) -> tuple[int, int]:
    """Return the batch and the micro-batch in tokens, for slots of `context` tokens.

    For embeddings one micro-batch must hold the whole text: a longer one is refused.
    """
    if embedding:
        return max(DEFAULT_BATCH, context), max(DEFAULT_BATCH, context)
    return DEFAULT_BATCH, DEFAULT_MICRO_BATCH


def read_api_keys(path: Path) -> list[str]:
    """Read the API keys of a file, one a line. Raises ValueError where there is none."""
    try:
        keys = [line.strip() for line in path.read_text("ascii").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} can't be read: {error}") from None
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key: write keys into it, one a line")
    return keys


def start_server(options: argparse.Namespace) -> Any:
    """Start the server, which serves from its own threads while the object lives.

    Raises ValueError when the file of API keys can't be used.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    if options.api_key_file:
        params.api_keys = read_api_keys(options.api_key_file)
    params.model.path = str(options.model)
    params.model_alias = {options.alias or options.model.stem}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.ctx
    batch, micro_batch = batch_sizes(options.ctx // options.slots, embedding=options.embedding)
    params.n_batch = options.batch or batch
    params.n_ubatch = min(options.ubatch or micro_batch, params.n_batch)
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.cache_ram_mib = options.cache_ram
    types = xllamacpp.ggml_type
    params.cache_type_k = getattr(types, f"GGML_TYPE_{options.cache_type_k.upper()}")
    params.cache_type_v = getattr(types, f"GGML_TYPE_{options.cache_type_v.upper()}")
    params.fit_params = False  # this context or an error, never a smaller context
    # GET /props works without endpoint_props, which would let anybody change them.
    params.endpoint_metrics = params.endpoint_slots = True
    params.ui = False
    # By default any web page may call the server and read its slots in a browser.
    params.cors_origins = ""
    params.cors_origins_explicit = True
    if options.exact:
        # Flash attention rounds to F16, in prefill otherwise than in decode: a resumed stream would
        # get other probabilities, by about 0.003.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
    if options.no_mmap or options.mlock:
        mapped, locked = "" if options.no_mmap else "MMAP_", "MLOCK" if options.mlock else "NONE"
        params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{mapped}{locked}")
    if options.embedding:
        params.embedding = True
    if options.pooling:
        kind = f"LLAMA_POOLING_TYPE_{options.pooling.upper()}"
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, kind)
    return xllamacpp.Server(params)


OPENMP_LIBRARY = "libgomp.so.1"
OPENMP_PACKAGE = "pykdtree"  # the smallest wheel that holds a copy, under a name of its own


def openmp_folder(cache: Path) -> Path | None:
    """Return the folder with the OpenMP runtime for a server; None where it needs none from us.

    It is made in the cache folder if missing; several processes may call this at once. Raises
    OSError when it can't be written.
    """
    if system_has_openmp() or (packaged := packaged_openmp()) is None:
        return None
    folder = cache / "lib"
    link = folder / OPENMP_LIBRARY
    if not link.exists() or not link.samefile(packaged):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            new = Path(draft) / OPENMP_LIBRARY
            new.symlink_to(packaged)
            new.replace(link)
    return folder


def system_has_openmp() -> bool:
    """Whether a server finds the OpenMP runtime by itself; outside Linux its wheel has one."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL(OPENMP_LIBRARY)
    except OSError:
        return False
    return True


def packaged_openmp() -> Path | None:
    """Return the copy of the OpenMP runtime among the installed packages; None without any."""
    try:
        files = importlib.metadata.files(OPENMP_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(os.fspath(file.locate())) for file in files if file.name.startswith("libgomp")]
    return next((path.absolute() for path in paths if path.is_file()), None)


if __name__ == "__main__":
    main()
