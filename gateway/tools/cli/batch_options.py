"""Options that the commands of `llama-gateway batch` share, and their choices."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated

import typer


class InputKind(enum.StrEnum):
    """Forms of input."""

    JSONL = "jsonl"
    CSV = "csv"
    FOLDER = "folder"


class ResultFormat(enum.StrEnum):
    """Forms of results."""

    JSONL = "jsonl"
    CSV = "csv"
    FOLDER = "folder"


_GATEWAY = "Gateway"
PROMPTS_PANEL = "Prompts from a table or a folder"
RESULTS_PANEL = "Results"

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="LLAMA_GATEWAY_URL",
        metavar="URL",
        show_default="http://127.0.0.1:8000",
        help="Address of the gateway's public listener.",
        rich_help_panel=_GATEWAY,
    ),
]

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        show_default="the key in LLAMA_GATEWAY_KEY",
        help="File that holds the API key.",
        rich_help_panel=_GATEWAY,
    ),
]

Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="LLAMA_GATEWAY_CA",
        metavar="FILE",
        show_default="the system's authorities",
        help="Where it speaks https: PEM file of its certificate, or of the authority behind it.",
        rich_help_panel=_GATEWAY,
    ),
]

RetryFor = Annotated[
    float,
    typer.Option(
        "--retry-for",
        min=0.0,
        metavar="SECONDS",
        show_default="600",
        help="For how long a gateway that does not answer is asked again.",
        rich_help_panel=_GATEWAY,
    ),
]

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def _checked_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise typer.BadParameter("is no batch's id: 'llama-gateway batch list' shows them")
    return value


BatchId = Annotated[str, typer.Argument(metavar="ID", callback=_checked_id, help="The batch's id.")]

Format = Annotated[
    ResultFormat,
    typer.Option(
        "--format",
        metavar="jsonl|csv|folder",
        help="Lines as they come, a table (custom_id, text, error), or a text file each.",
        rich_help_panel=RESULTS_PANEL,
    ),
]

Force = Annotated[
    bool, typer.Option("--force", help="Overwrite what is there.", rich_help_panel=RESULTS_PANEL)
]

RETRY_SECONDS = 600.0
