"""`llama-gateway audit`: who has changed what, from the audit log."""

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
    from gateway.observe.audit import AuditQuery

MOST_SHOWN = 100_000

PAGE = 1000
"""Entries of one response of the admin API."""

COLUMNS = ("TIME", "ACTOR", "ROLE", "ACTION", "TARGET", "OUTCOME", "DETAILS")

EXAMPLES = examples_epilog(
    ("llama-gateway audit", "the last 100 changes, the latest first"),
    ("llama-gateway audit --since 7d --action keys", "what was done to keys this week"),
    ("llama-gateway audit --action drain --target epyc-a", "who has drained a node"),
    ("llama-gateway audit --limit 10000 --json > audit.json", "for scripts"),
)


def audit(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            show_default="the beginning",
            help="A date, a time of RFC 3339, or how long ago (7d, 12h); UTC.",
        ),
    ] = None,
    until: options.Until = None,
    action: Annotated[
        str | None,
        typer.Option(
            "--action",
            metavar="ACTION",
            help="Only this action, such as drain or keys.revoke; keys: all that begin so.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="NAME", help="Only what was done to this node, key or request."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MOST_SHOWN, metavar="N", help="Most entries.")
    ] = 100,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
) -> None:
    """Show who has changed what, and what was refused, the latest first.

    Asks the running gateway, else reads the store that the settings name.
    """
    from gateway.observe.audit import AuditQuery, read_audit

    query = AuditQuery(
        since=_moment("since", since),
        until=_moment("until", until, end=True),
        action=action,
        target=target,
        limit=limit + 1,
    )
    with gateway_or_store(admin_url, admin_key_file, config) as source:
        if isinstance(source, AdminClient):
            found = _asked(source, query)
        else:
            read = source.run_now(lambda connection: read_audit(connection, query), write=False)
            found = [entry.as_json() for entry in read]
    shown = found[:limit]
    if as_json:
        print_json({"entries": shown})
    elif shown:
        print_table(COLUMNS, map(_cells, shown))
    else:
        print_note("the audit log has no such entry")
    if len(found) > limit:
        print_note(f"there are more than {limit}: --limit, or --until {shown[-1]['at']}")


def _moment(parameter: str, text: str | None, *, end: bool = False) -> float | None:
    from gateway.usage.reports import InvalidQuery, parse_time
    from gateway.usage.windows import time_text

    if text is None:
        return None
    now = time.time()
    try:
        moment = parse_time(parameter, text, now, end=end)
    except InvalidQuery as error:
        raise CommandFailed(f"--{parameter}: {error}", status=2) from None
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
