"""`llama-gateway keys`: makes API keys. Only their SHA-256 goes into the settings."""

from __future__ import annotations

import enum
import json
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.tools.cli.options import Json, examples_epilog
from gateway.tools.cli.terminal import CommandFailed, HelpCommand, HelpGroup, print_json

if TYPE_CHECKING:
    from gateway.access.keys import ApiKey


app = typer.Typer(
    cls=HelpGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="API keys of the public listener; the settings hold their SHA-256 alone.",
)

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")

_LONGEST_INPUT = 4096


class PriorityChoice(enum.StrEnum):
    """The classes, highest first."""

    URGENT = "urgent"
    PREMIUM = "premium"
    NORMAL = "normal"
    BATCH = "batch"


_CLASSES = "|".join(PriorityChoice)


def _checked_id(value: str | None) -> str | None:
    if value is not None and not _ID.fullmatch(value):
        raise typer.BadParameter("1 to 64 letters, digits or '-', no underscore")
    return value


KeyId = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        callback=_checked_id,
        show_default="random",
        help="The key's public part, which logs show.",
    ),
]


@app.command(
    "hash",
    cls=HelpCommand,
    epilog=examples_epilog(
        ("llama-gateway keys hash", "a new key, and the lines for config/gateway.yaml"),
        ("llama-gateway keys hash --read < key.txt", "the lines for an existing key"),
    ),
)
def hash_(
    key_id: KeyId = None,
    read: Annotated[
        bool,
        typer.Option(
            "--read", help="Read a key from the prompt or from stdin instead of making one."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a key, or read one, and show its SHA-256 for the settings.

    A new key is shown only now and is stored nowhere.
    """
    if read and key_id is not None:
        raise typer.BadParameter("a key that is read has an id already", param_hint="--id")
    key = _read_key() if read else _new_key(key_id)
    _show(key, {}, shown=not read, as_json=as_json)


@app.command(
    "create",
    cls=HelpCommand,
    epilog=examples_epilog(
        (
            "llama-gateway keys create --id team-a --name 'Team A' --max-class premium",
            "a key that may request the class premium",
        ),
        (
            "llama-gateway keys create --id vip --class premium",
            "a key whose requests are premium by default",
        ),
        ("llama-gateway keys create --model mistral-7b", "a key for one model"),
        (
            "llama-gateway keys create --id chat --trust-user-headers",
            "a key of a chat's web interface, fair between its users",
        ),
    ),
)
def create(
    key_id: KeyId = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Who uses it; logs and metrics show it."),
    ] = None,
    default_class: Annotated[
        PriorityChoice | None,
        typer.Option(
            "--class",
            metavar=_CLASSES,
            show_default="normal",
            help="The class of its requests that name none.",
        ),
    ] = None,
    max_class: Annotated[
        PriorityChoice | None,
        typer.Option(
            "--max-class",
            metavar=_CLASSES,
            show_default="its --class",
            help="The highest class it gets.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help=("A model that it may use; repeat it for more. Default: all."),
        ),
    ] = None,
    trust_user_headers: Annotated[
        bool,
        typer.Option(
            "--trust-user-headers",
            help="Its holder may name its end users by header (see identity.user_headers).",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a key with its name and rights, and show its entry for the settings.

    The key is shown only now and is stored nowhere.
    """
    highest = max_class or default_class or PriorityChoice.NORMAL
    classes = list(PriorityChoice)
    if default_class is not None and classes.index(default_class) < classes.index(highest):
        raise typer.BadParameter(
            f"is below --class {default_class.value}", param_hint="--max-class"
        )
    rights: dict[str, str | bool | list[str]] = {"max_class": highest.value}
    if default_class is not None:
        rights = {"class": default_class.value, **rights}
    if name:
        rights = {"name": name, **rights}
    if model:
        rights["models"] = model
    if trust_user_headers:
        rights["trust_user_headers"] = True
    _show(_new_key(key_id), rights, shown=True, as_json=as_json)


def _new_key(key_id: str | None) -> ApiKey:
    from gateway.access.keys import new_key

    return new_key(key_id)


def _read_key() -> ApiKey:
    from gateway.access.keys import hash_key

    if sys.stdin.isatty():
        text = typer.prompt("Key", hide_input=True, err=True)
    else:
        text = sys.stdin.read(_LONGEST_INPUT)
    try:
        key = hash_key(text.strip())
    except ValueError as error:
        # The text is not quoted: it may be a secret.
        raise CommandFailed(f"this is no key of the gateway: {error}", status=2) from None
    if not _ID.fullmatch(key.id):
        raise CommandFailed("the key's id may hold letters, digits and '-' only", status=2)
    return key


def _show(
    key: ApiKey, rights: dict[str, str | bool | list[str]], *, shown: bool, as_json: bool
) -> None:
    entry = {"id": key.id, "sha256": key.sha256, **rights}
    if as_json:
        print_json({"key": key.text, **entry} if shown else entry)
        return
    if shown:
        print(f"The key, shown only now:\n\n  {key.text}\n")
    print("For config/gateway.yaml:\n\nkeys:")
    # Any JSON string is a YAML string.
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in entry.items()]
    print("  - " + "\n    ".join(lines))
