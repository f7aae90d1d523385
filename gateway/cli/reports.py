"""`llama-gateway usage` and `audit`: what the store tells, by the running gateway or alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.client import AdminClient, StoreFlags
from gateway.cli.options import examples_epilog
from gateway.cli.terminal import CommandFailed, failing_by, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.callers.reports import LedgerReport
    from gateway.store.store import Store
    from gateway.watch.audit import AuditQuery

REPORT_TIMEOUT = 90.0  # seconds; longer than a gateway takes for a report at most

USAGE_EXAMPLES = examples_epilog(
    ("llama-gateway usage", "the last 30 days, by model"),
    ("llama-gateway usage --by key --since 7d", "who used how much since midnight a week ago"),
    ("llama-gateway usage --by key,day --since 2026-11-01 --until 2026-11-30", "a month, by day"),
    ("llama-gateway usage --by model --percentiles", "how long requests took, and waited"),
    ("llama-gateway usage --by user --json | jq '.rows[0]'", "for scripts"),
    ("llama-gateway usage --by group --csv > november.csv", "for spreadsheets"),
)


@options.takes(stored=StoreFlags)
def usage(
    *,
    by: str = typer.Option(
        "model",
        metavar="key|group|user|model|class|day|tier",
        help="What to sum up by; two of them with a comma: key,day.",
    ),
    since: str | None = options.since(None, "30d"),
    until: options.Until = None,
    limit: int | None = typer.Option(
        None, metavar="N", show_default="10000", help="Most rows; the total has all."
    ),
    percentiles: bool = typer.Option(
        False,
        "--percentiles",
        help="Add how long half of the requests, and 95 of 100, took at most: to the first token, "
        "in all, and in the queue.",
    ),
    as_json: options.Json = False,
    as_csv: bool = typer.Option(False, "--csv", help="Write CSV, for spreadsheets."),
    stored: StoreFlags,
) -> None:
    """Show what requests used and cost, and what the machines cost.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.callers.reports import InvalidQuery, parse_query
    from gateway.callers.windows import time_text

    if as_json and as_csv:
        raise typer.BadParameter("one of the two", param_hint="--json, --csv")
    asked = {"by": by, "since": since, "until": until}
    asked["limit"] = None if limit is None else str(limit)
    asked["percentiles"] = "true" if percentiles else None
    try:
        query = parse_query(time.time(), **asked)
    except InvalidQuery as error:
        raise CommandFailed(f"--{error.parameter}: {error}", status=2) from None
    given = {name: value for name, value in asked.items() if value is not None}
    report, table = dict[str, Any](), ""
    with stored.open() as source:
        if not isinstance(source, AdminClient):
            read = _read(source, asked, stored)
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


def _read(store: Store, asked: dict[str, str | None], stored: StoreFlags) -> LedgerReport:
    from gateway.callers.reports import InvalidQuery, ReportInterrupted, ReportReader, parse_query

    reader = ReportReader(parse_query(time.time(), **asked))
    try:
        while not store.run_now(reader.step, write=False):
            pass
    except InvalidQuery as error:
        raise CommandFailed(f"--{error.parameter}: {error}", status=2) from None
    except ReportInterrupted as error:
        raise CommandFailed(str(error)) from None
    report = reader.report()
    return report.named(stored.key_names(store).get)


_USAGE_COLUMNS = (
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
_PERCENTILE_COLUMNS = (
    ("TTFT P50", "ttft_p50"),
    ("P95", "ttft_p95"),
    ("SECONDS P50", "seconds_p50"),
    ("P95", "seconds_p95"),
    ("WAIT P95", "wait_p95"),
)


def _show(report: dict[str, Any]) -> None:
    """Print the table and what the machines cost, for people."""
    by, rows, total = report["by"], report["rows"], report["total"]
    if rows:
        times = _PERCENTILE_COLUMNS if "wait_p95" in rows[0] else ()
        columns = (*_USAGE_COLUMNS, *times)
        by = [name for one in by for name in ((one, "key_name") if one == "key" else (one,))]
        cells = [[*(row.get(name) for name in by), *_figures(row, columns)] for row in rows]
        total |= dict.fromkeys(name for _, name in times)
        cells.append(["total", *([None] * (len(by) - 1)), *_figures(total, columns)])
        titles = ("NAME" if name == "key_name" else name.upper() for name in by)
        print_table([*titles, *(title for title, _ in columns)], cells)
    if report["rows_found"] > len(rows):
        print_note(f"{report['rows_found'] - len(rows)} more rows: --limit")
    for note in report["notes"]:
        print_note(note)
    money = report["money"]
    if money["node_hours_cost"] or total["cost"]:
        print()
        for line in _money_lines(money):
            print(line)


def _figures(row: dict[str, Any], columns: Iterable[tuple[str, str]]) -> list[str | None]:
    return [_number(row[name]) for _, name in columns]


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


MOST_SHOWN = 100_000
PAGE = 1000  # entries of one response of the admin API
AUDIT_COLUMNS = ("TIME", "ACTOR", "ROLE", "ACTION", "TARGET", "OUTCOME", "DETAILS")

AUDIT_EXAMPLES = examples_epilog(
    ("llama-gateway audit", "the last 100 changes, the latest first"),
    ("llama-gateway audit --since 7d --action keys", "what was done to keys this week"),
    ("llama-gateway audit --action drain --target epyc-a", "who has drained a node"),
    ("llama-gateway audit --limit 10000 --json > audit.json", "for scripts"),
)


@options.takes(stored=StoreFlags)
def audit(
    *,
    since: str | None = options.since(None, "the beginning"),
    until: options.Until = None,
    action: str | None = typer.Option(
        None,
        metavar="ACTION",
        help="Only this action, such as drain or keys.revoke; keys: all that begin so.",
    ),
    target: str | None = typer.Option(
        None, metavar="NAME", help="Only what was done to this node, key or request."
    ),
    limit: int = typer.Option(100, min=1, max=MOST_SHOWN, metavar="N", help="Most entries."),
    as_json: options.Json = False,
    stored: StoreFlags,
) -> None:
    """Show who has changed what, and what was refused, the latest first.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.watch.audit import AuditQuery, read_audit

    query = AuditQuery(
        since=_moment("since", since),
        until=_moment("until", until, end=True),
        action=action,
        target=target,
        limit=limit + 1,
    )
    with stored.open() as source:
        if isinstance(source, AdminClient):
            found = _asked(source, query)
        else:
            read = source.run_now(lambda connection: read_audit(connection, query), write=False)
            found = [entry.as_json() for entry in read]
    shown = found[:limit]
    if as_json:
        print_json({"entries": shown})
    elif shown:
        print_table(AUDIT_COLUMNS, map(_cells, shown))
    else:
        print_note("the audit log has no such entry")
    if len(found) > limit:
        print_note(f"there are more than {limit}: --limit, or --until {shown[-1]['at']}")


def _moment(parameter: str, text: str | None, *, end: bool = False) -> float | None:
    from gateway.callers.reports import InvalidQuery, parse_time
    from gateway.callers.windows import time_text

    if text is None:
        return None
    now = time.time()
    with failing_by(InvalidQuery, before=f"--{parameter}: ", status=2):
        moment = parse_time(parameter, text, now, end=end)
    if parameter == "since" and moment > now:
        raise CommandFailed(
            f"--since: {time_text(moment)} is in the future: it is {time_text(now)} now", status=2
        )
    return moment


def _asked(admin: AdminClient, query: AuditQuery) -> list[dict[str, Any]]:
    """Ask the running gateway, page by page."""
    given = {
        "since": query.since,
        "until": query.until,
        "action": query.action,
        "target": query.target,
    }
    parameters = {name: str(value) for name, value in given.items() if value is not None}
    found: list[dict[str, Any]] = []
    while len(found) < query.limit:
        parameters["limit"] = str(min(PAGE, query.limit - len(found)))
        page = admin.request("GET", "/admin/audit", parameters)
        found += page["entries"]
        if page["next"] is None:
            break
        parameters["before"] = str(page["next"])
    return found


def _cells(entry: dict[str, Any]) -> list[object]:
    details = ", ".join(f"{name} {value}" for name, value in entry["details"].items())
    texts = [entry[name] for name in ("at", "actor", "role", "action", "target", "outcome")]
    return [text or None for text in (*texts, details)]
