"""`llama-gateway usage`: what requests used and cost, from the ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.tools.cli import options
from gateway.tools.cli.admin_client import AdminClient
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.store_access import gateway_or_store
from gateway.tools.cli.terminal import CommandFailed, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.store.store import Store
    from gateway.usage.reports import UsageReport

REPORT_TIMEOUT = 90.0
"""Seconds; longer than a gateway takes for a report at most."""

EXAMPLES = examples_epilog(
    ("llama-gateway usage", "the last 30 days, by model"),
    ("llama-gateway usage --by key --since 7d", "who used how much since midnight a week ago"),
    ("llama-gateway usage --by key,day --since 2026-11-01 --until 2026-11-30", "a month, by day"),
    ("llama-gateway usage --by user --json | jq '.rows[0]'", "for scripts"),
    ("llama-gateway usage --by group --csv > november.csv", "for spreadsheets"),
)


def usage(
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="key|group|user|model|class|day|tier",
            help="What to sum up by; two of them with a comma: key,day.",
        ),
    ] = "model",
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            show_default="30d",
            help="A date, a time of RFC 3339, or how long ago (7d, 12h); UTC.",
        ),
    ] = None,
    until: options.Until = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", show_default="10000", help="Most rows; the total has all."
        ),
    ] = None,
    as_json: options.Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV, for spreadsheets.")] = False,
    config: options.ConfigFile = None,
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
) -> None:
    """Show what requests used and cost, and what the machines cost.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.usage.reports import InvalidQuery, parse_query
    from gateway.usage.windows import time_text

    if as_json and as_csv:
        raise typer.BadParameter("one of the two", param_hint="--json, --csv")
    asked = {"by": by, "since": since, "until": until}
    asked["limit"] = None if limit is None else str(limit)
    try:
        query = parse_query(time.time(), **asked)
    except InvalidQuery as error:
        raise CommandFailed(f"--{error.parameter}: {error}", status=2) from None
    given = {name: value for name, value in asked.items() if value is not None}
    report, table = dict[str, Any](), ""
    with gateway_or_store(admin_url, admin_key_file, config) as source:
        if not isinstance(source, AdminClient):
            read = _read(source, asked)
            report, table = read.to_json(), read.to_csv()
        elif as_csv:
            given["format"] = "csv"
            table = source.text("/admin/usage", given, timeout=REPORT_TIMEOUT)
        else:
            report = source.request("GET", "/admin/usage", given, timeout=REPORT_TIMEOUT)
    if as_csv:
        print(table, end="")
        is_empty = table.count("\n") <= 1
    else:
        is_empty = not report["rows"]
        if as_json:
            print_json(report)
        else:
            _show(report)
    if is_empty:
        print_note(f"no request ended since {time_text(query.since)} (until {until or 'now'})")


def _read(store: Store, asked: dict[str, str | None]) -> UsageReport:
    from gateway.usage.reports import InvalidQuery, ReportInterrupted, ReportReader, parse_query

    reader = ReportReader(parse_query(time.time(), **asked))
    try:
        while not store.run_now(reader.step, write=False):
            pass
    except InvalidQuery as error:
        raise CommandFailed(f"--{error.parameter}: {error}", status=2) from None
    except ReportInterrupted as error:
        raise CommandFailed(str(error)) from None
    return reader.report()


_COLUMNS = (
    ("REQUESTS", "requests"),
    ("FAILED", "failures"),
    ("LEFT", "clients_left"),
    ("PROMPT", "prompt_tokens"),
    ("CACHED", "cached_tokens"),
    ("COMPLETION", "completion_tokens"),
    ("SLOT SECONDS", "slot_seconds"),
    ("COST", "cost"),
    ("COST/REQUEST", "cost_per_request"),
    ("COST/1M", "cost_per_million_tokens"),
)


def _show(report: dict[str, Any]) -> None:
    """Print the table and what the machines cost, for people."""
    by, rows, total = report["by"], report["rows"], report["total"]
    if rows:
        cells = [[*(row[name] for name in by), *_figures(row)] for row in rows]
        cells.append(["total", *([None] * (len(by) - 1)), *_figures(total)])
        print_table([*map(str.upper, by), *(title for title, _ in _COLUMNS)], cells)
    if report["rows_found"] > len(rows):
        print_note(f"{report['rows_found'] - len(rows)} more rows: --limit")
    for note in report["notes"]:
        print_note(note)
    money = report["money"]
    if money["node_hours_cost"] or total["cost"]:
        print()
        for line in _money_lines(money):
            print(line)


def _figures(row: dict[str, Any]) -> list[str | None]:
    return [_number(row[name]) for _, name in _COLUMNS]


def _number(value: float | None) -> str | None:
    """A number that can be read at a glance, never in powers of ten."""
    if value is None:
        return None
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.6f}".rstrip("0").rstrip(".")


def _money_lines(money: dict[str, Any]) -> list[str]:
    lines = [f"requests were charged {_number(money['cost'])}"]
    for tier, told in money["tiers"].items():
        parts = f"{_number(told['requests'])} requests, charged {_number(told['cost'])}"
        if told["node_hours_cost"]:
            parts += (
                f"; {_number(told['node_hours'])} node hours cost "
                f"{_number(told['node_hours_cost'])}"
            )
        lines.append(f"  {tier}: {parts}")
    for name, title in (
        ("idle", "idle time of machines paid by the hour"),
        ("all_gpu", "the same requests, all on the GPU tier"),
        ("effective_per_hour", "an hour, weighted by the tiers' shares of requests"),
        ("running_per_hour", "an hour in which all machines run"),
    ):
        amount = money[name]
        value, reason = _number(amount["value"]), amount.get("reason")
        lines.append(f"{title}: {value if reason is None else f'unknown ({reason})'}")
    return lines
