"""`llama-gateway groups`: groups of API keys, and what the keys of each may use together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

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
from gateway.cli.options import CommandGroup, FlagGroup, argument, flag
from gateway.cli.terminal import WrongUsage, print_answer, print_listing

app = CommandGroup(
    "Groups of API keys: limits that the keys of a group share.\n\n"
    "Groups of the settings come before those of the store. While the gateway runs, they are "
    "changed through its admin API, and a change holds for the next request; else in the store.",
    ("llama-gateway groups set research --budget 200/month --tpm 100000", "make it, or change it"),
    ("llama-gateway keys create --name alice --group research", "a key of it"),
    ("llama-gateway groups list", "what each may use, and has used"),
    ("llama-gateway groups remove research", "its keys then share no limit"),
)

GROUP_NAME = argument("NAME", "The group's name.")

_GROUP_FIELDS = {
    **{name: path for name, path in FIELDS.items() if path[0] in {"limits", "user_limits"}},
    **{name: ("limits", name) for name in ("max_class", "models")},
}


class LimitFlags(FlagGroup):
    """The limits of a group; those that are not given stay as they are."""

    max_class: PriorityChoice | None = flag(
        "|".join(PriorityChoice), "The highest class of its keys' requests."
    )
    models: str | None = flag("A,B", "Models that its keys may use, of those that each may use.")
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
def list_(*, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """Show all groups of the settings and the store, those too that nobody has defined."""
    with stored.open() as access:
        found = access.request("GET", "/admin/groups")
    tell_warnings(found.get("warnings", ()))
    nothing = "there are no groups; 'llama-gateway groups set NAME' makes one"
    print_listing(found, map(_row, found["groups"]), nothing, as_json=as_json)


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
def set_(
    *,
    name: str = GROUP_NAME,
    unset: list[str] | None = flag(
        "FLAG,...",
        "Take these away: names of the flags below, such as rpm,budget; or limits, "
        "user-limits for all of them.",
    ),
    limits: LimitFlags,
    as_json: bool = options.JSON,
    stored: KeyFlags,
) -> None:
    """Make a group in the store, or change its limits: what no flag names stays as it is."""
    wanted = limits.fields()
    removed = unset_fields(unset or (), wanted, _GROUP_FIELDS)
    try:
        with stored.open() as access:
            found = access.request("GET", "/admin/groups")["groups"]
            defined = {one["name"]: one for one in found}
            before = defined.get(name, {})
            fields = {
                place: {**(before.get(place) or {}), **wanted.get(place, {})}
                for place in ("limits", "user_limits", "cache")
            }
            for place, *field in removed:
                fields[place] = {
                    one: value for one, value in fields[place].items() if field and one not in field
                }
            given_fields = {place: one for place, one in fields.items() if one}
            group = access.keep("PUT", _path(name), given_fields)
    except NoStore:
        raise WrongUsage(
            "there is no store (store.url: off): write the group into the settings"
        ) from None
    own, users = limits_text(group["limits"]), limits_text(group["user_limits"])
    print_answer(group, f"{name}: {own}; each end user {users}", as_json=as_json)


@app.add("remove")
def remove(*, name: str = GROUP_NAME, as_json: bool = options.JSON, stored: KeyFlags) -> None:
    """Remove a group of the store. Keys that are of it share no limit then."""
    with stored.open() as access:
        group = access.request("DELETE", _path(name))
    tell_warnings(group["warnings"])
    print_answer(group, f"{name}: removed", as_json=as_json)


def _path(name: str) -> str:
    return f"/admin/groups/{quote(name, safe='')}"
