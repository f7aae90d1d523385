"""`llama-gateway groups`: groups of API keys, and what the keys of each may use together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gateway.cli import options
from gateway.cli.client import NoStore
from gateway.cli.keys import (
    FIELDS,
    KeyFlags,
    PriorityChoice,
    RightFlags,
    given,
    limits_text,
    listed_models,
    tell_warnings,
    unset_fields,
    used_text,
)
from gateway.cli.options import CommandGroup, FlagGroup, Json
from gateway.cli.terminal import CommandFailed, print_json, print_note, print_rows

app = CommandGroup(
    "Groups of API keys: limits that the keys of a group share.\n\n"
    "Groups of the settings come before those of the store. While the gateway runs, they are "
    "changed through its admin API, and a change holds for the next request; else in the store.",
    ("llama-gateway groups set research --budget 200/month --tpm 100000", "make it, or change it"),
    ("llama-gateway keys create --name alice --group research", "a key of it"),
    ("llama-gateway groups list", "what each may use, and has used"),
    ("llama-gateway groups remove research", "its keys then share no limit"),
)

GroupName = Annotated[str, typer.Argument(metavar="NAME", help="The group's name.")]

_GROUP_FIELDS = {
    **{name: path for name, path in FIELDS.items() if path[0] in {"limits", "user_limits"}},
    **{name: ("limits", name) for name in ("max_class", "models")},
}


class LimitFlags(FlagGroup):
    """The limits of a group; those that are not given stay as they are."""

    max_class: PriorityChoice | None = typer.Option(
        None, metavar="|".join(PriorityChoice), help="The highest class of its keys' requests."
    )
    models: str | None = typer.Option(
        None, metavar="A,B", help="Models that its keys may use, of those that each may use."
    )
    rpm: int | None = RightFlags.rpm
    tpm: int | None = RightFlags.tpm
    tokens_per_day: int | None = RightFlags.tokens_per_day
    budget: str | None = RightFlags.budget
    concurrency: int | None = RightFlags.concurrency
    prompt_tokens: int | None = RightFlags.prompt_tokens
    completion_tokens: int | None = RightFlags.completion_tokens
    user_rpm: int | None = RightFlags.user_rpm
    user_tpm: int | None = RightFlags.user_tpm
    user_tokens_per_day: int | None = RightFlags.user_tokens_per_day
    user_budget: str | None = RightFlags.user_budget
    user_concurrency: int | None = RightFlags.user_concurrency

    def fields(self) -> dict[str, Any]:
        """Return the fields of a group that these flags set. Raises BadParameter."""
        flags = {**vars(self), "models": listed_models(None, self.models)}
        fields: dict[str, dict[str, Any]] = {"limits": {}, "user_limits": {}}
        for name, value in flags.items():
            place, field = _GROUP_FIELDS[name]
            fields[place][field] = value
        return given(fields)


@app.add("list")
@options.takes(stored=KeyFlags)
def list_(*, as_json: Json = False, stored: KeyFlags) -> None:
    """Show all groups of the settings and the store, those too that nobody has defined."""
    with stored.open() as access:
        found = access.groups()
    tell_warnings(found.get("warnings", ()))
    if as_json:
        print_json(found)
    elif found["groups"]:
        print_rows(map(_row, found["groups"]))
    else:
        print_note("there are no groups; 'llama-gateway groups set NAME' makes one")


def _row(group: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [
        ("NAME", group["name"]),
        ("ORIGIN", group["origin"]),
        ("KEYS", group["keys"]),
        ("LIMITS", limits_text(group["limits"])),
        ("USED", used_text(group["standing"], "group")),
        ("EACH END USER", limits_text(group["user_limits"])),
    ]


@app.add(
    "set",
    ("llama-gateway groups set research --rpm 600 --budget 200/month", "what its keys may use"),
    ("llama-gateway groups set research --unset rpm", "no limit of requests"),
    ("llama-gateway groups set staff", "a group without a limit"),
)
@options.takes(limits=LimitFlags, stored=KeyFlags)
def set_(
    *,
    name: GroupName,
    unset: list[str] | None = typer.Option(
        None,
        metavar="FLAG,...",
        help="Take these away: names of the flags below, such as rpm,budget; or limits, "
        "user-limits for all of them.",
    ),
    limits: LimitFlags,
    as_json: Json = False,
    stored: KeyFlags,
) -> None:
    """Make a group in the store, or change its limits: what no flag names stays as it is."""
    wanted = limits.fields()
    removed = unset_fields(unset or (), wanted, _GROUP_FIELDS)
    try:
        with stored.open() as access:
            before = _found(access.groups(), name) or {}
            fields = {
                place: {**(before.get(place) or {}), **wanted.get(place, {})}
                for place in ("limits", "user_limits", "cache")
            }
            for place, *field in removed:
                fields[place] = {
                    one: value for one, value in fields[place].items() if field and one not in field
                }
            group = access.put_group(name, {place: one for place, one in fields.items() if one})
    except NoStore:
        raise CommandFailed(
            "there is no store (store.url: off): write the group into the settings", status=2
        ) from None
    if as_json:
        print_json(group)
    else:
        users = limits_text(group["user_limits"])
        print(f"{name}: {limits_text(group['limits'])}; each end user {users}")


@app.add("remove")
@options.takes(stored=KeyFlags)
def remove(*, name: GroupName, as_json: Json = False, stored: KeyFlags) -> None:
    """Remove a group of the store. Keys that are of it share no limit then."""
    with stored.open() as access:
        group = access.remove_group(name)
    tell_warnings(group["warnings"])
    if as_json:
        print_json(group)
    else:
        print(f"{name}: removed")


def _found(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in found["groups"] if one["name"] == name), None)
