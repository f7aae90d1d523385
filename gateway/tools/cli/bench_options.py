"""Options of `llama-gateway bench`, and their choices."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

_LOAD, _REQUESTS, _SERVER, _GOAL, _OUTPUT = "Load", "Requests", "Server", "Goal", "Output"

DEFAULT_LEVELS = "1,4,8"

ANSWER_SECONDS = 600.0


class EndpointName(enum.StrEnum):
    """Endpoints that can be measured."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


Url = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help="Address of the server or gateway, with or without /v1.",
    ),
]

Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,...",
        show_default=DEFAULT_LEVELS,
        help="Closed loop: so many requests at a time, one load after the other.",
        rich_help_panel=_LOAD,
    ),
]

Rate = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="R,...",
        help=(
            "Open loop: so many requests a second at random times (Poisson), whether the "
            "server keeps up or not."
        ),
        rich_help_panel=_LOAD,
    ),
]

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help=(
            "Open loop: the requests of a trace at its times (JSON lines, or .csv in the "
            "layout of the Azure LLM traces). A later turn of a conversation waits for "
            "the one before."
        ),
        rich_help_panel=_LOAD,
    ),
]

SpeedUp = Annotated[
    float,
    typer.Option(
        "--speed-up",
        min=0.001,
        max=1e6,
        metavar="X",
        help="Play the trace X times as fast.",
        rich_help_panel=_LOAD,
    ),
]

Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        min=1,
        max=200_000,
        metavar="N",
        show_default="closed loop: 4 for each at a time, at least 10",
        help="Requests of each load.",
        rich_help_panel=_LOAD,
    ),
]

Duration = Annotated[
    float | None,
    typer.Option(
        "--duration",
        min=0.1,
        max=7 * 86_400,
        metavar="SECONDS",
        show_default="--rate: 60",
        help="No request of a load starts later. Those under way are awaited.",
        rich_help_panel=_LOAD,
    ),
]

WarmUp = Annotated[
    int,
    typer.Option(
        "--warm-up",
        min=0,
        max=1000,
        metavar="N",
        help=(
            "Requests before the first load, one after the other. They show what a request "
            "takes alone, and are not counted."
        ),
        rich_help_panel=_LOAD,
    ),
]

InFlight = Annotated[
    int,
    typer.Option(
        "--in-flight",
        min=1,
        max=20_000,
        metavar="N",
        help="Open loop: most requests under way; others start late, which is told.",
        rich_help_panel=_LOAD,
    ),
]

Endpoint = Annotated[
    EndpointName,
    typer.Option(
        "--endpoint",
        metavar="NAME",
        help="chat, completions (both streamed) or embeddings.",
        rich_help_panel=_REQUESTS,
    ),
]

Prompt = Annotated[
    int,
    typer.Option(
        "--prompt",
        min=1,
        max=200_000,
        metavar="TOKENS",
        help="Length of a prompt, in the server's tokens.",
        rich_help_panel=_REQUESTS,
    ),
]

MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        min=1,
        max=100_000,
        metavar="TOKENS",
        help="Length of an answer, at most.",
        rich_help_panel=_REQUESTS,
    ),
]

PrefixShare = Annotated[
    float,
    typer.Option(
        "--prefix-share",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Share of a prompt that is the same in all, such as a system prompt.",
        rich_help_panel=_REQUESTS,
    ),
]

Prefixes = Annotated[
    int,
    typer.Option(
        "--prefixes",
        min=1,
        max=10_000,
        metavar="N",
        help="Different beginnings, taken in turn.",
        rich_help_panel=_REQUESTS,
    ),
]

IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        show_default="where the server is known to understand it",
        help="Ask for answers that go on to --max-tokens.",
        rich_help_panel=_REQUESTS,
    ),
]

Body = Annotated[
    str,
    typer.Option(
        "--body",
        metavar="JSON",
        help='Fields of every body, such as {"top_k": 1}; null leaves one of ours out.',
        rich_help_panel=_REQUESTS,
    ),
]

Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", help="Same seed, same requests.", rich_help_panel=_REQUESTS
    ),
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        show_default="the server's first one",
        help="The model to ask for.",
        rich_help_panel=_SERVER,
    ),
]

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        show_default="the key in LLAMA_GATEWAY_KEY",
        help="File that holds the API key.",
        rich_help_panel=_SERVER,
    ),
]

Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="LLAMA_GATEWAY_CA",
        metavar="FILE",
        show_default="the system's authorities",
        help="For https: PEM file of the server's certificate, or of the authority behind it.",
        rich_help_panel=_SERVER,
    ),
]

Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        max=86_400,
        metavar="SECONDS",
        help="For a request; a longer one has failed.",
        rich_help_panel=_SERVER,
    ),
]

GoalTtft = Annotated[
    float | None,
    typer.Option(
        "--goal-ttft",
        min=0.0,
        metavar="SECONDS",
        help="Longest time to the first token.",
        rich_help_panel=_GOAL,
    ),
]

GoalInterToken = Annotated[
    float | None,
    typer.Option(
        "--goal-inter-token",
        min=0.0,
        metavar="SECONDS",
        help="Longest mean time between tokens.",
        rich_help_panel=_GOAL,
    ),
]

GoalCompletion = Annotated[
    float | None,
    typer.Option(
        "--goal-completion",
        min=0.0,
        metavar="SECONDS",
        help="Longest time to the end of the answer.",
        rich_help_panel=_GOAL,
    ),
]

Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare",
        metavar="BEFORE.json AFTER.json",
        show_default=False,
        help="Measure nothing: compare two reports that --json wrote.",
        rich_help_panel=_OUTPUT,
    ),
]

Csv = Annotated[
    Path | None,
    typer.Option(
        "--csv", metavar="FILE", help="Write a line for each request.", rich_help_panel=_OUTPUT
    ),
]

Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Plot the results: .png, .svg or .pdf.",
        rich_help_panel=_OUTPUT,
    ),
]

Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write the report as one page that needs nothing else.",
        rich_help_panel=_OUTPUT,
    ),
]
