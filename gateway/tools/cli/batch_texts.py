"""What the commands of `llama-gateway batch` tell: checks, batches, and where results are."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

from gateway.tools.cli.terminal import CommandFailed, format_cell, print_json, print_note

if TYPE_CHECKING:
    from gateway.tools.cli.batch_input import PreparedInput, Problems
    from gateway.tools.cli.batch_results import Fetched, ResultPlaces


def command_for(name: str, batch: dict[str, Any]) -> str:
    """The command of this name for this batch, to be copied."""
    return f"llama-gateway batch {name} {shlex.quote(str(batch.get('id')))}"


def check_stdout(places: ResultPlaces, *, as_json: bool) -> None:
    """Raises CommandFailed, where results and JSON would both go to stdout."""
    if as_json and str(places.output) == "-":
        raise CommandFailed("--output - and --json: only one of them can go to stdout", status=2)


def tell_checked(
    found: PreparedInput, problems: Problems, *, check: bool, anyway: bool, as_json: bool
) -> None:
    """Tell what checking found. Raises CommandFailed, if nothing is to be submitted."""
    models = sorted(format_cell(name or "the default model") for name in found.models)
    summary = (
        f"{found.lines:,} lines for {found.endpoint} ({', '.join(models) or 'no model'}), about "
        f"{found.prompt_tokens:,} prompt tokens, {found.size:,} bytes"
    )
    if check and as_json:
        print_json(
            {
                "lines": found.lines,
                "problems": problems.count,
                "skipped": found.skipped,
                "endpoint": found.endpoint,
                "models": sorted(name for name in found.models if name is not None),
                "prompt_tokens": found.prompt_tokens,
                "bytes": found.size,
            }
        )
    elif check:
        print(summary)
    else:
        print_note(summary)
    if problems.count and not (anyway and found.lines and not check):
        hint = "" if check else ": mend them, or --anyway submits the rest"
        raise CommandFailed(f"{problems.count:,} problems{hint}", status=2)
    if not found.lines:
        raise CommandFailed("the input has no line that can be run", status=2)


def tell_written(batch: dict[str, Any], written: Fetched, *, as_json: bool) -> None:
    """Tell where the results are."""
    if as_json:
        print_json(
            {
                "batch": batch,
                "output": None if written.output is None else str(written.output),
                "errors": None if written.errors is None else str(written.errors),
                "done": written.done,
                "failed": written.failed,
            }
        )
    elif written.output is not None and str(written.output) != "-":
        print_note(f"{written.done:,} results: {written.output}")
    if not as_json and written.failed and written.errors is not None:
        print_note(f"{written.failed:,} errors: {written.errors}")


def end_by(batch: dict[str, Any], failed: int = 0) -> None:
    """End with an error if a batch that has ended has failed lines, or was not completed."""
    from gateway.tools.cli.batch_progress import progress_of
    from gateway.tools.cli.batch_results import ENDED

    progress = progress_of(batch)
    failed = max(failed, progress.failed)
    if progress.status in ENDED and progress.status != "completed":
        raise CommandFailed(f"{batch.get('id')} {progress.status}{_reasons(batch)}")
    if failed:
        raise CommandFailed(f"{failed:,} of {max(progress.total, failed):,} lines failed")


def _reasons(batch: dict[str, Any]) -> str:
    errors = batch.get("errors")
    listed = errors.get("data") if isinstance(errors, dict) else None
    messages = [str(one.get("message")) for one in listed or () if isinstance(one, dict)]
    return f": {'; '.join(messages[:3])}" if messages else ""


BATCH_COLUMNS = ("ID", "STATUS", "LINES", "DONE", "FAILED", "ENDPOINT", "CREATED", "DUE")


def batch_row(batch: dict[str, Any]) -> list[object]:
    """A batch in the table of `list`."""
    from gateway.tools.cli.batch_progress import progress_of

    progress = progress_of(batch)
    return [
        batch.get("id"),
        "paused" if progress.paused is not None else progress.status,
        progress.total,
        progress.done,
        progress.failed,
        batch.get("endpoint"),
        _clock_time(batch.get("created_at")),
        _clock_time(batch.get("expires_at")),
    ]


def batch_details(batch: dict[str, Any]) -> list[tuple[str, object]]:
    """What `show` tells of a batch, each with its name."""
    from gateway.tools.cli.batch_progress import Estimate, describe, moment, progress_of

    progress, now = progress_of(batch), time.time()
    metadata = batch.get("metadata")
    end = Estimate().end(progress)
    listed: list[tuple[str, object]] = [
        ("id", batch.get("id")),
        ("progress", describe(progress, None, now) + _reasons(batch)),
        ("endpoint", batch.get("endpoint")),
        ("model", batch.get("model")),
        ("created", _clock_time(batch.get("created_at"))),
        ("due", _clock_time(batch.get("expires_at"))),
        ("expected end", None if end is None else moment(end, now)),
        ("cost", _money(progress.cost)),
        ("expected cost", _money(progress.expected_cost)),
        ("input", batch.get("input_file_id")),
        ("output", batch.get("output_file_id")),
        ("errors", batch.get("error_file_id")),
        (
            "metadata",
            [f"{key}={value}" for key, value in metadata.items()]
            if isinstance(metadata, dict)
            else None,
        ),
    ]
    return [(name, value) for name, value in listed if value is not None and value != []]


def _clock_time(seconds: object) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _money(value: float | None) -> str | None:
    return None if value is None else f"{value:.6f}".rstrip("0").rstrip(".")
