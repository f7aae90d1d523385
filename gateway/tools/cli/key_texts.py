"""How `llama-gateway keys` shows keys: tables, lines for the settings, and a new secret, once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gateway.tools.cli.terminal import format_cell, print_json, print_note

if TYPE_CHECKING:
    from gateway.access.keys import ApiKey

KEY_COLUMNS = ("NAME", "ID", "SOURCE", "STATE", "CLASS", "GROUP", "MODELS", "LIMITS", "EXPIRES")


def key_row(key: Mapping[str, Any]) -> list[object]:
    """Return the cells of a key, for `KEY_COLUMNS`."""
    get = key.get
    classes = [word for word in (get("class"), get("max_class")) if word]
    return [
        get("name"),
        get("id"),
        get("source"),
        get("state"),
        " to ".join(dict.fromkeys(classes)),
        get("group"),
        get("models"),
        limits_text(get("limits")),
        get("expires"),
    ]


def limits_text(limits: object) -> str:
    """Write limits in one line; `-` for none."""
    if not isinstance(limits, Mapping):
        return "-"
    given = [
        f"{format_cell(name)} {format_cell(value)}"
        for name, value in limits.items()
        if value is not None
    ]
    return ", ".join(given) or "-"


def called(key: Mapping[str, Any]) -> str:
    """Name a key for people."""
    name, key_id = format_cell(key.get("name")), format_cell(key.get("id"))
    return name if name == key_id else f"{name} (id {key_id})"


def show_new(key: ApiKey, shown: Mapping[str, Any], *, as_json: bool) -> None:
    """Show a new secret, this once."""
    if as_json:
        print_json({"key": key.text, **shown})
        return
    print(f"The key, shown only now:\n\n  {key.text}\n")
    print(rights_text(shown))


def rights_text(shown: Mapping[str, Any]) -> str:
    """Write a key's rights and limits in one line."""
    parts = [f"at most class {format_cell(shown.get('max_class'))}"]
    parts += [
        f"{field} {format_cell(shown[field])}" for field in ("models", "group") if shown.get(field)
    ]
    if (limits := limits_text(shown.get("limits"))) != "-":
        parts.append(limits)
    if (of_users := limits_text(shown.get("user_limits"))) != "-":
        parts.append(f"each end user {of_users}")
    if (cache := cache_text(shown.get("cache"))) != "-":
        parts.append(f"cache: {cache}")
    if shown.get("expires"):
        parts.append(f"until {format_cell(shown['expires'])}")
    if shown.get("previous_until"):
        parts.append(f"the old secret works until {format_cell(shown['previous_until'])}")
    return f"{called(shown)}: {'; '.join(parts)}"


def cache_text(cache: object) -> str:
    """Write what a key says of prompt caches in one line; `-` for nothing."""
    if not isinstance(cache, Mapping):
        return "-"
    words = {
        name: {True: "yes", False: "no"}.get(value, value)
        for name, value in cache.items()
        if not isinstance(value, Mapping)
    }
    nodes = cache.get("nodes")
    if isinstance(nodes, Mapping):
        pool = ",".join(
            f"{format_cell(name)}={format_cell(value)}" for name, value in nodes.items()
        )
        words["nodes"] = pool or "all"
    return limits_text(words)


def tell_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        print_note(f"warning: {warning}")


def show_entry(key: ApiKey, rights: Mapping[str, Any], *, shown: bool, as_json: bool) -> None:
    """Show the entry of a key for the settings; `shown`: and the key itself, this once."""
    entry = {"id": key.id, "sha256": key.sha256, **rights}
    if as_json:
        print_json({"key": key.text, **entry} if shown else entry)
        return
    if shown:
        print(f"The key, shown only now:\n\n  {key.text}\n")
    print("For config/gateway.yaml:\n\nkeys:")
    from gateway.config.errors import escape_json

    # Any JSON string is a YAML string.
    lines = [
        f"{name}: {escape_json(json.dumps(value, ensure_ascii=False))}"
        for name, value in entry.items()
    ]
    print("  - " + "\n    ".join(lines))
