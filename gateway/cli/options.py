"""How commands declare flags, and the flags that several share.

A flag beats the environment, which beats the file.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

import typer

from gateway.cli.terminal import CommandFailed, HelpCommand, HelpGroup, WrongUsage

if TYPE_CHECKING:
    from gateway.app.startup import Options

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_CONFIG = Path("config/gateway.yaml")


class Panel:
    """A panel of a command's help. Called, it declares a flag of it, as a parameter's default."""

    def __init__(self, title: str | None = None) -> None:
        self._title = title

    def __call__(
        self,
        metavar: str | None,
        meaning: str,
        default: Any = None,
        *,
        name: str | None = None,
        **more: Any,
    ) -> Any:
        """Declare a flag with a value; without a `name` it has its parameter's."""
        names = () if name is None else (name,)
        more |= {"metavar": metavar, "help": meaning, "rich_help_panel": self._title}
        return typer.Option(default, *names, **more)

    def switch(self, name: str, meaning: str, default: bool | None = False, **more: Any) -> Any:
        """Declare a flag without a value."""
        return typer.Option(default, name, help=meaning, rich_help_panel=self._title, **more)


flag = Panel()


def argument(metavar: str, meaning: str, default: Any = ..., **more: Any) -> Any:
    """Declare what stands on the command line by its place; without a default it must."""
    return typer.Argument(default, metavar=metavar, help=meaning, **more)


_files, _listener = Panel("Files"), Panel("Public listener")
_gateway, _admin = Panel("Gateway"), Panel("Admin listener")

NODES = _files(
    "FILE",
    "The inventory of the nodes.",
    Path("config/nodes.yaml"),
    envvar="LLAMA_GATEWAY_NODES",
)
CONFIG = _files(
    "FILE",
    "The settings.",
    envvar="LLAMA_GATEWAY_CONFIG",
    show_default=f"{DEFAULT_CONFIG}, if there is one",
)
ADMIN_KEY_FILE = _admin(
    "FILE", "File that holds the admin key.", envvar="LLAMA_GATEWAY_ADMIN_KEY_FILE"
)
EDGES = _listener(
    "N|auto",
    "Processes that relay, beside the one that decides; auto: one for each core but one.",
    show_default="0",
)


def read_edges(word: str | None) -> int | Literal["auto"] | None:
    """Return what `--edges` says. Raises CommandFailed."""
    from gateway.config.listeners import MOST_EDGES

    if word is None:
        return None
    if word == "auto":
        return "auto"
    if not word.isdecimal() or int(word) > MOST_EDGES:
        raise WrongUsage(f"--edges {word}: must be a number up to {MOST_EDGES}, or auto")
    return int(word)


def since(shown_default: str) -> Any:
    """Return the option `--since`."""
    meaning = "A date, a time of RFC 3339, or how long ago (7d, 12h); UTC."
    return flag("TIME", meaning, show_default=shown_default)


UNTIL = flag("TIME", "Likewise; a date includes its day.", show_default="now")
ADMIN_URL = _admin(
    "URL",
    "Address of the running gateway's admin API.",
    show_default="from the settings, else http://127.0.0.1:8001",
)
ADMIN_CA = _admin(
    "FILE",
    "Where it speaks https: PEM file of its certificate, or of the authority behind it.",
    envvar="LLAMA_GATEWAY_ADMIN_CA",
    show_default="the settings' admin.tls.cert, else the system's authorities",
)
URL = _gateway(
    "URL",
    "Address of the gateway's public listener.",
    envvar="LLAMA_GATEWAY_URL",
    show_default="http://127.0.0.1:8000",
)
KEY_FILE = _gateway(
    "FILE", "File that holds the API key.", show_default="the key in LLAMA_GATEWAY_KEY"
)
CA = _gateway(
    "FILE",
    "Where it speaks https: PEM file of its certificate, or of the authority behind it.",
    envvar="LLAMA_GATEWAY_CA",
    show_default="the system's authorities",
)
RETRY_FOR = _gateway(
    "SECONDS",
    "For how long a gateway that does not answer is asked again.",
    600.0,
    min=0.0,
    show_default="600",
)
JSON = flag.switch("--json", "Write JSON, for scripts.")


Form = Literal["jsonl", "csv", "folder"]  # of a batch's input, and of its results
_prompts, _tables = Panel("Prompts from a table or a folder"), Panel("Tables")
ID_COLUMN = _tables("NAME", "Column with each row's custom_id.", show_default="row-1, row-2 and on")
DELIMITER = _tables("CHARACTER", "What separates columns.", show_default="a comma; a tab for .tsv")


StartKind = Literal["cold", "warm"]  # what a simulated gateway knows of the nodes' speeds
START = flag(
    None,
    "What the gateway knows of the nodes' speeds. cold: nothing; it calibrates idle nodes, "
    "a few seconds each, and explores the others. warm: all, as after a restart that kept "
    "what was learnt.",
    "cold",
)
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class FlagGroup:
    """Flags that several commands share, or that belong together: attributes, each annotated."""

    def __init__(self, **values: Any) -> None:
        flags = {name: getattr(type(self), name) for name in get_type_hints(type(self))}
        vars(self).update({name: one.default for name, one in flags.items()}, **values)


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of each group in place of its parameter that is one."""
    own = inspect.signature(command, eval_str=True)
    groups = {
        name: one.annotation
        for name, one in own.parameters.items()
        if isinstance(one.annotation, type) and issubclass(one.annotation, FlagGroup)
    }
    flags = {
        name: [
            inspect.Parameter(one, _KEYWORD, default=getattr(group, one), annotation=kind)
            for one, kind in get_type_hints(group, include_extras=True).items()
        ]
        for name, group in groups.items()
    }

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in flags[name]})
        return command(**values)

    parameters = [
        one.replace(kind=_KEYWORD)
        for parameter in own.parameters.values()
        for one in flags.get(parameter.name, [parameter])
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


class InputFlags(FlagGroup):
    """What is said of a batch's input, and of the requests that prompts become."""

    endpoint: str | None = flag(
        "PATH",
        "Endpoint of all requests.",
        show_default="the lines' own url, /v1/chat/completions for prompts",
    )
    window: str = flag("TIME", "Time within which it must be done: 2h, 7d.", "24h")
    metadata: list[str] | None = flag("NAME=VALUE", "Kept with the batch; repeatable.")
    idempotency_key: str | None = flag(
        "KEY",
        "The same key and input again is the same batch, and no second one.",
        show_default="a random one",
    )
    kind: Form | None = flag(
        "jsonl|csv|folder", "Form of the input.", name="--input", show_default="by the name"
    )
    template: str | None = _prompts(
        "WORDS", "The prompt; {name} is a column, or a file's {text} and {name}; {{ is a brace."
    )
    template_file: Path | None = _prompts("FILE", "File that holds the template.")
    id_column: str | None = ID_COLUMN
    delimiter: str | None = DELIMITER
    model: str | None = _prompts("NAME", "Model of each request.")
    system: str | None = _prompts("WORDS", "System prompt.")
    max_tokens: int | None = _prompts("N", "Longest answer.", min=1)
    largest_text: int = _prompts("BYTES", "Larger files of a folder are skipped.", 512 << 10, min=1)
    strict: bool = _prompts.switch(
        "--strict", "A file of the folder that is no text is a problem, and not skipped."
    )


class ProcessFlags(FlagGroup):
    """The flags of the gateway's own process."""

    config: Path | None = CONFIG
    host: str | None = _listener(
        "ADDRESS",
        "Address of the public listener; 0.0.0.0 or :: for all.",
        envvar="LLAMA_GATEWAY_HOST",
        show_default="127.0.0.1",
    )
    port: int | None = _listener(
        "PORT",
        "Port of the public listener; 0 takes a free one.",
        envvar="LLAMA_GATEWAY_PORT",
        min=0,
        max=65535,
        show_default="8000",
    )
    admin_host: str | None = _admin(
        "ADDRESS",
        "Address of the admin listener; needs a key where it is not loopback.",
        envvar="LLAMA_GATEWAY_ADMIN_HOST",
        show_default="127.0.0.1",
    )
    admin_port: int | None = _admin(
        "PORT",
        "Port of the admin listener; 0 takes a free one.",
        envvar="LLAMA_GATEWAY_ADMIN_PORT",
        min=0,
        max=65535,
        show_default="8001",
    )
    admin_key_file: Path | None = ADMIN_KEY_FILE
    allow_anonymous: bool = _listener.switch(
        "--allow-anonymous",
        "Serve callers without a key, on an address that is not loopback too.",
    )

    def startup(self, inventory_file: Path) -> Options:
        """Return how the process starts over this inventory."""
        from gateway.app.startup import Options

        given = {name: one for name, one in vars(self).items() if name != "config"}
        settings = settings_file(self.config)
        return Options(inventory_file, settings, **given, read_memory=_read_memory)


def _read_memory(model: Path, slots: int, context: int) -> int:
    from gateway.local.gguf import read_model
    from gateway.local.memory import ServerSettings, server_needs

    return server_needs(read_model(model), ServerSettings(slots, context))[0]


def settings_file(path: Path | None) -> Path | None:
    """Return the settings file: the one named, else the default one if it exists."""
    return path or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)


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
        add = self.command(name, cls=HelpCommand, help=meaning, epilog=epilog)

        def added(command: Command) -> Command:
            add(with_flags(command))
            return command

        return added


def check_folder(flag: str, path: Path | None) -> None:
    """Check before the work that a file can be written there. Raises CommandFailed."""
    if path is not None and not path.parent.is_dir():
        raise WrongUsage(f"{flag} {path}: there is no folder {path.parent}")


def check_plot_file(path: Path | None) -> None:
    """Check before the work that `--plot` can be written. Raises CommandFailed."""
    if path is None:
        return
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise WrongUsage(f"--plot {path}: must end in .png, .svg or .pdf")
    check_folder("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        from gateway.system import install_command

        raise CommandFailed(
            "--plot needs the package matplotlib, which is not installed: "
            f"{install_command('plots')}"
        )
