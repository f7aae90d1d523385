"""`llama-gateway requests`: what has ended, by the running gateway or from its store alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.client import AdminClient, StoreFlags
from gateway.cli.options import examples_epilog
from gateway.cli.terminal import CommandFailed, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.store.store import Store

MOST_SHOWN = 100_000
PAGE = 1000  # requests of one response of the admin API
TIMEOUT = 60.0  # seconds; longer than a gateway takes for a page at most

EXAMPLES = examples_epilog(
    ("llama-gateway requests", "the last 100 that ended, the latest first"),
    ("llama-gateway requests --slow --since 1d", "the slowest since midnight yesterday"),
    ("llama-gateway requests --failed --key web", "what failed of one key"),
    ("llama-gateway requests --node epyc-a --slower-than 30", "what took long on one node"),
    ("llama-gateway requests --since 7d --limit 10000 --json > week.json", "for scripts"),
    ("llama-gateway why req_6f0c3a7d12c4b1e95", "then: why one of them took so long"),
)

Json = dict[str, Any]


@options.takes(stored=StoreFlags)
def requests(
    *,
    slow: bool = typer.Option(False, "--slow", help="The slowest first, not the latest."),
    slower_than: float | None = typer.Option(
        None, metavar="SECONDS", min=0.0, help="Only what took longer, the queue included."
    ),
    failed: bool = typer.Option(
        False, "--failed", help="Only what ended with an error; a client that left is none."
    ),
    outcome: str | None = typer.Option(
        None,
        metavar="ok|failed|left|CODE",
        help="Only what ended so; CODE is an error's, such as queue_timeout.",
    ),
    key: str | None = typer.Option(None, metavar="KEY", help="Only of this key: its name or id."),
    group: str | None = typer.Option(None, metavar="GROUP", help="Only of this group's keys."),
    user: str | None = typer.Option(
        None, metavar="USER", help="Only of this end user that a trusted key named."
    ),
    model: str | None = typer.Option(
        None, metavar="MODEL", help="Only for this model, by its public name."
    ),
    node: str | None = typer.Option(
        None, metavar="NODE", help="Only what ran on this node, or ran there last."
    ),
    since: str | None = options.since(None, "30d"),
    until: options.Until = None,
    limit: int = typer.Option(100, min=1, max=MOST_SHOWN, metavar="N", help="Most requests."),
    as_json: options.Json = False,
    stored: StoreFlags,
) -> None:
    """Show requests that have ended: when, whose, where, how long they took, and their end.

    WAIT is the time in the queue, TTFT that from arrival to the first token; SECONDS is all of it.
    What is unknown is shown as -: rows of an older version have no WAIT and TTFT, and an answer in
    one piece has no first token. What the retention of the store has summed up is not here: see
    llama-gateway usage. Texts of prompts and answers are nowhere.

    Asks the running gateway, else reads the store that the settings name.
    """
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
    _check(given)
    with stored.open() as source:
        if isinstance(source, AdminClient):
            found, page = _all(lambda parameters: _asked(source, parameters), given, limit)
        else:
            names = stored.key_names(source)
            found, page = _all(lambda parameters: _read(source, parameters, names), given, limit)
    if as_json:
        print_json({**page, "requests": found})
    elif found:
        print_table(_COLUMNS, map(_cells, found))
    else:
        print_note(f"no such request ended since {page['since']} (until {until or 'now'})")
    if page["next"] is not None:
        print_note(f"there are more than {limit}: --limit, or filters")
    if not page["complete"]:
        print_note(f"requests that ended before {page['since']} were not looked at: --until")


def _check(given: dict[str, str]) -> None:
    """Raises: CommandFailed, for what no gateway could answer."""
    from gateway.callers.ended import parse_ended_query
    from gateway.callers.reports import InvalidQuery

    try:
        parse_ended_query(time.time(), given, lambda word: [word])
    except InvalidQuery as error:
        flag = "--" + error.parameter.replace("_", "-")
        raise CommandFailed(f"{flag}: {error}", status=2) from None


def _all(
    ask: Callable[[dict[str, str]], Json], given: dict[str, str], limit: int
) -> tuple[list[Json], Json]:
    """As many requests as are wanted, asked for page by page, and the last page."""
    parameters, found = dict(given), list[Json]()
    while True:
        parameters["limit"] = str(min(PAGE, limit - len(found)))
        page = ask(parameters)
        found += page["requests"]
        if len(found) >= limit or page["next"] is None:
            return found, page
        parameters["before"] = page["next"]


def _asked(admin: AdminClient, parameters: dict[str, str]) -> Json:
    return admin.request("GET", "/admin/requests/ended", parameters, timeout=TIMEOUT)


def _read(store: Store, parameters: dict[str, str], names: dict[str, str]) -> Json:
    import msgspec

    from gateway.callers.ended import EndedReader, parse_ended_query

    def ids_of(word: str) -> list[str]:
        if word in names:
            return [word]
        return [id_ for id_, name in names.items() if name == word] or [word]

    reader = EndedReader(parse_ended_query(time.time(), parameters, ids_of))
    while not store.run_now(reader.step, write=False):
        pass
    page: Json = msgspec.to_builtins(reader.page(names.get))
    return page


_COLUMNS = (
    *("ENDED", "SECONDS", "WAIT", "TTFT", "OUTCOME", "KEY", "MODEL", "NODE"),
    *("PROMPT", "CACHED", "ANSWER", "ID"),
)


def _cells(row: Json) -> list[object]:
    outcome = row["outcome"]
    if row["status"] >= 400 or outcome != "ok":
        outcome = f"{row['status']} {outcome}"
    return [
        row["ended_at"],
        *(_seconds(row[name]) for name in ("seconds", "wait_seconds", "ttft_seconds")),
        outcome,
        row["key_name"] or row["key"],
        row["model"],
        row["node"],
        *(row[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")),
        row["id"],
    ]


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.1f}" if value >= 0.1 or not value else f"{value:.3f}"
