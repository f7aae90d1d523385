"""`llama-gateway batch`: submits batches of requests, follows them, and fetches their results."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.tools.cli.batch_options import (
    PROMPTS_PANEL,
    RESULTS_PANEL,
    RETRY_SECONDS,
    BatchId,
    Ca,
    Force,
    Format,
    InputKind,
    KeyFile,
    ResultFormat,
    RetryFor,
    Url,
)
from gateway.tools.cli.batch_texts import (
    BATCH_COLUMNS,
    batch_details,
    batch_row,
    check_stdout,
    command_for,
    end_by,
    tell_checked,
    tell_written,
)
from gateway.tools.cli.options import Json, examples_epilog
from gateway.tools.cli.terminal import (
    CommandFailed,
    HelpCommand,
    HelpGroup,
    format_cell,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from gateway.tools.cli.batch_client import BatchClient
    from gateway.tools.cli.batch_results import ResultPlaces


app = typer.Typer(
    cls=HelpGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help=(
        "Batches of requests that need not be answered at once.\n\n"
        "A batch runs on slots that would be idle, goes on after a restart of the gateway, and "
        "belongs to the API key that submits it."
    ),
    epilog=examples_epilog(
        ("llama-gateway batch submit lines.jsonl --wait", "run it, and write lines.out.jsonl"),
        ("llama-gateway batch submit texts/ --template 'Summarise: {text}'", "a folder of texts"),
        ("llama-gateway batch list", "the key's batches, the newest first"),
        ("llama-gateway batch show batch_01a2", "how far one is, and when it ends"),
        ("llama-gateway batch fetch batch_01a2 --partial", "the results so far"),
        ("llama-gateway batch cancel batch_01a2", "end one; what is done stays"),
    ),
)

_SUBMIT_EXAMPLES = examples_epilog(
    ("llama-gateway batch submit lines.jsonl --check", "check the file and send nothing"),
    (
        "llama-gateway batch submit lines.jsonl --wait",
        "follow it; writes lines.out.jsonl, and lines.errors.jsonl if lines fail",
    ),
    (
        "llama-gateway batch submit mails.csv --template 'Answer: {mail}' --id-column id",
        "a request for each row; columns are fields",
    ),
    (
        "llama-gateway batch submit texts/ --template 'Summarise: {text}' --wait --format folder",
        "a request for each text; writes a text for each into texts.out",
    ),
    ("llama-gateway batch submit - --window 1h < lines.jsonl", "from stdin, to be done in an hour"),
)


@app.command("submit", cls=HelpCommand, epilog=_SUBMIT_EXAMPLES)
def submit(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE", help="JSON lines, a .csv, a folder of texts; '-' is stdin."),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow it to its end, and write the results.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the input; every problem is shown.")
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Submit although lines are broken: each gets an error line; rows are left out.",
        ),
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="PATH",
            show_default="the lines' own url, /v1/chat/completions for prompts",
            help="Endpoint of all requests.",
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option("--window", metavar="TIME", help="Time within which it must be done: 2h, 7d."),
    ] = "24h",
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="NAME=VALUE", help="Kept with the batch; repeatable."),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            show_default="a random one",
            help="The same key and input again is the same batch, and no second one.",
        ),
    ] = None,
    input_kind: Annotated[
        InputKind | None,
        typer.Option(
            "--input",
            metavar="jsonl|csv|folder",
            show_default="by the name",
            help="Form of the input.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="WORDS",
            help="The prompt; {name} is a column, or a file's {text} and {name}; {{ is a brace.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    template_file: Annotated[
        Path | None,
        typer.Option(
            "--template-file",
            metavar="FILE",
            help="File that holds the template.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            "--id-column",
            metavar="NAME",
            show_default="row-1, row-2 and on",
            help="Column with each row's custom_id.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            "--delimiter",
            metavar="CHARACTER",
            show_default="a comma; a tab for .tsv",
            help="What separates columns.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Model of each request.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="WORDS", help="System prompt.", rich_help_panel=PROMPTS_PANEL
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            metavar="N",
            help="Longest answer.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None,
    largest_text: Annotated[
        int,
        typer.Option(
            "--largest-text",
            min=1,
            metavar="BYTES",
            help="Larger files of a folder are skipped.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = 512 << 10,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="A file of the folder that is no text is a problem, and not skipped.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="PATH",
            show_default="FILE.out.jsonl",
            help="With --wait: where results go; '-' is stdout.",
            rich_help_panel=RESULTS_PANEL,
        ),
    ] = None,
    format_: Format = ResultFormat.JSONL,
    force: Force = False,
    url: Url = None,
    key_file: KeyFile = None,
    ca: Ca = None,
    retry_for: RetryFor = RETRY_SECONDS,
    as_json: Json = False,
) -> None:
    """Submit a batch: JSON lines as OpenAI's Batch API has them, or prompts from a template.

    The input is checked here first. Prints the batch's id. With --wait it ends with status 1 if a
    line failed; Ctrl-C leaves the batch running.
    """
    from gateway.tools.cli.batch_client import Patience, connect, environment
    from gateway.tools.cli.batch_input import MOST_SHOWN, Problems
    from gateway.tools.cli.batch_results import places_for, stem_of
    from gateway.tools.cli.batch_submit import (
        InputOptions,
        create_fields,
        prepare,
        submit_input,
    )

    fields = create_fields(window, metadata or [])
    chosen = InputOptions(
        endpoint=endpoint,
        kind=input_kind,
        template=template,
        template_file=template_file,
        id_column=id_column,
        delimiter=delimiter,
        model=model,
        system=system,
        max_tokens=max_tokens,
        largest_text=largest_text,
        strict=strict,
    )
    places = places_for(stem_of(source), format_, output, force=force)
    check_stdout(places, as_json=as_json)
    if wait and not check:
        places.check()
    problems = Problems(most_shown=2**31 if check else MOST_SHOWN)
    found = prepare(source, chosen, problems)
    with found.file:
        tell_checked(found, problems, check=check, anyway=anyway, as_json=as_json)
        if check:
            return
        with connect(url, key_file, ca, environment()) as client:
            patience = Patience(retry_for)
            key = idempotency_key or f"cli-{secrets.token_hex(16)}"
            batch = submit_input(client, found, fields, key, patience)
            if not as_json:
                to_stdout = wait and str(places.output) == "-"
                (print_note if to_stdout else print)(format_cell(batch.get("id")))
            if wait:
                _follow(client, batch, places, retry_for, as_json=as_json)
                return
    if as_json:
        print_json(batch)
    else:
        print_note(f"submitted {found.lines:,} lines; follow it: {command_for('show', batch)}")


@app.command(
    "list",
    cls=HelpCommand,
    epilog=examples_epilog(
        ("llama-gateway batch list", "the newest 20"),
        ("llama-gateway batch list --json | jq -r '.batches[].id'", "for scripts"),
    ),
)
def list_(
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="Most batches.")
    ] = 20,
    url: Url = None,
    key_file: KeyFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """List the key's batches, the newest first."""
    with _client(url, key_file, ca) as client:
        found = client.batches(limit)
    if as_json:
        print_json({"batches": found})
    elif found:
        print_table(BATCH_COLUMNS, map(batch_row, found), state_column=1)
    else:
        print_note("this key has no batches")


@app.command(
    "show",
    cls=HelpCommand,
    epilog=examples_epilog(
        ("llama-gateway batch show batch_01a2", "its state, progress, expected end and cost"),
        ("llama-gateway batch show batch_01a2 --wait", "follow it to its end"),
    ),
)
def show(
    id_: BatchId,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
    url: Url = None,
    key_file: KeyFile = None,
    ca: Ca = None,
    retry_for: RetryFor = RETRY_SECONDS,
    as_json: Json = False,
) -> None:
    """Show one batch; or follow it, with status 1 unless it completes without a failed line."""
    with _client(url, key_file, ca) as client:
        batch = client.batch(id_)
        if wait:
            batch = _waited(client, batch, retry_for)
    if as_json:
        print_json(batch)
    else:
        for name, value in batch_details(batch):
            print(f"{name + ':':<14}{format_cell(value)}")
    if wait:
        end_by(batch)


@app.command(
    "cancel",
    cls=HelpCommand,
    epilog=examples_epilog(("llama-gateway batch cancel batch_01a2", "what is done stays")),
)
def cancel(
    id_: BatchId, url: Url = None, key_file: KeyFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """Cancel a batch: lines that wait are not run, those that run are ended."""
    _act(id_, "cancel", url, key_file, ca, as_json=as_json)


@app.command(
    "pause",
    cls=HelpCommand,
    epilog=examples_epilog(("llama-gateway batch pause batch_01a2", "no more of its lines begin")),
)
def pause(
    id_: BatchId, url: Url = None, key_file: KeyFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """Pause a batch: no more of its lines begin. Its time goes on."""
    _act(id_, "pause", url, key_file, ca, as_json=as_json)


@app.command(
    "resume",
    cls=HelpCommand,
    epilog=examples_epilog(("llama-gateway batch resume batch_01a2", "its lines run again")),
)
def resume(
    id_: BatchId, url: Url = None, key_file: KeyFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """Resume a paused batch."""
    _act(id_, "resume", url, key_file, ca, as_json=as_json)


@app.command(
    "fetch",
    cls=HelpCommand,
    epilog=examples_epilog(
        (
            "llama-gateway batch fetch batch_01a2",
            "ID.out.jsonl, and ID.errors.jsonl if lines failed",
        ),
        (
            "llama-gateway batch fetch batch_01a2 --partial --output -",
            "what there is so far, to stdout",
        ),
        ("llama-gateway batch fetch batch_01a2 --format csv --output done.csv", "a table"),
        (
            "llama-gateway batch fetch batch_01a2 --format folder --output done",
            "a text for each line",
        ),
    ),
)
def fetch(
    id_: BatchId,
    partial: Annotated[
        bool, typer.Option("--partial", help="What there is so far, before the end.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="PATH",
            show_default="ID.out.jsonl",
            help="Where results go; '-' is stdout.",
            rich_help_panel=RESULTS_PANEL,
        ),
    ] = None,
    format_: Format = ResultFormat.JSONL,
    force: Force = False,
    url: Url = None,
    key_file: KeyFile = None,
    ca: Ca = None,
    retry_for: RetryFor = RETRY_SECONDS,
    as_json: Json = False,
) -> None:
    """Fetch the results of a batch: its output and its errors."""
    from gateway.tools.cli.batch_client import Patience
    from gateway.tools.cli.batch_results import ENDED, fetch_results, places_for

    places = places_for(id_, format_, output, force=force)
    check_stdout(places, as_json=as_json)
    places.check()
    with _client(url, key_file, ca) as client:
        patience = Patience(retry_for)
        batch = patience.call(lambda: client.batch(id_))
        if batch.get("status") not in ENDED and not partial:
            raise CommandFailed(
                f"{id_} has not ended ({batch.get('status')}): --partial fetches what there is, "
                f"'{command_for('show', batch)} --wait' follows it"
            )
        written = fetch_results(client, batch, places, patience)
    tell_written(batch, written, as_json=as_json)


# What the commands share.


def _client(url: str | None, key_file: Path | None, ca: Path | None) -> BatchClient:
    from gateway.tools.cli.batch_client import connect

    return connect(url, key_file, ca, os.environ)


def _act(
    id_: str, action: str, url: str | None, key_file: Path | None, ca: Path | None, *, as_json: bool
) -> None:
    with _client(url, key_file, ca) as client:
        batch = client.act(id_, action)
    if as_json:
        print_json(batch)
    else:
        from gateway.tools.cli.batch_progress import describe, progress_of

        print(f"{id_}: {format_cell(describe(progress_of(batch), None, time.time()))}")


def _waited(client: BatchClient, batch: dict[str, Any], retry_for: float) -> dict[str, Any]:
    """The batch when it has ended. Ctrl-C leaves it running and ends the command."""
    from gateway.tools.cli.batch_progress import wait_for_end

    try:
        return wait_for_end(client, batch, retry_for)
    except KeyboardInterrupt:
        print_note(
            f"{batch.get('id')} goes on without this command: "
            f"'{command_for('show', batch)} --wait' follows it again, "
            f"'{command_for('fetch', batch)}' gets its results, "
            f"'{command_for('cancel', batch)}' ends it"
        )
        raise typer.Exit(130) from None
    except CommandFailed as error:
        raise CommandFailed(
            f"{error}\n{batch.get('id')} may go on without this command: "
            f"'{command_for('show', batch)} --wait' follows it again",
            error.status,
        ) from None


def _follow(
    client: BatchClient,
    batch: dict[str, Any],
    places: ResultPlaces,
    retry_for: float,
    *,
    as_json: bool,
) -> None:
    """Wait for the end, write the results and end with the status that they deserve."""
    from gateway.tools.cli.batch_client import Patience
    from gateway.tools.cli.batch_results import fetch_results

    batch = _waited(client, batch, retry_for)
    try:
        written = fetch_results(client, batch, places, Patience(retry_for))
    except CommandFailed as error:
        raise CommandFailed(
            f"{error}\nthe results are kept: '{command_for('fetch', batch)}' gets them",
            error.status,
        ) from None
    tell_written(batch, written, as_json=as_json)
    end_by(batch, written.failed)
