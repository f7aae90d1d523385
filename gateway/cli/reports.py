"""`llama-gateway usage`, `audit` and `requests`: what the store tells, by the gateway or alone."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.client import AdminClient, StoreFlags, checked_query, read_pages
from gateway.cli.options import examples_epilog, flag
from gateway.cli.terminal import (
    WrongUsage,
    failing_by,
    print_json,
    print_listing,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from gateway.callers.reports import LedgerReport, ReportQuery
    from gateway.store.store import Store

REPORT_TIMEOUT = 90.0  # seconds; longer than a gateway takes for a report at most

USAGE_EXAMPLES = examples_epilog(
    ("llama-gateway usage", "the last 30 days, by model"),
    ("llama-gateway usage --by key --since 7d", "who used how much since midnight a week ago"),
    ("llama-gateway usage --by key,day --since 2026-11-01 --until 2026-11-30", "a month, by day"),
    ("llama-gateway usage --by model --percentiles", "how long requests took, and waited"),
    ("llama-gateway usage --by user --json | jq '.rows[0]'", "for scripts"),
    ("llama-gateway usage --by group --csv > november.csv", "for spreadsheets"),
)


def usage(
    *,
    by: str = flag(
        "key|group|user|model|class|day|tier",
        "What to sum up by; two of them with a comma: key,day.",
        "model",
    ),
    since: str | None = options.since("30d"),
    until: str | None = options.UNTIL,
    limit: int | None = flag("N", "Most rows; the total has all.", show_default="10000"),
    percentiles: bool = flag.switch(
        "--percentiles",
        "Add how long half of the requests, and 95 of 100, took at most: to the first token, "
        "in all, and in the queue.",
    ),
    as_json: bool = options.JSON,
    as_csv: bool = flag.switch("--csv", "Write CSV, for spreadsheets."),
    stored: StoreFlags,
) -> None:
    """Show what requests used and cost, and what the machines cost.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.callers.reports import parse_query
    from gateway.callers.windows import time_text

    if as_json and as_csv:
        raise typer.BadParameter("one of the two", param_hint="--json, --csv")
    asked = {"by": by, "since": since, "until": until}
    asked["limit"] = None if limit is None else str(limit)
    asked["percentiles"] = "true" if percentiles else None
    with checked_query():
        query = parse_query(time.time(), **asked)
    given = {name: value for name, value in asked.items() if value is not None}
    report, table = dict[str, Any](), ""
    with stored.open() as source:
        if not isinstance(source, AdminClient):
            read = _read(source, query, stored)
            report, table = read.to_json(), read.to_csv()
        elif as_csv:
            given["format"] = "csv"
            table = source.text("/admin/usage", given, timeout=REPORT_TIMEOUT)
        else:
            report = source.request("GET", "/admin/usage", given, timeout=REPORT_TIMEOUT)
    if as_csv:
        print(table, end="")
    elif as_json:
        print_json(report)
    else:
        _show(report)
    is_empty = table.count("\n") <= 1 if as_csv else not report["rows"]
    if is_empty:
        print_note(f"no request ended since {time_text(query.since)} (until {until or 'now'})")


def _read(store: Store, query: ReportQuery, stored: StoreFlags) -> LedgerReport:
    from gateway.callers.reports import LedgerReport, ReportInterrupted

    report = LedgerReport(query)
    with checked_query(), failing_by(ReportInterrupted):
        while not store.run_now(report.step, write=False):
            pass
    report.finish().name_keys(stored.key_names(store).get)
    return report


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
    by, rows, total = report["by"], report["rows"], report["total"]
    if rows:
        times = _PERCENTILE_COLUMNS if "wait_p95" in rows[0] else ()
        columns = (*_USAGE_COLUMNS, *times)
        by = [name for one in by for name in ((one, "key_name") if one == "key" else (one,))]
        shown = [*rows, {**total, **dict.fromkeys(name for _, name in times), by[0]: "total"}]
        cells = [
            [*(row.get(name) for name in by), *(_number(row[name]) for _, name in columns)]
            for row in shown
        ]
        titles = ("NAME" if name == "key_name" else name.upper() for name in by)
        print_table([*titles, *(title for title, _ in columns)], cells)
    if (more := report["rows_found"] - len(rows)) > 0:
        print_note(f"{more} more rows: --limit")
    print_note(*report["notes"])
    money = report["money"]
    if money["node_hours_cost"] or total["cost"]:
        _print_money(money)


def _number(value: float | None) -> str | None:
    """A number that can be read at a glance, never in powers of ten."""
    if value is None:
        return None
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.6f}".rstrip("0").rstrip(".")


def _print_money(money: dict[str, Any]) -> None:
    print(f"\nrequests were charged {_number(money['cost'])}")
    for tier, told in money["tiers"].items():
        parts = f"{_number(told['requests'])} requests, charged {_number(told['cost'])}"
        if cost := told["node_hours_cost"]:
            parts += f"; {_number(told['node_hours'])} node hours cost {_number(cost)}"
        print(f"  {tier}: {parts}")
    for name, title in (
        ("idle", "idle time of machines paid by the hour"),
        ("all_gpu", "the same requests, all on the GPU tier"),
        ("effective_per_hour", "an hour, weighted by the tiers' shares of requests"),
        ("running_per_hour", "an hour in which all machines run"),
    ):
        amount = money[name]
        value, reason = _number(amount["value"]), amount.get("reason")
        print(f"{title}: {value if reason is None else f'unknown ({reason})'}")


MOST_SHOWN = 100_000

AUDIT_EXAMPLES = examples_epilog(
    ("llama-gateway audit", "the last 100 changes, the latest first"),
    ("llama-gateway audit --since 7d --action keys", "what was done to keys this week"),
    ("llama-gateway audit --action drain --target epyc-a", "who has drained a node"),
    ("llama-gateway audit --limit 10000 --json > audit.json", "for scripts"),
)


def audit(
    *,
    since: str | None = options.since("the beginning"),
    until: str | None = options.UNTIL,
    action: str | None = flag(
        "ACTION", "Only this action, such as drain or keys.revoke; keys: all that begin so."
    ),
    target: str | None = flag("NAME", "Only what was done to this node, key or request."),
    limit: int = flag("N", "Most entries.", 100, min=1, max=MOST_SHOWN),
    as_json: bool = options.JSON,
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
            ask = partial(source.request, "GET", "/admin/audit")
            given = {name: str(one) for name, one in asdict(query).items() if one is not None}
            found, _ = read_pages(ask, given, "entries", query.limit)
        else:
            read = source.run_now(lambda connection: read_audit(connection, query), write=False)
            found = [entry.as_json() for entry in read]
    shown = found[:limit]
    nothing = "the audit log has no such entry"
    print_listing({"entries": shown}, map(_entry_row, shown), nothing, as_json=as_json)
    if len(found) > limit:
        print_note(f"there are more than {limit}: --limit, or --until {shown[-1]['at']}")


def _moment(parameter: str, text: str | None, *, end: bool = False) -> float | None:
    from gateway.callers.reports import parse_time
    from gateway.callers.windows import time_text

    if text is None:
        return None
    now = time.time()
    with checked_query():
        moment = parse_time(parameter, text, now, end=end)
    if parameter == "since" and moment > now:
        raise WrongUsage(
            f"--since: {time_text(moment)} is in the future: it is {time_text(now)} now"
        )
    return moment


def _entry_row(entry: dict[str, Any]) -> list[tuple[str, object]]:
    details = ", ".join(f"{name} {value}" for name, value in entry["details"].items())
    return [
        ("TIME", entry["at"]),
        *((name.upper(), entry[name]) for name in ("actor", "role", "action", "target", "outcome")),
        ("DETAILS", details),
    ]


PAGE_TIMEOUT = 60.0  # seconds; longer than a gateway takes for a page at most

REQUESTS_EXAMPLES = examples_epilog(
    ("llama-gateway requests", "the last 100 that ended, the latest first"),
    ("llama-gateway requests --slow --since 1d", "the slowest since midnight yesterday"),
    ("llama-gateway requests --failed --key web", "what failed of one key"),
    ("llama-gateway requests --node epyc-a --slower-than 30", "what took long on one node"),
    ("llama-gateway requests --since 7d --limit 10000 --json > week.json", "for scripts"),
    ("llama-gateway why req_6f0c3a7d12c4b1e95", "then: why one of them took so long"),
)


def requests(
    *,
    slow: bool = flag.switch("--slow", "The slowest first, not the latest."),
    slower_than: float | None = flag(
        "SECONDS", "Only what took longer, the queue included.", min=0.0
    ),
    failed: bool = flag.switch(
        "--failed", "Only what ended with an error; a client that left is none."
    ),
    outcome: str | None = flag(
        "ok|failed|left|CODE", "Only what ended so; CODE is an error's, such as queue_timeout."
    ),
    key: str | None = flag("KEY", "Only of this key: its name or id."),
    group: str | None = flag("GROUP", "Only of this group's keys."),
    user: str | None = flag("USER", "Only of this end user that a trusted key named."),
    model: str | None = flag("MODEL", "Only for this model, by its public name."),
    node: str | None = flag("NODE", "Only what ran on this node, or ran there last."),
    since: str | None = options.since("30d"),
    until: str | None = options.UNTIL,
    limit: int = flag("N", "Most requests.", 100, min=1, max=MOST_SHOWN),
    as_json: bool = options.JSON,
    stored: StoreFlags,
) -> None:
    """Show requests that have ended: when, whose, where, how long they took, and their end.

    WAIT is the time in the queue, TTFT that from arrival to the first token; SECONDS is all of it.
    What is unknown is shown as -: rows of an older version have no WAIT and TTFT, and an answer in
    one piece has no first token. What the retention of the store has summed up is not here: see
    llama-gateway usage. Texts of prompts and answers are nowhere.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.callers.ended import parse_ended_query

    if failed and outcome is not None:
        raise typer.BadParameter("one of the two", param_hint="--failed, --outcome")
    asked = {
        "order": "slowest" if slow else None,
        "slower_than": None if slower_than is None else f"{slower_than:g}",
        "outcome": "failed" if failed else outcome,
        "key": key,
        "group": group,
        "user": user,
        "model": model,
        "node": node,
        "since": since,
        "until": until,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    with checked_query():
        parse_ended_query(time.time(), given, lambda word: [word])
    with stored.open() as source:
        names = {} if isinstance(source, AdminClient) else stored.key_names(source)

        def ask(parameters: dict[str, str]) -> dict[str, Any]:
            if not isinstance(source, AdminClient):
                return _read_page(source, parameters, names)
            return source.request("GET", "/admin/requests/ended", parameters, timeout=PAGE_TIMEOUT)

        found, page = read_pages(ask, given, "requests", limit)
    nothing = f"no such request ended since {page['since']} (until {until or 'now'})"
    print_listing({**page, "requests": found}, map(_request_row, found), nothing, as_json=as_json)
    if page["next"] is not None:
        print_note(f"there are more than {limit}: --limit, or filters")
    if not page["complete"]:
        print_note(f"requests that ended before {page['since']} were not looked at: --until")


def _read_page(store: Store, parameters: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
    import msgspec

    from gateway.callers.ended import EndedReader, parse_ended_query

    def ids_of(word: str) -> list[str]:
        if word in names:
            return [word]
        return [id_ for id_, name in names.items() if name == word] or [word]

    reader = EndedReader(parse_ended_query(time.time(), parameters, ids_of))
    while not store.run_now(reader.step, write=False):
        pass
    page: dict[str, Any] = msgspec.to_builtins(reader.page(names.get))
    return page


def _request_row(row: dict[str, Any]) -> list[tuple[str, object]]:
    is_ok = row["status"] < 400 and row["outcome"] == "ok"
    return [
        ("ENDED", row["ended_at"]),
        ("SECONDS", _seconds(row["seconds"])),
        ("WAIT", _seconds(row["wait_seconds"])),
        ("TTFT", _seconds(row["ttft_seconds"])),
        ("OUTCOME", "ok" if is_ok else f"{row['status']} {row['outcome']}"),
        ("KEY", row["key_name"] or row["key"]),
        ("MODEL", row["model"]),
        ("NODE", row["node"]),
        ("PROMPT", row["prompt_tokens"]),
        ("CACHED", row["cached_tokens"]),
        ("ANSWER", row["completion_tokens"]),
        ("ID", row["id"]),
    ]


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.1f}" if value >= 0.1 or not value else f"{value:.3f}"
