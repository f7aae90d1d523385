"""`llama-gateway models`: the public model names; pauses and resumes them by the admin API."""

from __future__ import annotations

import enum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.tools.cli import options
from gateway.tools.cli.client import connect_admin
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import format_cell, print_json, print_note, print_table

EXAMPLES = examples_epilog(
    ("llama-gateway models", "every public name, its nodes, and whether it is paused"),
    ("llama-gateway models pause mistral-7b", "no new requests for it: 503 with Retry-After"),
    ("llama-gateway models resume mistral-7b", "requests for it again"),
    ("llama-gateway models --json | jq -r '.models[] | select(.paused) | .name'", "for scripts"),
)

_COLUMNS = ("NAME", "STATE", "NODES", "SLOTS", "WAITING", "STANDS FOR")


class ModelAction(enum.StrEnum):
    """The actions of the command."""

    LIST = "list"
    PAUSE = "pause"
    RESUME = "resume"


def models(
    action: Annotated[
        ModelAction, typer.Argument(metavar="|".join(ModelAction), help="What to do.")
    ] = ModelAction.LIST,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The public name; needed for all but list."),
    ] = None,
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
    admin_ca: options.AdminCa = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Show the models of the running gateway; pause or resume one.

    Requests for a paused name get 503 model_paused with Retry-After, and those that wait for it
    too; what runs ends by itself, and lines of batches wait. An alias of which every model is
    paused is paused as well; others of its models go on. A pause lasts over restarts of the
    gateway, until it is resumed. Paused models stay in /v1/models.
    """
    if (name is None) != (action is ModelAction.LIST):
        need = "takes no model's name" if action is ModelAction.LIST else "needs a model's name"
        raise typer.BadParameter(f"{action.value} {need}", param_hint="NAME")
    with connect_admin(admin_url, admin_key_file, config, ca=admin_ca) as admin:
        if name is None:
            _list(admin.request("GET", "/admin/models"), as_json=as_json)
            return
        model = admin.request("POST", f"/admin/models/{quote(name, safe='')}/{action.value}")
    if as_json:
        print_json(model)
        return
    print(f"{format_cell(name)}: {_state(model)}")
    if action is ModelAction.RESUME and model.get("paused"):
        print_note("note: every model that it stands for is paused: resume one of them")


def _list(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    shown = [one for one in found.get("models", ()) if isinstance(one, dict)]
    if not shown:
        print_note("no node has said yet what it serves")
        return
    print_table(_COLUMNS, map(_row, shown))
    told = dict.fromkeys(difference for one in shown for difference in one["differences"])
    for difference in told:
        print_note(f"warning: nodes of one model differ: {difference}")


def _row(model: dict[str, Any]) -> list[object]:
    return [
        model["name"],
        _state(model),
        ", ".join(f"{count} {state}" for state, count in model["nodes"].items()),
        f"{model['slots_busy']}/{model['slots_total']}",
        model["waiting"],
        model["stands_for"],
    ]


def _state(model: dict[str, Any]) -> str:
    if model["paused"]:
        return "paused"
    up = sum(model["nodes"].get(state, 0) for state in ("ready", "degraded", "mute", "sleeping"))
    return "served" if up else "no node"
