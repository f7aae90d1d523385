"""Options that several commands share. A flag beats the environment, which beats the file."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from gateway.cli.terminal import CommandFailed, HelpCommand, HelpGroup

if TYPE_CHECKING:
    from gateway.app.startup import Options

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_NODES = Path("config/nodes.yaml")
DEFAULT_CONFIG = Path("config/gateway.yaml")
_of_files = partial(typer.Option, rich_help_panel="Files")
_of_listener = partial(typer.Option, rich_help_panel="Public listener")
_of_gateway = partial(typer.Option, rich_help_panel="Gateway")
_of_admin = partial(typer.Option, rich_help_panel="Admin listener")

NodesFile = Annotated[
    Path,
    _of_files(
        "--nodes", envvar="LLAMA_GATEWAY_NODES", metavar="FILE", help="The inventory of the nodes."
    ),
]

ConfigFile = Annotated[
    Path | None,
    _of_files(
        "--config",
        envvar="LLAMA_GATEWAY_CONFIG",
        metavar="FILE",
        show_default=f"{DEFAULT_CONFIG}, if there is one",
        help="The settings.",
    ),
]

Host = Annotated[
    str | None,
    _of_listener(
        "--host",
        envvar="LLAMA_GATEWAY_HOST",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Address of the public listener; 0.0.0.0 or :: for all.",
    ),
]

Port = Annotated[
    int | None,
    _of_listener(
        "--port",
        envvar="LLAMA_GATEWAY_PORT",
        min=0,
        max=65535,
        metavar="PORT",
        show_default="8000",
        help="Port of the public listener; 0 takes a free one.",
    ),
]

AdminHost = Annotated[
    str | None,
    _of_admin(
        "--admin-host",
        envvar="LLAMA_GATEWAY_ADMIN_HOST",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Address of the admin listener; needs a key where it is not loopback.",
    ),
]

AdminPort = Annotated[
    int | None,
    _of_admin(
        "--admin-port",
        envvar="LLAMA_GATEWAY_ADMIN_PORT",
        min=0,
        max=65535,
        metavar="PORT",
        show_default="8001",
        help="Port of the admin listener; 0 takes a free one.",
    ),
]

AdminKeyFile = Annotated[
    Path | None,
    _of_admin(
        "--admin-key-file",
        envvar="LLAMA_GATEWAY_ADMIN_KEY_FILE",
        metavar="FILE",
        help="File that holds the admin key.",
    ),
]

AllowAnonymous = Annotated[
    bool,
    _of_listener(
        "--allow-anonymous",
        help="Serve callers without a key, on an address that is not loopback too.",
    ),
]

Edges = Annotated[
    str | None,
    _of_listener(
        "--edges",
        metavar="N|auto",
        show_default="0",
        help="Processes that relay, beside the one that decides; auto: one for each core but one.",
    ),
]


def read_edges(word: str | None) -> int | Literal["auto"] | None:
    """Return what `--edges` says. Raises CommandFailed."""
    from gateway.config.listeners import MOST_EDGES

    if word is None:
        return None
    if word == "auto":
        return "auto"
    if not word.isdecimal() or int(word) > MOST_EDGES:
        raise CommandFailed(f"--edges {word}: must be a number up to {MOST_EDGES}, or auto", 2)
    return int(word)


def since(default: str | None, shown_default: str) -> Any:
    """Return the option `--since`."""
    return typer.Option(
        default,
        "--since",
        metavar="TIME",
        show_default=shown_default,
        help="A date, a time of RFC 3339, or how long ago (7d, 12h); UTC.",
    )


Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="TIME", show_default="now", help="Likewise; a date includes its day."
    ),
]

AdminUrl = Annotated[
    str | None,
    _of_admin(
        "--admin-url",
        metavar="URL",
        show_default="from the settings, else http://127.0.0.1:8001",
        help="Address of the running gateway's admin API.",
    ),
]

AdminCa = Annotated[
    Path | None,
    _of_admin(
        "--admin-ca",
        envvar="LLAMA_GATEWAY_ADMIN_CA",
        metavar="FILE",
        show_default="the settings' admin.tls.cert, else the system's authorities",
        help="Where it speaks https: PEM file of its certificate, or of the authority behind it.",
    ),
]

Url = Annotated[
    str | None,
    _of_gateway(
        "--url",
        envvar="LLAMA_GATEWAY_URL",
        metavar="URL",
        show_default="http://127.0.0.1:8000",
        help="Address of the gateway's public listener.",
    ),
]

KeyFile = Annotated[
    Path | None,
    _of_gateway(
        "--key-file",
        metavar="FILE",
        show_default="the key in LLAMA_GATEWAY_KEY",
        help="File that holds the API key.",
    ),
]

Ca = Annotated[
    Path | None,
    _of_gateway(
        "--ca",
        envvar="LLAMA_GATEWAY_CA",
        metavar="FILE",
        show_default="the system's authorities",
        help="Where it speaks https: PEM file of its certificate, or of the authority behind it.",
    ),
]

RETRY_SECONDS = 600.0

RetryFor = Annotated[
    float,
    _of_gateway(
        "--retry-for",
        min=0.0,
        metavar="SECONDS",
        show_default="600",
        help="For how long a gateway that does not answer is asked again.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]


class Form(enum.StrEnum):
    """Forms of a batch's input, and of its results."""

    JSONL = "jsonl"
    CSV = "csv"
    FOLDER = "folder"


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


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class FlagGroup:
    """Flags that several commands share: annotated attributes, each with its default."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def takes(**groups: type[FlagGroup]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the flags of each group in place of its parameter of that name."""

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        flags = {
            name: [
                inspect.Parameter(flag, _KEYWORD, default=getattr(group, flag), annotation=kind)
                for flag, kind in get_type_hints(group, include_extras=True).items()
            ]
            for name, group in groups.items()
        }

        @functools.wraps(command)
        def with_flags(**values: Any) -> T:
            for name, group in groups.items():
                values[name] = group(**{one.name: values.pop(one.name) for one in flags[name]})
            return command(**values)

        own = inspect.signature(command, eval_str=True)
        parameters = [
            one.replace(kind=_KEYWORD)
            for parameter in own.parameters.values()
            for one in flags.get(parameter.name, [parameter])
        ]
        with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_flags

    return decorate


class ProcessFlags(FlagGroup):
    """The flags of the gateway's own process."""

    config: ConfigFile = None
    host: Host = None
    port: Port = None
    admin_host: AdminHost = None
    admin_port: AdminPort = None
    admin_key_file: AdminKeyFile = None
    allow_anonymous: AllowAnonymous = False

    def startup(self, inventory_file: Path) -> Options:
        """Return how the process starts over this inventory."""
        from gateway.app.startup import Options

        given = {**vars(self), "settings_file": settings_file(self.config)}
        del given["config"]
        return Options(inventory_file, **given, read_memory=_read_memory)


def _read_memory(model: Path, slots: int, context: int) -> int:
    from gateway.local.memory import file_memory

    return file_memory(model, slots, context)


def settings_file(path: Path | None) -> Path | None:
    """Return the settings file: the one named, else the default one if it exists."""
    if path is not None:
        return path
    return DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None


def examples_epilog(*lines: tuple[str, str]) -> str:
    """Return the end of a command's help: examples, each with its meaning."""
    return "\n".join(("Examples:", *(f"  {typed}\n    {meaning}" for typed, meaning in lines)))


class CommandGroup(typer.Typer):
    """Commands below one name, whose help ends with examples, and so does that of each."""

    def __init__(self, meaning: str, *examples: tuple[str, str]) -> None:
        super().__init__(
            cls=HelpGroup,
            rich_markup_mode=None,
            no_args_is_help=True,
            help=meaning,
            epilog=examples_epilog(*examples),
        )

    def add(
        self, name: str, *examples: tuple[str, str], meaning: str | None = None
    ) -> Callable[[Command], Command]:
        """Add a function as a command of this name; unset, `meaning` is its docstring."""
        epilog = examples_epilog(*examples) if examples else None
        return self.command(name, cls=HelpCommand, help=meaning, epilog=epilog)


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
