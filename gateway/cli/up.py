"""`llama-gateway up`: starts llama.cpp servers on this machine, and the gateway over them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.options import Panel, examples_epilog
from gateway.cli.terminal import CommandFailed, WrongUsage, failing_by, print_note

if TYPE_CHECKING:
    from gateway.app.assembly import Gateway
    from gateway.app.startup import Options
    from gateway.local.download import ModelWish
    from gateway.local.gguf import ModelFile
    from gateway.local.plan import LocalFleetPlan, ModelFolder


EXAMPLES = examples_epilog(
    ("llama-gateway up", "a tiny demo model: everything works, its words mean nothing"),
    ("llama-gateway up --model mistral-7b.gguf", "a real model, one server per NUMA node"),
    (
        "llama-gateway up --model https://HOST/mistral-7b.gguf --sha256 DIGEST",
        "downloaded into the cache first; after a break the same command goes on",
    ),
    ("llama-gateway up --model m.gguf --servers 2 --slots 4", "two servers of four slots each"),
    (
        "llama-gateway up --model m.gguf --context 65536 --slots 1",
        "for a coding agent, whose first prompt is thousands of tokens",
    ),
    (
        "llama-gateway up --model a.gguf --model b.gguf",
        "several models, one server each, as far as memory goes",
    ),
    (
        "llama-gateway up --models-dir ~/models",
        "all models of a folder, each loaded when it is asked for; needs llama-server",
    ),
    ("llama-gateway up --embedding", "serves /v1/embeddings too"),
    ("llama-gateway up --server-port 9081", "its servers on ports 9081, 9082, ..."),
)

_of_servers = Panel("Servers")
_of_download = Panel("Download")
_DIGEST = re.compile(r"[0-9a-f]{64}")
LONGEST_TOKEN = 4096  # characters of a token for a download
FOLDER_SECONDS = 5.0  # between two looks at --models-dir
MOST_LINES = 60  # of models and of files that are none


class DownloadFlags(options.FlagGroup):
    """How models behind URLs are downloaded."""

    sha256: list[str] | None = _of_download(
        "DIGEST",
        "SHA-256 of the model behind a URL; once for each file of a split one.",
        show_default="not checked",
    )
    token_env: str | None = _of_download(
        "NAME",
        "Variable of the environment, such as HF_TOKEN, whose token is sent to the URL's "
        "host (and to no other one).",
        show_default="no token is sent",
    )
    max_bytes: str | None = _of_download(
        "SIZE",
        "Refuse a larger download, such as 8GiB.",
        show_default="what disk and memory have room for",
    )

    def check_unused(self) -> None:
        """Raises CommandFailed, if one of them is given."""
        for name, value in vars(self).items():
            if value:
                flag = f"--{name.replace('_', '-')}"
                raise WrongUsage(f"{flag} is for a download: --model names no URL")

    def wish(self, model: str) -> ModelWish:
        """What is downloaded from a URL. Raises CommandFailed, whose text holds no secret."""
        from gateway.config.fields import parse_size
        from gateway.local.download import ModelUrlError, ModelWish, parse_model_url, part_urls

        with failing_by(ModelUrlError, status=2):
            url = parse_model_url(model)
            files = len(part_urls(url))
        digests = tuple(digest.strip().lower() for digest in self.sha256 or ())
        if not all(_DIGEST.fullmatch(digest) for digest in digests):
            raise WrongUsage("--sha256: not 64 hexadecimal digits")
        if digests and len(digests) != files:
            raise WrongUsage(
                f"--sha256: given {len(digests)} times, but the model has {files} "
                f"{'file' if files == 1 else 'files'}; give it once for each, in order"
            )
        token, token_env = None, self.token_env
        if token_env is not None:
            token = os.environ.get(token_env, "").strip()
            if not token:
                raise WrongUsage(f"--token-env: the variable {token_env} is empty or not set")
            if not (token.isascii() and token.isprintable()) or len(token) > LONGEST_TOKEN:
                raise WrongUsage(f"--token-env: the variable {token_env} holds no token")
            if url.userinfo:
                raise WrongUsage("--token-env: the URL holds a password already; give one only")
        most, max_bytes = None, self.max_bytes
        if max_bytes is not None:
            try:
                most = parse_size(max_bytes)
            except ValueError:
                most = 0
            if most <= 0:
                raise WrongUsage(f"--max-bytes {max_bytes}: not a size, such as 8GiB")
        return ModelWish(url, digests, token, most)


def up(
    *,
    model: list[str] | None = _of_servers(
        "FILE.gguf|URL",
        "The model to serve: a file, or an https address that it is downloaded from once. "
        "Given several times: one server for each.",
        show_default="a small demo model of random weights",
    ),
    models_dir: Path | None = _of_servers(
        "DIR",
        "Serve all models of this folder and of the folders in it: each is loaded when it is "
        "asked for, and unloaded when others need its memory. Needs a llama-server program. "
        "New files appear by themselves.",
        show_default="none",
    ),
    servers: int | None = _of_servers(
        "N",
        "How many llama.cpp servers to start for one model, or for --models-dir.",
        min=1,
        max=256,
        show_default="one per NUMA node",
    ),
    slots: int = _of_servers(
        "N",
        "Requests that one model takes at once on a server; of several models each gets fewer "
        "where memory is short.",
        2,
        min=1,
        max=256,
    ),
    context: int | None = _of_servers(
        "N",
        "Tokens of prompt and answer that one request may have. Coding agents begin with "
        "thousands. Memory grows with slots times context.",
        min=1,
        max=1 << 24,
        show_default="4096, or the model's if that is less",
    ),
    embedding: bool = _of_servers.switch(
        "--embedding",
        "Serve /v1/embeddings too, beside chats. A text may have --context tokens, and "
        "takes them at once: that costs memory.",
    ),
    server_port: int | None = _of_servers(
        "PORT",
        "Port of the first server; the others get the next ones. Ports in use are skipped. "
        "0 takes free ones.",
        min=0,
        max=65535,
        show_default="8081",
    ),
    server_bin: Path | None = _of_servers(
        "FILE",
        "The llama-server program to use.",
        show_default="llama-server on PATH, else the embedded one",
    ),
    force_memory: bool = _of_servers.switch(
        "--force-memory", "Start even if too little memory would stay free."
    ),
    mlock: bool = _of_servers.switch(
        "--mlock", "Lock the model in memory, so that it is never swapped out."
    ),
    download: DownloadFlags,
    process: options.ProcessFlags,
) -> None:
    """Start llama.cpp servers on this machine, wait until they are ready, and serve.

    Without --model it makes a small one of random weights, to try everything. The servers end with
    the gateway, however it ends; one that exits is restarted. Their logs are in the cache folder
    (LLAMA_GATEWAY_CACHE, by default ~/.cache/llama-gateway), and so are downloaded models:
    llama-gateway cache list shows them.
    """
    import asyncio

    from gateway.app.event_loop import run_event_loop
    from gateway.app.startup import StartError, state_folder
    from gateway.local import LocalFleetError
    from gateway.local.cache import models_in_use
    from gateway.local.gguf import model_parts
    from gateway.local.plan import find_server, plan_folder_fleet, plan_local_fleet

    sources = model or []
    if models_dir is not None and sources:
        raise WrongUsage("--models-dir and --model exclude each other: put it into the folder")
    if len(sources) > 1 and servers is not None:
        raise WrongUsage("--servers is for one model: of several, each has one server")
    common: dict[str, Any] = {"slots": slots, "context": context}
    common |= {"force_memory": force_memory, "embedding": embedding}
    more: dict[str, Any] = {"servers": servers, "server_bin": server_bin, "mlock": mlock}
    temporary = tempfile.TemporaryDirectory(prefix="llama-gateway-")
    try:
        with failing_by(LocalFleetError), temporary as name:
            folder = Path(name)
            if models_dir is None:
                find_server(server_bin)  # a missing program is told before a download
                models = _models(sources, download, servers=servers, **common)
                plan = plan_local_fleet(models, **more, **common)
            else:
                download.check_unused()
                plan = plan_folder_fleet(models_dir, folder / "models.ini", **more, **common)
            with models_in_use([part for one in plan.models for part in model_parts(one.path)]):
                inventory_file = folder / "nodes.yaml"
                # For the checks; the servers' real addresses replace these later.
                nodes = [{"name": one.name, "url": "http://127.0.0.1:1"} for one in plan.specs]
                inventory_file.write_text(json.dumps({"nodes": nodes}))
                # Keys, their hashes for a start without the store, and usage outlive one run.
                given = replace(
                    process.startup(inventory_file), state_dir=folder, store_dir=state_folder()
                )
                if plan.folder is not None:
                    given = replace(given, read_memory=plan.folder.memory)
                status = run_event_loop(_serve(plan, given, server_port))
    except StartError as error:
        raise CommandFailed(str(error), error.status) from None
    except KeyboardInterrupt:
        status = 130
    except asyncio.CancelledError:
        status = 0
    raise typer.Exit(status)


def _models(sources: list[str], download: DownloadFlags, **common: Any) -> list[ModelFile]:
    """Return the models of all `--model`, downloaded where they are URLs. Raises LocalFleetError.

    Files are read first, so that nothing is downloaded where one of them can't be used.
    """
    from gateway.local.download import is_url
    from gateway.local.gguf import read_model
    from gateway.local.plan import plan_specs

    urls = [source for source in sources if is_url(source)]
    if not urls:
        download.check_unused()
    if len(urls) > 1 and (download.sha256 or download.token_env):
        name = "--sha256" if download.sha256 else "--token-env"
        raise WrongUsage(
            f"{name} is for one URL: download the models one by one; then this command without it "
            "finds them in the cache"
        )
    wishes = {url: download.wish(url) for url in urls}
    read = {source: read_model(Path(source)) for source in sources if source not in wishes}
    for url, wish in wishes.items():

        def check_fits(new: ModelFile) -> None:
            plan_specs([*read.values(), new], **common)

        read[url] = read_model(_downloaded(wish, check_fits))
    return [read[source] for source in sources]


def _downloaded(wish: ModelWish, check_fits: Callable[[ModelFile], None]) -> Path:
    from gateway.cli.progress import DownloadProgress
    from gateway.local.cache import cache_folder
    from gateway.local.download import DownloadHooks, fetch_model, printable

    with DownloadProgress(printable(wish.url)) as progress:
        hooks = DownloadHooks(progress=progress.show_bytes, note=progress.note)
        try:
            return fetch_model(wish, cache_folder(), hooks, check_fits=check_fits)
        except KeyboardInterrupt:
            progress.note(
                "Interrupted: what has arrived is kept; the same command goes on from there"
            )
            raise


async def _serve(plan: LocalFleetPlan, given: Options, server_port: int | None) -> int:
    """Start the servers and the gateway over them; return the exit status."""
    import asyncio

    from gateway.app.assembly import serve
    from gateway.app.handover import reserve_addresses
    from gateway.app.startup import load_checked
    from gateway.cli.progress import StartupProgress
    from gateway.config.inventory import load_inventory
    from gateway.local.server import BASE_PORT, LocalFleet
    from gateway.watch.logs import set_up_logging

    # Until the gateway handles signals itself, SIGTERM ends the servers that start.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # Problems of the settings end the command before a model is loaded.
    settings, _ = load_checked(given)
    if plan.is_demo:
        print_note(
            "No --model: using the demo model. Its weights are random and its words mean nothing."
        )
    if plan.binary is not None:
        version = plan.binary.version or "unknown"
        print_note(f"Using {plan.binary.path}, version {version}, not the embedded server.")
    if plan.folder is not None:
        _print_folder(plan.folder)
    print_note(f"Starting {_servers_of(plan)}; logs are in {plan.log_folder}")
    progress = StartupProgress([spec.name for spec in plan.specs])
    async with AsyncExitStack() as exit_stack:
        base = BASE_PORT if server_port is None else server_port
        fleet = LocalFleet(
            plan.specs, plan.log_folder, binary=plan.binary, on_event=progress.show, base_port=base
        )
        # The gateway's ports are reserved first: a taken one ends the command here, and no server
        # gets one of them.
        with reserve_addresses(settings), progress:
            await exit_stack.enter_async_context(fleet)
        given.inventory_file.write_text(json.dumps({"nodes": fleet.inventory()}))
        inventory = await asyncio.to_thread(load_inventory, given.inventory_file)
        logs = exit_stack.enter_context(
            set_up_logging(settings.logging.level, settings.logging.format)
        )
        names = list(plan.folder.models) if plan.folder else [one.name for one in plan.models]

        def ready(gateway: Gateway) -> None:
            _print_example(gateway, names[0] if len(names) > 1 else None)
            if plan.folder is not None:
                following = asyncio.create_task(_follow(plan.folder))
                exit_stack.callback(following.cancel)

        return await serve(given, settings, inventory, logs, ready)


async def _follow(folder: ModelFolder) -> None:
    """Tell routers what comes and goes in their folder; never ends."""
    import asyncio

    import structlog

    while True:
        await asyncio.sleep(FOLDER_SECONDS)
        try:
            changed = await asyncio.to_thread(folder.refresh)
        except OSError as error:  # it is away: its models stay as they are
            structlog.get_logger().warning("models folder", error=str(error))
            continue
        if changed is not None and any(changed.values()):
            some = {key: names[:MOST_LINES] for key, names in changed.items()}
            structlog.get_logger().info("models folder", **some)


def _print_folder(folder: ModelFolder) -> None:
    from gateway.local.memory import format_gib

    print_note(f"Models, loaded on demand into {format_gib(folder.room)}:")
    lines = []
    for name, one in folder.models.items():
        slots = _slots(one.settings.slots, one.settings.context)
        prompts = one.settings.prompt_cache_bytes
        needed = format_gib(one.memory - prompts)
        lines.append(f"  {name}: {needed} with {slots}, {format_gib(prompts)} for prompts")
    lines += [f"  not served: {name}: {why}" for name, why in folder.passed_over.items()]
    print_note(*lines[:MOST_LINES])
    if len(lines) > MOST_LINES:
        print_note(f"  and {len(lines) - MOST_LINES} more")


def _servers_of(plan: LocalFleetPlan) -> str:
    """Tell what is started, what one request may have there, and how it gets more."""
    from gateway.local.plan import DEFAULT_CONTEXT

    spec, count = plan.specs[0], len(plan.specs)
    kind = "router" if spec.is_router else "server"
    told = f"a llama.cpp {kind}" if count == 1 else f"{count} llama.cpp {kind}s"
    if len(plan.models) > 1:
        each = (f"{one.alias} with {_slots(one.slots, one.context)}" for one in plan.specs)
        told += f": {', '.join(each)}"
    elif not spec.is_router:
        told += f" with {_slots(spec.slots, spec.context)}"
    return told + (" (--context N: more)" if spec.context == DEFAULT_CONTEXT else "")


def _slots(slots: int, context: int) -> str:
    return (
        f"{slots} slots of {context:,} tokens each"
        if slots > 1
        else f"1 slot of {context:,} tokens"
    )


def _print_example(gateway: Gateway, model: str | None) -> None:
    url = gateway.public_listener.url if gateway.public_listener else ""
    key = " -H 'Authorization: Bearer YOUR-KEY'" if gateway.settings.keys else ""
    print_note(f"Serving an OpenAI-compatible API at {url}/v1 (Ctrl-C ends it). Try:")
    named = {} if model is None else {"model": model}
    body = {**named, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    print_note(f"  curl {url}/v1/chat/completions{key} -d {text}")
    if gateway.admin_listener:
        print_note(f"See the fleet at {gateway.admin_listener.url}/ or by 'llama-gateway top'.")
