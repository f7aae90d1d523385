"""`llama-gateway why`: explains where a request went and why, by the admin API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gateway.cli import options
from gateway.cli.client import AdminFlags
from gateway.cli.options import argument, examples_epilog
from gateway.cli.terminal import caller_text, console, format_cell, make_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = examples_epilog(
    ("llama-gateway why req_6f0c3a7d12c4b1e95", "by the id in GET /admin/requests"),
    ("llama-gateway why my-request-7", "by the X-Request-ID of its response, or in the log"),
    ("llama-gateway why my-request-7 --json | jq '.requests[0].decisions'", "for scripts"),
)


def why(
    *,
    request_id: str = argument(
        "REQUEST_ID", "The gateway's id of the request, or the X-Request-ID of its response."
    ),
    gateway: AdminFlags,
    as_json: bool = options.JSON,
) -> None:
    """Explain a request: the nodes that were considered, and what each was expected to take.

    Shows what was chosen and why, what came of it beside the prediction, and of a request that
    waits or was refused the place in the queue or the reason. The running gateway remembers its
    last few thousand decisions, without any text of prompts and responses. Of an older request it
    tells what the ledger keeps, and what is no longer known. Where several requests have the same
    X-Request-ID, the newest is first. llama-gateway requests lists them. Needs the role operator.
    """
    with gateway.connect() as admin:
        found = admin.explanation(request_id)
    if as_json:
        print_json(found)
        return
    for part in explained(found):
        if isinstance(part, str):
            print(part)
        else:
            console().print(part)


Json = dict[str, Any]

_NODE_COLUMNS = (
    *("NODE", "EXPECTED", "QUEUE", "READING", "CACHED", "WRITING"),
    *("NEIGHBOURS", "DOUBT", "SLOTS", "NOTE"),
)

_WAITING_COLUMNS = ("NODE", "STATE", "SLOTS", "FREE IN", "CACHED", "EXPECTED")
_OUTCOME_COLUMNS = ("", "PREDICTED", "ACTUAL")
LEGEND = """\
EXPECTED is the sum of the seconds behind it; the node with the least is chosen.
QUEUE       other prompts that the node has to read first
READING     of what is not CACHED (tokens of the prompt)
WRITING     of the answer, alone
NEIGHBOURS  what this request and those that run there cost each other
DOUBT       failures and trials; below 0 for the node of the session's last request\
"""

_REASONS = {
    "slower": "had room and were slower",
    "full": "full",
    "paused": "asked for less work",
    "failed": "had failed it",
    "excluded": "can't hold it or refused it",
    "not_candidates": "no candidates (other model, endpoint, pool or tier)",
}


def explained(found: Json) -> Iterator[str | Table]:
    """The lines and tables that explain the requests of `GET /admin/requests/{id}/why`."""
    requests = [one for one in found.get("requests", ()) if isinstance(one, dict)]
    for number, request in enumerate(requests):
        if number:
            yield ""
        yield from _request(request)
    if any(one.get("nodes") for request in requests for one in request.get("decisions", ())):
        yield ""
        yield from LEGEND.splitlines()


def _request(request: Json) -> Iterator[str | Table]:
    name, own = format_cell(request.get("request_id")), format_cell(request.get("id"))
    title = name if name == own else f"{name} ({own})"
    yield f"{title}: {_state(request)}"
    labels = {"path": "", "model": "model ", "class": "class ", "caller": "caller "}
    facts = [
        label + (caller_text(request) if key == "caller" else format_cell(request[key]))
        for key, label in (labels | {"received_at": "came "}).items()
        if request.get(key) is not None
    ]
    if facts:
        yield "  " + ", ".join(facts)
    yield f"  {format_cell(request.get('summary'))}"
    decisions = request.get("decisions", [])
    waiting = request.get("waiting")
    for decision in decisions:
        yield from _decision(decision, alone=len(decisions) == 1)
    if waiting is not None and waiting["nodes"]:
        yield ""
        yield f"It waits for these nodes ({waiting['nodes_alive']} in all), as they are now:"
        yield make_table(_WAITING_COLUMNS, map(_waiting_row, waiting["nodes"]), state_column=1)
    if request.get("unknown"):
        yield "  no longer known: " + "; ".join(map(format_cell, request["unknown"]))
    if request.get("parts"):
        yield "  parts: " + ", ".join(map(format_cell, request["parts"]))


def _state(request: Json) -> str:
    text, seconds = format_cell(request.get("state")), request.get("seconds")
    outcome = request.get("outcome")
    if outcome is not None:
        reason = f" {format_cell(outcome['reason'])}" if outcome["reason"] else ""
        text += f", {outcome['status']}{reason}"
    if seconds is not None:
        text += f" {'after' if outcome is not None else 'for'} {_seconds(seconds)}"
    return text


def _decision(decision: Json, *, alone: bool) -> Iterator[str | Table]:
    """One decision; one that stands `alone` has been told in the request's summary."""
    after = f"{_seconds(decision['seconds'])} after it came"
    is_granted = decision["kind"] == "granted"
    yield ""
    if is_granted:
        yield f"attempt {decision['attempt']}, {after}: {format_cell(decision['node'])}"
    else:
        yield f"{format_cell(decision['kind'])}, {after}"
    if not alone:
        yield f"  {format_cell(decision['summary'])}"
    if not is_granted:
        return
    prompt = decision["predicted"]["prompt_tokens"]
    yield make_table(_NODE_COLUMNS, [_node_row(one, prompt) for one in decision["nodes"]])
    left = [
        f"{count} {_REASONS.get(reason, format_cell(reason))}"
        for reason, count in decision["not_listed"].items()
    ]
    if left:
        yield f"not listed: {', '.join(left)}"
    yield ""
    yield make_table(_OUTCOME_COLUMNS, _outcome_rows(decision))


def _node_row(node: Json, prompt: int) -> list[object]:
    terms = node["terms"]
    chosen = "chosen" if node["chosen"] else ""
    guess = "" if node["measured"] else "a guess: its speed is not measured"
    return [
        node["name"],
        _seconds(node["expected_seconds"]),
        *(_seconds(terms[name]) for name in ("queue", "reading")),
        f"{node['cached_tokens']} of {prompt}",
        *(_seconds(terms[name]) for name in ("writing", "neighbours", "doubt")),
        _slots(node, node.get("pool_used", 0), node.get("pool_tokens")),
        "; ".join(filter(None, (chosen, *node["doubts"], guess))),
    ]


def _slots(node: Json, used: int, tokens: int | None) -> str:
    """Busy slots of all; and, where they share a pool of tokens, used ones of all."""
    slots = f"{node['slots_busy']}/{node['slots_total']}"
    return f"{slots}, {used}/{tokens} tokens" if tokens else slots


def _waiting_row(node: Json) -> list[object]:
    pool = node.get("pool") or {}
    used = pool.get("reserved", 0) + pool.get("foreign", 0)
    return [
        node["name"],
        node["state"],
        _slots(node, used, pool.get("tokens")),
        _seconds(node["free_in"]),
        node["cached_tokens"],
        _seconds(node["expected_seconds"]),
    ]


def _outcome_rows(decision: Json) -> Iterator[list[object]]:
    predicted, actual = decision["predicted"], decision["actual"]
    outcome = "runs" if actual["outcome"] is None else actual["outcome"]
    yield ["first token", _seconds(predicted["ttft"]), _seconds(actual["ttft"])]
    yield ["end", _seconds(predicted["seconds"]), f"{_seconds(actual['seconds'])}, {outcome}"]
    for key, name in (
        ("prompt_tokens", "prompt tokens"),
        ("cached_tokens", "of them cached"),
        ("completion_tokens", "answer tokens"),
    ):
        yield [name, predicted[key], actual[key]]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if abs(value) >= 0.1 or not value else f"{value:.3f} s"
