"""`llama-gateway up`: starts llama.cpp servers on this machine, and the gateway over them."""

from __future__ import annotations

import signal
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.tools.cli import options
from gateway.tools.cli.download import MaxBytes, Sha256, TokenEnv, model_file
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.config.settings import Settings
    from gateway.startup import Options
    from gateway.tools.local.plan import LocalFleetPlan


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
    ("llama-gateway up --embedding", "serves /v1/embeddings too"),
    ("llama-gateway up --server-port 9081", "its servers on ports 9081, 9082, ..."),
)

_SERVERS = "Servers"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE.gguf|URL",
        show_default="a small demo model of random weights",
        help="The model to serve: a file, or an https address that it is downloaded from once.",
        rich_help_panel=_SERVERS,
    ),
]

Servers = Annotated[
    int | None,
    typer.Option(
        "--servers",
        min=1,
        max=256,
        metavar="N",
        show_default="one per NUMA node",
        help="How many llama.cpp servers to start.",
        rich_help_panel=_SERVERS,
    ),
]

Slots = Annotated[
    int,
    typer.Option(
        "--slots",
        min=1,
        max=256,
        metavar="N",
        help="Requests that one server takes at once.",
        rich_help_panel=_SERVERS,
    ),
]

Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        max=1 << 24,
        metavar="N",
        show_default="4096, or the model's if that is less",
        help=(
            "Tokens of prompt and answer that one request may have. Coding agents begin with "
            "thousands. Memory grows with slots times context."
        ),
        rich_help_panel=_SERVERS,
    ),
]

Embedding = Annotated[
    bool,
    typer.Option(
        "--embedding",
        help=(
            "Serve /v1/embeddings too, beside chats. A text may have --context tokens, and takes "
            "them at once: that costs memory."
        ),
        rich_help_panel=_SERVERS,
    ),
]

ServerPort = Annotated[
    int | None,
    typer.Option(
        "--server-port",
        min=0,
        max=65535,
        metavar="PORT",
        show_default="8081",
        help=(
            "Port of the first server; the others get the next ones. Ports in use are skipped. 0 "
            "takes free ones."
        ),
        rich_help_panel=_SERVERS,
    ),
]

ServerBin = Annotated[
    Path | None,
    typer.Option(
        "--server-bin",
        metavar="FILE",
        show_default="llama-server on PATH, else the embedded one",
        help="The llama-server program to use.",
        rich_help_panel=_SERVERS,
    ),
]

ForceMemory = Annotated[
    bool,
    typer.Option(
        "--force-memory",
        help="Start even if too little memory would stay free.",
        rich_help_panel=_SERVERS,
    ),
]

Mlock = Annotated[
    bool,
    typer.Option(
        "--mlock",
        help="Lock the model in memory, so that it is never swapped out.",
        rich_help_panel=_SERVERS,
    ),
]


def up(
    model: Model = None,
    servers: Servers = None,
    slots: Slots = 2,
    context: Context = None,
    embedding: Embedding = False,
    server_port: ServerPort = None,
    server_bin: ServerBin = None,
    force_memory: ForceMemory = False,
    mlock: Mlock = False,
    sha256: Sha256 = None,
    token_env: TokenEnv = None,
    max_bytes: MaxBytes = None,
    config: options.ConfigFile = None,
    host: options.Host = None,
    port: options.Port = None,
    admin_host: options.AdminHost = None,
    admin_port: options.AdminPort = None,
    admin_key_file: options.AdminKeyFile = None,
    allow_anonymous: options.AllowAnonymous = False,
) -> None:
    """Start llama.cpp servers on this machine, wait until they are ready, and serve.

    Without --model it makes a small one of random weights, to try everything. The servers end with
    the gateway, however it ends; one that exits is restarted. Their logs are in the cache folder
    (LLAMA_GATEWAY_CACHE, by default ~/.cache/llama-gateway), and so are downloaded models:
    llama-gateway cache list shows them.
    """
    import asyncio

    from gateway.process import run_event_loop
    from gateway.startup import Options, StartError, state_folder
    from gateway.tools.local import LocalFleetError
    from gateway.tools.local.cache import models_in_use
    from gateway.tools.local.gguf import ModelFile, model_parts
    from gateway.tools.local.plan import check_model_fits, find_server, plan_local_fleet

    def check_fits(found: ModelFile) -> None:
        check_model_fits(
            found,
            servers=servers,
            slots=slots,
            context=context,
            force_memory=force_memory,
            embedding=embedding,
        )

    try:
        find_server(server_bin)  # a missing program is told before a download, not after it
        path = model_file(model, sha256, token_env, max_bytes, check_fits)
        plan = plan_local_fleet(
            path,
            servers=servers,
            slots=slots,
            context=context,
            server_bin=server_bin,
            force_memory=force_memory,
            embedding=embedding,
            mlock=mlock,
        )
        with (
            models_in_use(model_parts(plan.model.path)),
            tempfile.TemporaryDirectory(prefix="llama-gateway-") as folder,
        ):
            given = Options(
                inventory_file=_provisional_inventory(plan, Path(folder) / "nodes.yaml"),
                settings_file=options.settings_file(config),
                host=host,
                port=port,
                admin_host=admin_host,
                admin_port=admin_port,
                allow_anonymous=allow_anonymous,
                admin_key_file=admin_key_file,
                state_dir=Path(folder),
                # Keys, their hashes for a start without the store, and usage outlive one run.
                store_dir=state_folder(),
            )
            status = run_event_loop(_serve(plan, given, server_port))
    except LocalFleetError as error:
        raise CommandFailed(str(error)) from None
    except StartError as error:
        raise CommandFailed(str(error), error.status) from None
    except KeyboardInterrupt:
        status = 130
    except asyncio.CancelledError:
        status = 0
    raise typer.Exit(status)


async def _serve(plan: LocalFleetPlan, given: Options, server_port: int | None) -> int:
    """Start the servers and the gateway over them; return the exit status."""
    import asyncio

    from gateway.config.inventory import load_inventory
    from gateway.handover import reserve_addresses
    from gateway.observe.logs import set_up_logging
    from gateway.process import serve
    from gateway.startup import load_checked
    from gateway.tools.cli.progress import StartupProgress
    from gateway.tools.local.server import BASE_PORT
    from gateway.tools.local.supervisor import LocalFleet

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
    servers = (
        "a llama.cpp server" if len(plan.specs) == 1 else f"{len(plan.specs)} llama.cpp servers"
    )
    print_note(f"Starting {servers} {_slots_of(plan)}; logs are in {plan.log_folder}")
    progress = StartupProgress([spec.name for spec in plan.specs])
    async with AsyncExitStack() as exit_stack:
        base = BASE_PORT if server_port is None else server_port
        fleet = LocalFleet(
            plan.specs,
            plan.log_folder,
            binary=plan.binary,
            on_event=progress.update,
            base_port=base,
        )
        # The gateway's ports are reserved first: a taken one ends the command here, and no server
        # gets one of them.
        with reserve_addresses(settings), progress:
            await exit_stack.enter_async_context(fleet)
        _note_other_ports(base, fleet.urls)
        note_unlocked_models(plan, fleet.pids)
        given.inventory_file.write_text(_inventory_text(fleet.inventory()))
        inventory = await asyncio.to_thread(load_inventory, given.inventory_file)
        logs = exit_stack.enter_context(
            set_up_logging(settings.logging.level, settings.logging.format)
        )
        return await serve(
            given,
            settings,
            inventory,
            logs,
            lambda gateway: _print_example(
                gateway.public_listener.url if gateway.public_listener else "",
                gateway.admin_listener.url if gateway.admin_listener else "",
                settings,
            ),
        )


def _slots_of(plan: LocalFleetPlan) -> str:
    """Tell what one request may have, and how it gets more."""
    from gateway.tools.local.plan import DEFAULT_CONTEXT

    spec = plan.specs[0]
    more = " (--context N: more)" if spec.context == DEFAULT_CONTEXT else ""
    if spec.slots == 1:
        return f"with 1 slot of {spec.context:,} tokens{more}"
    return f"with {spec.slots} slots of {spec.context:,} tokens each{more}"


def _note_other_ports(base: int, urls: tuple[str, ...]) -> None:
    """Print the servers' ports unless they follow each other from `base`."""
    if base and list(urls) != [f"http://127.0.0.1:{base + index}" for index in range(len(urls))]:
        ports = ", ".join(url.rpartition(":")[2] for url in urls)
        print_note(f"Some ports from {base} on are in use: the servers are on {ports}.")


def note_unlocked_models(plan: LocalFleetPlan, pids: tuple[int | None, ...]) -> None:
    """Print a note for each server that should have locked its model and has not."""
    from gateway.tools.local.memory import memlock_warning

    for spec, pid in zip(plan.specs, pids, strict=True):
        if spec.mlock and pid is not None and (warning := memlock_warning(plan.model, pid)):
            print_note(f"  {spec.name}: {warning}")


def _print_example(url: str, admin_url: str, settings: Settings) -> None:
    key = " -H 'Authorization: Bearer YOUR-KEY'" if settings.keys else ""
    print_note(f"Serving an OpenAI-compatible API at {url}/v1 (Ctrl-C ends it). Try:")
    print_note(
        f"  curl {url}/v1/chat/completions{key} -d "
        '\'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}\''
    )
    if admin_url:
        print_note(f"See the fleet at {admin_url}/ or by 'llama-gateway top'.")


def _provisional_inventory(plan: LocalFleetPlan, path: Path) -> Path:
    """Write an inventory for the checks; the servers' real addresses replace it later."""
    nodes = [{"name": spec.name, "url": "http://127.0.0.1:1"} for spec in plan.specs]
    path.write_text(_inventory_text(nodes))
    return path


def _inventory_text(nodes: list[dict[str, object]] | list[dict[str, str]]) -> str:
    import yaml

    return yaml.safe_dump({"nodes": nodes})
