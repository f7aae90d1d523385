"""Options that several commands share. A flag beats the environment, which beats the file."""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from gateway.tools.cli.terminal import CommandFailed

DEFAULT_NODES = Path("config/nodes.yaml")

DEFAULT_CONFIG = Path("config/gateway.yaml")

_FILES = "Files"

_LISTENER = "Public listener"

_ADMIN = "Admin listener"

NodesFile = Annotated[
    Path,
    typer.Option(
        "--nodes",
        envvar="LLAMA_GATEWAY_NODES",
        metavar="FILE",
        help="The inventory of the nodes.",
        rich_help_panel=_FILES,
    ),
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="LLAMA_GATEWAY_CONFIG",
        metavar="FILE",
        show_default=f"{DEFAULT_CONFIG}, if there is one",
        help="The settings.",
        rich_help_panel=_FILES,
    ),
]

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        envvar="LLAMA_GATEWAY_HOST",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Address of the public listener; 0.0.0.0 or :: for all.",
        rich_help_panel=_LISTENER,
    ),
]

Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        envvar="LLAMA_GATEWAY_PORT",
        min=0,
        max=65535,
        metavar="PORT",
        show_default="8000",
        help="Port of the public listener; 0 takes a free one.",
        rich_help_panel=_LISTENER,
    ),
]

AdminHost = Annotated[
    str | None,
    typer.Option(
        "--admin-host",
        envvar="LLAMA_GATEWAY_ADMIN_HOST",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Address of the admin listener; needs a key where it is not loopback.",
        rich_help_panel=_ADMIN,
    ),
]

AdminPort = Annotated[
    int | None,
    typer.Option(
        "--admin-port",
        envvar="LLAMA_GATEWAY_ADMIN_PORT",
        min=0,
        max=65535,
        metavar="PORT",
        show_default="8001",
        help="Port of the admin listener; 0 takes a free one.",
        rich_help_panel=_ADMIN,
    ),
]

AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        envvar="LLAMA_GATEWAY_ADMIN_KEY_FILE",
        metavar="FILE",
        help="File that holds the admin key.",
        rich_help_panel=_ADMIN,
    ),
]

AllowAnonymous = Annotated[
    bool,
    typer.Option(
        "--allow-anonymous",
        help="Serve callers without a key, on an address that is not loopback too.",
        rich_help_panel=_LISTENER,
    ),
]

Until = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="TIME",
        show_default="now",
        help="Likewise; a date includes its day.",
    ),
]

AdminUrl = Annotated[
    str | None,
    typer.Option(
        "--admin-url",
        metavar="URL",
        show_default="from the settings, else http://127.0.0.1:8001",
        help="Address of the running gateway's admin API.",
        rich_help_panel=_ADMIN,
    ),
]

AdminCa = Annotated[
    Path | None,
    typer.Option(
        "--admin-ca",
        envvar="LLAMA_GATEWAY_ADMIN_CA",
        metavar="FILE",
        show_default="the settings' admin.tls.cert, else the system's authorities",
        help="Where it speaks https: PEM file of its certificate, or of the authority behind it.",
        rich_help_panel=_ADMIN,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]


class StartKind(enum.StrEnum):
    """What a simulated gateway knows of the nodes' speeds when it starts."""

    COLD = "cold"
    WARM = "warm"


Start = Annotated[
    StartKind,
    typer.Option(
        "--start",
        help=(
            "What the gateway knows of the nodes' speeds. cold: nothing; it calibrates idle nodes, "
            "a few seconds each, and explores the others. warm: all, as after a restart that kept "
            "what was learnt."
        ),
    ),
]


def settings_file(path: Path | None) -> Path | None:
    """Return the settings file: the one named, else the default one if it exists."""
    if path is not None:
        return path
    return DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None


def examples_epilog(*lines: tuple[str, str]) -> str:
    """Return the end of a command's help: examples, each with its meaning."""
    return "\n".join(("Examples:", *(f"  {typed}\n    {meaning}" for typed, meaning in lines)))


def check_plot_file(path: Path | None) -> None:
    """Check before the work that `--plot` can be written. Raises CommandFailed."""
    if path is None:
        return
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise CommandFailed(f"--plot {path}: must end in .png, .svg or .pdf", status=2)
    if not path.parent.is_dir():
        raise CommandFailed(f"--plot {path}: there is no folder {path.parent}", status=2)
    if importlib.util.find_spec("matplotlib") is None:
        from gateway.system import install_command

        raise CommandFailed(
            "--plot needs the package matplotlib, which is not installed: "
            f"{install_command('plots')}"
        )
