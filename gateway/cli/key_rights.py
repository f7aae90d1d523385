"""The flags of `llama-gateway keys` that say what a key may do, and what `keys set` changes."""

from __future__ import annotations

import enum
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

LIMITS_PANEL = "Limits"
USERS_PANEL = "End users that it names (with --trust-user-headers)"
CACHE_PANEL = "Prompt caches and privacy (unset: as its group)"
TRUST_HELP = "Its holder may name its end users by header (see identity.user_headers)."
ALL_NODES = "all"  # of `--cache-nodes`: the key is kept to no pool, whatever its group says


class PriorityChoice(enum.StrEnum):
    """The classes, highest first."""

    URGENT = "urgent"
    PREMIUM = "premium"
    NORMAL = "normal"
    BATCH = "batch"


class IsolateChoice(enum.StrEnum):
    """Whose prompts may draw a request to a node."""

    GROUP = "group"
    KEY = "key"
    OFF = "off"


_CLASSES = "|".join(PriorityChoice)


def checked_name(value: str | None) -> str | None:
    """Return the name. Raises BadParameter."""
    if value is not None and (not value.strip() or value != value.strip() or len(value) > 256):
        raise typer.BadParameter("1 to 256 characters, without white space around them")
    return value


def _checked_budget(value: str | None) -> str | None:
    if value is not None:
        from gateway.config.keys import parse_budget

        try:
            parse_budget(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return value


def _checked_expiry(value: str | None) -> str | None:
    """Return the time in the form of the settings."""
    if value is None:
        return None
    from gateway.callers.key_desk import expiry, iso_time

    try:
        at = expiry(value, time.time()).timestamp()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if at <= time.time():
        raise typer.BadParameter("is over; give a later time")
    return iso_time(at)


def _limit(flag: str, text: str, panel: str = LIMITS_PANEL) -> Any:
    return typer.Option(None, flag, min=1, metavar="N", help=text, rich_help_panel=panel)


def _budget(flag: str, text: str, panel: str = LIMITS_PANEL) -> Any:
    return typer.Option(
        None,
        flag,
        metavar="AMOUNT/month|day",
        callback=_checked_budget,
        help=text,
        rich_help_panel=panel,
    )


NewName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        callback=checked_name,
        show_default="its id",
        help="Who uses it; unique. Logs, metrics and the ledger show it.",
    ),
]


def rights_of(
    *,
    default_class: PriorityChoice | None = typer.Option(
        None,
        "--class",
        metavar=_CLASSES,
        help="The class of its requests that name none; unset: normal.",
    ),
    max_class: PriorityChoice | None = typer.Option(
        None, metavar=_CLASSES, help="The highest class it gets; unset: its --class."
    ),
    model: list[str] | None = typer.Option(
        None, metavar="NAME", help="A model that it may use; repeat it for more. Unset: all."
    ),
    models: str | None = typer.Option(
        None, metavar="A,B", help="Models that it may use, in one list."
    ),
    group: str | None = typer.Option(
        None, metavar="GROUP", help="The group whose limits it shares."
    ),
    expires: str | None = typer.Option(
        None,
        metavar="TIME",
        callback=_checked_expiry,
        help="When it ends: in 90d or 12h, or on 2027-01-31. Unset: never.",
    ),
    rpm: int | None = _limit("--rpm", "Requests within any 60 seconds."),
    tpm: int | None = _limit("--tpm", "Tokens within any 60 seconds."),
    tokens_per_day: int | None = _limit("--tokens-per-day", "Tokens in a day (UTC)."),
    budget: str | None = _budget(
        "--budget", "Money a month or day, in the currency of the nodes' costs."
    ),
    concurrency: int | None = _limit("--concurrency", "Requests at one time."),
    prompt_tokens: int | None = _limit("--prompt-tokens", "Largest prompt, in tokens."),
    completion_tokens: int | None = _limit("--completion-tokens", "Most tokens of one answer."),
    trust_user_headers: bool | None = typer.Option(
        None,
        "--trust-user-headers/--no-trust-user-headers",
        help=TRUST_HELP,
        rich_help_panel=USERS_PANEL,
    ),
    user_rpm: int | None = _limit(
        "--user-rpm", "Requests of each within any 60 seconds.", USERS_PANEL
    ),
    user_tpm: int | None = _limit(
        "--user-tpm", "Tokens of each within any 60 seconds.", USERS_PANEL
    ),
    user_tokens_per_day: int | None = _limit(
        "--user-tokens-per-day", "Tokens of each in a day.", USERS_PANEL
    ),
    user_budget: str | None = _budget(
        "--user-budget", "Money of each a month or day.", USERS_PANEL
    ),
    user_concurrency: int | None = _limit(
        "--user-concurrency", "Requests of each at one time.", USERS_PANEL
    ),
    cache_hide: bool | None = typer.Option(
        None,
        "--cache-hide/--no-cache-hide",
        help="Take the figures that tell what was cached out of its responses.",
        rich_help_panel=CACHE_PANEL,
    ),
    cache_isolate: IsolateChoice | None = typer.Option(
        None,
        metavar="|".join(IsolateChoice),
        help="Whose prompts may draw its requests to the node that has them cached.",
        rich_help_panel=CACHE_PANEL,
    ),
    cache_nodes: str | None = typer.Option(
        None,
        metavar="LABEL=VALUE,...",
        help=f"Labels of the nodes that it may use, and no other; {ALL_NODES}: every node.",
        rich_help_panel=CACHE_PANEL,
    ),
    prompt_cache: bool | None = typer.Option(
        None,
        "--prompt-cache/--no-prompt-cache",
        help="Whether nodes may serve its prompts from their caches; without, each is read anew.",
        rich_help_panel=CACHE_PANEL,
    ),
) -> dict[str, Any]:
    """Return the fields of a key that these flags set. Raises BadParameter."""
    return given(
        {
            "class": default_class,
            "max_class": max_class,
            "models": listed_models(model, models),
            "trust_user_headers": trust_user_headers,
            "group": group,
            "expires": expires,
            "limits": {
                "rpm": rpm,
                "tpm": tpm,
                "tokens_per_day": tokens_per_day,
                "budget": budget,
                "concurrency": concurrency,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
            },
            "user_limits": {
                "rpm": user_rpm,
                "tpm": user_tpm,
                "tokens_per_day": user_tokens_per_day,
                "budget": user_budget,
                "concurrency": user_concurrency,
            },
            "cache": {
                "hide": cache_hide,
                "isolate": cache_isolate,
                "nodes": node_labels(cache_nodes),
                "prompt_cache": prompt_cache,
            },
        }
    )


def takes_rights(**instead: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `rights_of` in place of its parameter `rights`.

    `instead`: the flags that this command has in another form.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [
            one.replace(default=instead.get(one.name, one.default))
            for one in inspect.signature(rights_of, eval_str=True).parameters.values()
        ]

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            rights = rights_of(**{flag.name: values.pop(flag.name) for flag in flags})
            command(rights=rights, **values)

        own = inspect.signature(command, eval_str=True)
        parameters = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own.parameters.values()
            for one in (flags if parameter.name == "rights" else [parameter])
        ]
        with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_flags

    return decorate


def listed_models(repeated: list[str] | None, listed: str | None) -> list[str] | None:
    """Return the models of both flags. Raises BadParameter."""
    names = [*(repeated or ()), *(listed.split(",") if listed is not None else ())]
    found = list(dict.fromkeys(name.strip() for name in names))
    if listed is not None and not all(found):
        raise typer.BadParameter("write names with commas between them", param_hint="--models")
    return found or None


def node_labels(text: str | None) -> dict[str, str] | None:
    """Return the labels of `--cache-nodes`; empty: every node. Raises BadParameter."""
    if text is None:
        return None
    labels: dict[str, str] = {}
    if text.strip() == ALL_NODES:
        return labels
    for part in text.split(","):
        name, is_pair, value = (word.strip() for word in part.partition("="))
        if not (name and is_pair and value) or name in labels:
            raise typer.BadParameter(
                f"write labels as tenant=a,zone=b, each once; or {ALL_NODES}",
                param_hint="--cache-nodes",
            )
        labels[name] = value
    return labels


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that flags have set, with plain values; a group of none is left out."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _GROUPS:
            if inner := given(value):
                found[name] = inner
        elif value is not None:
            found[name] = value.value if isinstance(value, enum.Enum) else value
    return found


_GROUPS = frozenset({"limits", "user_limits", "cache"})
_LIMITS = ("rpm", "tpm", "tokens_per_day", "budget", "concurrency")

# Where each of the things that `--unset` takes away is in a key.
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("class", "max_class", "models", "group", "expires")},
    **{name: ("limits", name) for name in (*_LIMITS, "prompt_tokens", "completion_tokens")},
    **{f"user_{name}": ("user_limits", name) for name in _LIMITS},
    **{f"cache_{name}": ("cache", name) for name in ("hide", "isolate", "nodes")},
    "prompt_cache": ("cache", "prompt_cache"),
    **{name: (name,) for name in sorted(_GROUPS)},
}


def unset_fields(words: Iterable[str], wanted: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields that `--unset` names. Raises BadParameter, also if `wanted` sets one."""
    found: list[tuple[str, ...]] = []
    for word in (part.strip() for one in words for part in one.split(",")):
        path = FIELDS.get(word.removeprefix("--").replace("-", "_"))
        if path is None:
            known = ", ".join(name.replace("_", "-") for name in FIELDS)
            raise typer.BadParameter(
                f"there is no '{word}': it takes {known}", param_hint="--unset"
            )
        inner = wanted.get(path[0])
        if inner is not None and (len(path) == 1 or path[1] in inner):
            raise typer.BadParameter(
                f"'{word}' is set by another flag: give one of them", param_hint="--unset"
            )
        found.append(path)
    return found


def patch_of(
    before: Mapping[str, Any], wanted: Mapping[str, Any], removed: Iterable[tuple[str, ...]]
) -> dict[str, Any]:
    """Return the JSON merge patch that makes these changes to the key `before`."""
    patch: dict[str, Any] = {
        name: dict(value) if name in _GROUPS else value for name, value in wanted.items()
    }
    for path in removed:
        if len(path) == 1:
            patch[path[0]] = None
        elif patch.setdefault(path[0], {}) is not None:
            patch[path[0]][path[1]] = None
    for name in _GROUPS & patch.keys():
        if patch[name] is None:
            continue
        old = dict(before.get(name) or {})
        if all(value is None for value in {**old, **patch[name]}.values()):
            # Nothing is left. Limits of end users that are none would hide the group's.
            patch[name] = None
    labels = (patch.get("cache") or {}).get("nodes")
    if labels is not None:
        # A patch is merged with the old labels: those that are not named must go.
        old = (before.get("cache") or {}).get("nodes") or {}
        patch["cache"]["nodes"] = {**dict.fromkeys(old), **labels}
    return patch
