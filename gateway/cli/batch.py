"""`llama-gateway batch`: submits batches, follows them, fetches their results; and `webhooks`."""

from __future__ import annotations

import base64
import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.client import ENDED, BatchClient, GatewayAway, Patience, PublicFlags
from gateway.cli.options import CommandGroup, Form, InputFlags, Panel, argument, flag
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    format_cell,
    print_answer,
    print_json,
    print_listing,
    print_note,
)

if TYPE_CHECKING:
    from gateway.cli.batch_files import Fetched, PreparedInput, Problems

LONGEST_STEM = 100  # characters of an upload's name
FIRST_POLL, LONGEST_POLL = 0.25, 3.0  # seconds between questions for a batch's state; they double
_of_results = Panel("Results")

app = CommandGroup(
    "Batches of requests that need not be answered at once.\n\n"
    "A batch runs on slots that would be idle, goes on after a restart of the gateway, and "
    "belongs to the API key that submits it.",
    ("llama-gateway batch submit lines.jsonl --wait", "run it, and write lines.out.jsonl"),
    ("llama-gateway batch submit texts/ --template 'Summarise: {text}'", "a folder of texts"),
    ("llama-gateway batch list", "the key's batches, the newest first"),
    ("llama-gateway batch show batch_01a2", "how far one is, and when it ends"),
    ("llama-gateway batch fetch batch_01a2 --partial", "the results so far"),
    ("llama-gateway batch cancel batch_01a2", "end one; what is done stays"),
)

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def _checked_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise typer.BadParameter("is no batch's id: 'llama-gateway batch list' shows them")
    return value


BATCH_ID = argument("ID", "The batch's id.", callback=_checked_id)

FORMAT = _of_results(
    "jsonl|csv|folder",
    "Lines as they come, a table (the input's, with text and error), or a text file each.",
    "jsonl",
    name="--format",
)
FORCE = _of_results.switch("--force", "Overwrite what is there.")


@app.add(
    "submit",
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
def submit(
    *,
    source: str = argument("FILE", "JSON lines, a .csv, a folder of texts; '-' is stdin."),
    wait: bool = flag.switch("--wait", "Follow it to its end, and write the results."),
    check: bool = flag.switch("--check", "Only check the input; every problem is shown."),
    anyway: bool = flag.switch(
        "--anyway", "Submit although lines are broken: each gets an error line; rows are left out."
    ),
    chosen: InputFlags,
    output: Path | None = _of_results(
        "PATH", "With --wait: where results go; '-' is stdout.", show_default="FILE.out.jsonl"
    ),
    format_: Form = FORMAT,
    force: bool = FORCE,
    gateway: PublicFlags,
    retry_for: float = options.RETRY_FOR,
    as_json: bool = options.JSON,
) -> None:
    """Submit a batch: JSON lines as OpenAI's Batch API has them, or prompts from a template.

    The input is checked here first. Prints the batch's id. With --wait it ends with status 1 if a
    line failed; Ctrl-C leaves the batch running.
    """
    from gateway.cli import batch_files
    from gateway.cli.batch_files import Problems

    fields = batch_files.create_fields(chosen.window, chosen.metadata or [])
    stem = batch_files.stem_of(source)
    places = batch_files.places_for(stem, format_, output, force=force, as_json=as_json)
    if wait and not check:
        places.check()
    problems = Problems(most_shown=2**31 if check else batch_files.MOST_SHOWN)
    with batch_files.prepare(source, chosen, problems) as found:
        _tell_checked(found, problems, check=check, anyway=anyway, as_json=as_json)
        if check:
            return
        with gateway.connect() as client:
            key = chosen.idempotency_key or f"cli-{secrets.token_hex(16)}"
            batch = submit_input(client, found, fields, key, Patience(retry_for))
            if not as_json:
                to_stdout = wait and str(places.output) == "-"
                (print_note if to_stdout else print)(format_cell(batch.get("id")))
            if wait:
                batch = _waited(client, batch, retry_for)
                try:
                    patience, table = Patience(retry_for), found.table
                    written = batch_files.fetch_results(client, batch, places, patience, table)
                except CommandFailed as error:
                    hint = f"the results are kept: '{_command('fetch', batch)}' gets them"
                    raise CommandFailed(f"{error}\n{hint}", error.status) from None
                _tell_written(batch, written, as_json=as_json)
                end_by(batch, written.failed)
                return
    if as_json:
        print_json(batch)
    else:
        print_note(f"submitted {found.lines:,} lines; follow it: {_command('show', batch)}")


@app.add(
    "list",
    ("llama-gateway batch list", "the newest 20"),
    ("llama-gateway batch list --json | jq -r '.batches[].id'", "for scripts"),
)
def list_(
    *,
    limit: int = flag("N", "Most batches.", 20, min=1, max=10_000),
    gateway: PublicFlags,
    as_json: bool = options.JSON,
) -> None:
    """List the key's batches, the newest first."""
    with gateway.connect() as client:
        found = client.batches(limit)
    nothing = "this key has no batches"
    print_listing({"batches": found}, map(_row, found), nothing, as_json=as_json, state_column=1)


@app.add(
    "show",
    ("llama-gateway batch show batch_01a2", "its state, progress, expected end and cost"),
    ("llama-gateway batch show batch_01a2 --wait", "follow it to its end"),
)
def show(
    *,
    id_: str = BATCH_ID,
    wait: bool = flag.switch("--wait", "Follow it to its end."),
    gateway: PublicFlags,
    retry_for: float = options.RETRY_FOR,
    as_json: bool = options.JSON,
) -> None:
    """Show one batch; or follow it, with status 1 unless it completes without a failed line."""
    with gateway.connect() as client:
        batch = client.batch(id_)
        if wait:
            batch = _waited(client, batch, retry_for)
    if as_json:
        print_json(batch)
    else:
        for name, value in details(batch):
            print(f"{name + ':':<16}{format_cell(value)}")
    if wait:
        end_by(batch)


def _add_action(name: str, meaning: str, effect: str) -> None:
    """Add a command that changes a batch and shows it."""

    def act(*, id_: str = BATCH_ID, gateway: PublicFlags, as_json: bool = options.JSON) -> None:
        with gateway.connect() as client:
            batch = client.act(id_, name)
        told = format_cell(describe(batch, time.time()))
        print_answer(batch, f"{id_}: {told}", as_json=as_json)

    example = (f"llama-gateway batch {name} batch_01a2", effect)
    app.add(name, example, meaning=meaning)(act)


_add_action(
    "cancel",
    "Cancel a batch: lines that wait are not run, those that run are ended.",
    "what is done stays",
)
_add_action(
    "pause",
    "Pause a batch: no more of its lines begin. Its time goes on.",
    "no more of its lines begin",
)
_add_action("resume", "Resume a paused batch.", "its lines run again")


@app.add(
    "fetch",
    ("llama-gateway batch fetch batch_01a2", "ID.out.jsonl, and ID.errors.jsonl if lines failed"),
    (
        "llama-gateway batch fetch batch_01a2 --partial --output -",
        "what there is so far, to stdout",
    ),
    (
        "llama-gateway batch fetch batch_01a2 --format csv --table mails.csv --output done.csv",
        "the table it was made of, with an answer in each row",
    ),
    ("llama-gateway batch fetch batch_01a2 --format folder --output done", "a text for each line"),
)
def fetch(
    *,
    id_: str = BATCH_ID,
    partial: bool = flag.switch("--partial", "What there is so far, before the end."),
    output: Path | None = _of_results(
        "PATH", "Where results go; '-' is stdout.", show_default="ID.out.jsonl"
    ),
    format_: Form = FORMAT,
    force: bool = FORCE,
    table: Path | None = _of_results(
        "FILE", "With --format csv: the table it was made of; its columns and order are kept."
    ),
    id_column: str | None = options.ID_COLUMN,
    delimiter: str | None = options.DELIMITER,
    gateway: PublicFlags,
    retry_for: float = options.RETRY_FOR,
    as_json: bool = options.JSON,
) -> None:
    """Fetch the results of a batch: its output and its errors."""
    from gateway.cli.batch_files import fetch_results, open_table, places_for

    places = places_for(id_, format_, output, force=force, as_json=as_json)
    places.check()
    if table is None and (id_column or delimiter):
        raise WrongUsage("--id-column, --delimiter: they are of a --table")
    if table is not None and format_ != "csv":
        raise WrongUsage("--table: is for --format csv")
    with contextlib.ExitStack() as stack:
        read = None
        if table is not None:
            read = stack.enter_context(open_table(str(table), id_column, delimiter))
        client = stack.enter_context(gateway.connect())
        patience = Patience(retry_for)
        batch = patience.call(lambda: client.batch(id_))
        if batch.get("status") not in ENDED and not partial:
            raise CommandFailed(
                f"{id_} has not ended ({batch.get('status')}): --partial fetches what there is, "
                f"'{_command('show', batch)} --wait' follows it"
            )
        written = fetch_results(client, batch, places, patience, read)
    _tell_written(batch, written, as_json=as_json)


def submit_input(
    client: BatchClient,
    found: PreparedInput,
    fields: Mapping[str, Any],
    key: str,
    patience: Patience,
) -> dict[str, Any]:
    """Upload the input and create its batch. Raises CommandFailed.

    An upload is found again by its name, which has a hash of its bytes, and a batch by its
    idempotency key: what is repeated after a lost answer makes nothing twice.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    from gateway.cli.progress import Progress

    # The same for the same bytes.
    stem = "".join(c if c.isprintable() and c not in '"\\/' else "_" for c in found.stem)
    name = f"{stem[:LONGEST_STEM]}-{found.sha256[:16]}.jsonl"
    is_repeated = not key.startswith("cli-")

    def upload() -> dict[str, Any]:
        nonlocal is_repeated
        if is_repeated and (earlier := client.find_upload(name, found.size)) is not None:
            return earlier
        is_repeated = True
        columns = (TextColumn("uploading"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns) as progress:
            return client.upload(progress.wrap_file(found.file, found.size), name)

    uploaded = patience.call(upload)
    asked = {"input_file_id": uploaded.get("id"), "endpoint": found.endpoint, **fields}
    try:
        return patience.call(lambda: client.create(asked, key))
    except (GatewayAway, KeyboardInterrupt):
        print_note(
            f"whether the batch was made is not known; the same command with "
            f"--idempotency-key {key} makes no second one"
        )
        raise


# Following a batch to its end.


def _waited(client: BatchClient, batch: dict[str, Any], retry_for: float) -> dict[str, Any]:
    """Return the batch when it has ended, and show it meanwhile. Raises CommandFailed.

    A gateway that is away for less than `retry_for` seconds is waited for. Ctrl-C leaves the batch
    running and ends the command.
    """
    from gateway.cli.progress import StatusProgress

    id_, interval = str(batch.get("id")), FIRST_POLL
    try:
        with StatusProgress(id_) as display:
            patience = Patience(retry_for, note=display.note)
            while True:
                now, (total, done, failed) = time.time(), counts_of(batch)
                own = _own(batch)
                why = (own.get("why_waiting") or {}).get("message")
                display.show(
                    describe(batch, now, with_end=True),
                    f"{batch.get('status')} {own.get('paused')} {why}",
                    done + failed,
                    total,
                )
                if batch.get("status") in ENDED:
                    return batch
                time.sleep(interval)
                interval = min(1.5 * interval, LONGEST_POLL)
                batch = patience.call(lambda: client.batch(id_))
    except KeyboardInterrupt:
        print_note(
            f"{id_} goes on without this command: "
            f"'{_command('show', batch)} --wait' follows it again, "
            f"'{_command('fetch', batch)}' gets its results, "
            f"'{_command('cancel', batch)}' ends it"
        )
        raise typer.Exit(130) from None
    except CommandFailed as error:
        raise CommandFailed(
            f"{error}\n{id_} may go on without this command: "
            f"'{_command('show', batch)} --wait' follows it again",
            error.status,
        ) from None


# The progress of a batch in words.


# How an expected end was reckoned, by the gateway's word for it.
RECKONED = {
    "speed": ", at the speed of its last minutes",
    "nodes": ", if it has all slots of its nodes from then on",
}


def counts_of(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """The lines of a batch: all, those that are done, and those that failed."""
    counts = batch.get("request_counts") or {}
    return counts.get("total", 0), counts.get("completed", 0), counts.get("failed", 0)


def describe(batch: Mapping[str, Any], now: float, *, with_end: bool = False) -> str:
    """Tell how far a batch is in one line; `with_end`: and when it is expected to end."""
    status, (total, done, failed), own = str(batch.get("status")), counts_of(batch), _own(batch)
    parts = [status.replace("_", " ")]
    if total:
        parts.append(f"{done:,} of {total:,} done")
    if failed:
        parts.append(f"{failed:,} failed")
    if paused := own.get("paused"):
        parts.append(f"paused ({paused['reason']})" if paused.get("reason") else "paused")
    elif waits := own.get("why_waiting"):
        since = waits.get("since")
        told = "" if since is None else f" since {_time_of_day(since, now - since)}"
        parts.append(f"waits{told} ({waits['message'].rstrip('.')})")
    if status not in ENDED:
        if (speed := own.get("tokens_per_second")) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if with_end and (end := own.get("expected_end")) is not None:
            parts.append(f"ends {moment(end, now)}")
    return ", ".join(parts)


def moment(then: float, now: float) -> str:
    """Tell a time to come: its clock time, and in how long."""
    left = max(0.0, then - now)
    return f"about {_time_of_day(then, left)} (in {span(left)})"


def _time_of_day(then: float, away: float) -> str:
    """Tell a time that is so many seconds away, with the date if that is needed."""
    form = "%H:%M:%S" if away < 3600 else "%H:%M" if away < 72_000 else "%d %b %H:%M"
    return time.strftime(form, time.localtime(then))


def span(seconds: float) -> str:
    """Tell a time span in one or two units."""
    whole = round(seconds)
    for size, unit, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            first, rest = divmod(whole, size)
            return f"{first} {unit} {rest // below} {small}" if rest // below else f"{first} {unit}"
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"


def _own(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """What this gateway tells of a batch, beside what OpenAI's API has."""
    return batch.get("llama_gateway") or {}


# Telling.


def _command(name: str, batch: dict[str, Any]) -> str:
    """Return the command of this name for this batch, to be copied."""
    return f"llama-gateway batch {name} {shlex.quote(str(batch.get('id')))}"


def _tell_checked(
    found: PreparedInput, problems: Problems, *, check: bool, anyway: bool, as_json: bool
) -> None:
    """Tell what checking found. Raises CommandFailed, if nothing is to be submitted."""
    models = sorted(format_cell(name or "the default model") for name in found.models)
    summary = (
        f"{found.lines:,} lines for {found.endpoint} ({', '.join(models) or 'no model'}), about "
        f"{found.prompt_tokens:,} prompt tokens, {found.size:,} bytes"
    )
    if check:
        told = {
            "lines": found.lines,
            "problems": problems.count,
            "skipped": found.skipped,
            "endpoint": found.endpoint,
            "models": sorted(name for name in found.models if name is not None),
            "prompt_tokens": found.prompt_tokens,
            "bytes": found.size,
        }
        print_answer(told, summary, as_json=as_json)
    else:
        print_note(summary)
    if problems.count and not (anyway and found.lines and not check):
        hint = "" if check else ": mend them, or --anyway submits the rest"
        raise WrongUsage(f"{problems.count:,} problems{hint}")
    if not found.lines:
        raise WrongUsage("the input has no line that can be run")


def _tell_written(batch: dict[str, Any], written: Fetched, *, as_json: bool) -> None:
    if as_json:
        print_json({"batch": batch, **asdict(written)})
        return
    if written.output is not None and str(written.output) != "-":
        print_note(f"{written.done:,} results: {written.output}")
    if written.failed and written.errors is not None:
        print_note(f"{written.failed:,} errors: {written.errors}")


def end_by(batch: dict[str, Any], failed: int = 0) -> None:
    """End with an error if a batch that has ended has failed lines, or was not completed."""
    status, (total, _, known) = str(batch.get("status")), counts_of(batch)
    failed = max(failed, known)
    if status in ENDED and status != "completed":
        raise CommandFailed(f"{batch.get('id')} {status}{_reasons(batch)}")
    if failed:
        raise CommandFailed(f"{failed:,} of {max(total, failed):,} lines failed")


def _reasons(batch: dict[str, Any]) -> str:
    listed = (batch.get("errors") or {}).get("data") or ()
    messages = [str(one.get("message")) for one in listed]
    return f": {'; '.join(messages[:3])}" if messages else ""


def _row(batch: dict[str, Any]) -> list[tuple[str, object]]:
    own, counts = _own(batch), counts_of(batch)
    return [
        ("ID", batch.get("id")),
        ("STATUS", "paused" if own.get("paused") else batch.get("status")),
        *zip(("LINES", "DONE", "FAILED"), counts, strict=True),
        ("ENDPOINT", batch.get("endpoint")),
        ("CREATED", _clock_time(batch.get("created_at"))),
        ("DUE", _clock_time(batch.get("expires_at"))),
        ("WAITS FOR", (own.get("why_waiting") or {}).get("reason")),
    ]


def details(batch: dict[str, Any]) -> list[tuple[str, object]]:
    """What `show` tells of a batch, each with its name."""
    own, now = _own(batch), time.time()
    start, end = own.get("expected_start"), own.get("expected_end")
    waits, by = own.get("why_waiting") or {}, RECKONED.get(str(own.get("expected_by")), "")
    listed: list[tuple[str, object]] = [
        ("id", batch.get("id")),
        ("progress", describe(batch, now) + _reasons(batch)),
        ("endpoint", batch.get("endpoint")),
        ("model", batch.get("model")),
        ("created", _clock_time(batch.get("created_at"))),
        ("due", _clock_time(batch.get("expires_at"))),
        ("waits for", waits.get("message")),
        ("waits since", _clock_time(waits.get("since"))),
        ("expected start", None if start is None else moment(start, now)),
        ("expected end", None if end is None else moment(end, now) + by),
        ("cost", _money(own.get("cost"))),
        ("expected cost", _money(own.get("expected_cost"))),
        ("input", batch.get("input_file_id")),
        ("output", batch.get("output_file_id")),
        ("errors", batch.get("error_file_id")),
        ("metadata", [f"{key}={value}" for key, value in (batch.get("metadata") or {}).items()]),
    ]
    return [(name, value) for name, value in listed if value is not None and value != []]


def _clock_time(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _money(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:.6f}".rstrip("0").rstrip(".")


# `llama-gateway webhooks`.

SECRET_BYTES = 32

webhooks = CommandGroup(
    "Secrets of webhooks, which receive events of batches and responses.",
    ("llama-gateway webhooks secret > hooks.secret", "a secret for `webhooks.targets`"),
)


@webhooks.callback()
def _webhooks() -> None:
    """Keep `secret` a command of its own, though it is the only one."""


@webhooks.add(
    "secret",
    ("(umask 077; llama-gateway webhooks secret > hooks.secret)", "for `secret_file`"),
    ("llama-gateway webhooks secret >> hooks.secret", "a second one, while both are in use"),
)
def secret() -> None:
    """Print a new secret (whsec_...); gateway and receiver must both have it."""
    text = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    print(f"whsec_{text}")
    print_note("Name its file as secret_file of a target in webhooks.targets, and reload.")
