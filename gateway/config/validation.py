"""Validates a YAML tree against a model; every problem names the file's own line and key."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.config.errors import Problem
from gateway.config.fields import ConfigModel, description_of
from gateway.config.yaml_file import (
    YamlDocument,
    YamlEntry,
    YamlList,
    YamlMapping,
    YamlScalar,
    to_plain,
)

ModelT = TypeVar("ModelT", bound=ConfigModel)

# Problems of one mapping that are reported.
MOST_PROBLEMS = 200

_BOUNDS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})

_MESSAGES = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "frozen_set_type": "must be a list",
}


def validate(
    model: type[ModelT], source: YamlDocument, entry: YamlEntry, env: Mapping[str, str]
) -> tuple[ModelT | None, list[Problem]]:
    """Build a model from an entry's mapping; None where it has problems.

    Relative paths start in the file's folder; `env` holds the variables that keys are read from.
    """
    context = {"folder": source.file.parent, "env": env}
    data = to_plain(entry.tree)
    try:
        return model.model_validate(data, context=context, by_alias=True, by_name=False), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # `name: ${N}` with N=42: the value became a number, but this key needs its text.
    wanted = [error["loc"] for error in errors if _wants_text(error, entry)]
    if wanted:
        for loc in wanted:
            _put(data, loc, _find(entry, loc))
        try:
            return model.model_validate(data, context=context, by_alias=True, by_name=False), []
        except ValidationError as error:
            errors = error.errors(include_url=False)
    return None, [_problem(error, model, source.file, entry) for error in errors[:MOST_PROBLEMS]]


def unknown_key_remedy(key: str, known: Iterable[str]) -> str:
    """Name the key that was probably meant, and the allowed ones."""
    known = sorted(known)
    question = _did_you_mean(key, known)
    return f"{question} Allowed: {', '.join(known)}" if question else f"allowed: {', '.join(known)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    by_small = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_small, n=1)
    return f"did you mean {by_small[near[0]]}?" if near else ""


def first_of_each_place(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems by line, and keep the first one of each place.

    A value that could not be read (its variable is missing) comes first; what validation reports
    for the same key on the same line follows from it.
    """
    first: dict[tuple[int, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.line, problem.key), problem)
    return sorted(first.values(), key=lambda problem: problem.line)


def find_duplicates(
    source: YamlDocument, items: Iterable[YamlEntry], key: str, noun: str
) -> list[Problem]:
    """Report list items that share the value of a key which must be unique, with both lines."""
    problems = []
    first: dict[str, YamlEntry] = {}
    for item in items:
        entry = item.tree.entries.get(key) if isinstance(item.tree, YamlMapping) else None
        if (
            entry is None
            or not isinstance(entry.tree, YamlScalar)
            or entry.tree.value in {None, ""}
        ):
            continue
        value = entry.tree.raw_text or str(entry.tree.value)
        other = first.get(value)
        if other is None:
            first[value] = entry
            continue
        # By an alias, both items have the same entry: then only the item has its own place.
        place = item if other is entry else entry
        message = f"{noun} in line {other.line} has this {key} already"
        remedy = f"give each its own {key}"
        problems.append(Problem(source.file, place.line, place.key, message, remedy))
    return problems


def _find(entry: YamlEntry, loc: Iterable[str | int]) -> YamlEntry:
    """Follow pydantic's location as far as the file has it; parts that name a type are skipped."""
    for part in loc:
        match entry.tree, part:
            case YamlMapping(entries=entries), str() if part in entries:
                entry = entries[part]
            case YamlList(entries=items), int() if part < len(items):
                entry = items[part]
    return entry


def _wants_text(error: ErrorDetails, entry: YamlEntry) -> bool:
    if error["type"] != "string_type":
        return False
    tree = _find(entry, error["loc"]).tree
    return isinstance(tree, YamlScalar) and tree.raw_text is not None


def _put(data: Any, loc: tuple[str | int, ...], entry: YamlEntry) -> None:
    for part in loc[:-1]:
        # A list that stands for a mapping (`start: [...]`) lacks the key that the location names.
        if not (isinstance(data, list) and isinstance(part, str)):
            data = data[part]
    if isinstance(entry.tree, YamlScalar):
        data[loc[-1]] = entry.tree.raw_text


def _problem(
    error: ErrorDetails, model: type[ConfigModel], file: Path, entry: YamlEntry
) -> Problem:
    loc = error["loc"]
    if blamed := error.get("ctx", {}).get("key"):
        loc = (*loc[:-1], blamed)
    found = _find(entry, loc)
    parent = model_at_path(model, loc[:-1]) or model
    key = found.key
    if found is _find(entry, loc[:-1]) and loc and loc[-1] in keys_of(parent):
        # The file lacks this key: it is required, or its default does not fit the other keys.
        key = f"{key}.{loc[-1]}" if key else str(loc[-1])
    message, remedy = error_words(error, parent, loc)
    return Problem(file, found.line, key, message, remedy)


def error_words(
    error: ErrorDetails, parent: type[ConfigModel], loc: Sequence[str | int]
) -> tuple[str, str]:
    """What is wrong and the remedy; `parent` is the model that has the last key of `loc`."""
    context, kind = error.get("ctx", {}), error["type"]
    message, remedy = _MESSAGES.get(kind, ""), ""
    if kind == "config":
        message, remedy = context["message"], context["remedy"]
    elif kind == "missing":
        remedy = _add_remedy(str(loc[-1]), parent)
    elif kind == "extra_forbidden":
        message = "unknown key"
        remedy = _move_remedy(str(loc[-1]), parent) or unknown_key_remedy(
            str(loc[-1]), keys_of(parent)
        )
    elif kind == "literal_error":
        message, remedy = _literal(context["expected"], error["input"])
    elif kind == "string_type" and isinstance(error["input"], (bool, int, float)):
        message, remedy = _MESSAGES[kind], "put it in quotes"
    elif not message:
        # pydantic's words for bounds and lengths: "Input should be greater than 0".
        message = error["msg"].replace("Input should", "must").replace("String should", "must")
        message = message[0].lower() + message[1:]
        if kind in _BOUNDS and isinstance(error["input"], (int, float)):
            remedy = f"it is {error['input']}"
    return message, remedy


def _add_remedy(key: str, model: type[ConfigModel]) -> str:
    """Write the remedy for a missing key."""
    field = keys_of(model).get(key)
    if field is None:
        return "add it"
    if field.examples:
        return f"add it, such as {key}: {field.examples[0]}"
    meaning = meaning_of(model, key)
    return f"add it: {meaning}" if meaning else "add it"


def _move_remedy(key: str, model: type[ConfigModel]) -> str:
    """Name the place of a key that is unknown here; empty: no mapping nearby has it."""
    if key in model.misplaced_keys:
        return model.misplaced_keys[key]
    sections = [
        name
        for name, field in keys_of(model).items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, ConfigModel)
        and key in keys_of(field.annotation)
    ]
    return f"it is a key of {' and of '.join(sections)}: indent it below" if sections else ""


def _literal(expected: str, value: object) -> tuple[str, str]:
    allowed = expected.replace("'", "")
    names = allowed.replace(" or ", ", ").split(", ")
    message = f"must be {allowed}" if len(names) == 1 else f"must be one of: {', '.join(names)}"
    return message, _did_you_mean(str(value), names)


def keys_of(model: type[ConfigModel]) -> dict[str, FieldInfo]:
    """Return the fields of a mapping by the keys that the file uses."""
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else name: field
        for name, field in model.model_fields.items()
        if not field.exclude
    }


def meaning_of(model: type[ConfigModel], key: str) -> str:
    """What a key of the file means; empty: nothing tells."""
    name = next(
        (name for name, field in model.model_fields.items() if field.validation_alias == key), key
    )
    return description_of(model, name)


def nested_model(annotation: Any) -> type[ConfigModel] | None:
    """Find the model in a type: the type itself, or that of its items or values."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        parts = parts[:1]
    elif origin not in {Union, types.UnionType, tuple} and len(parts) == 2:  # a mapping
        parts = parts[1:]
    for part in parts:
        if (found := nested_model(part)) is not None:
            return found
    return None


def models_below(model: type[ConfigModel]) -> list[type[ConfigModel]]:
    """List a model and all models below it, each once, in the order of the keys."""
    found = [model]
    for one in found:
        for field in keys_of(one).values():
            inner = nested_model(field.annotation)
            if inner is not None and inner not in found:
                found.append(inner)
    return found


def model_at_path(model: type[ConfigModel], path: Sequence[str | int]) -> type[ConfigModel] | None:
    """Find the model of the mapping at a place below another model."""
    current: type[ConfigModel] | None = model
    inside = True  # the next part is a key of `current`, not an index or a free name
    for part in path:
        if current is None:
            return None
        if inside:
            field = keys_of(current).get(str(part))
            if field is None:
                return None
            current = nested_model(field.annotation)
            inside = not _holds_several(field.annotation)
        else:
            inside = True
    return current


def _holds_several(annotation: Any) -> bool:
    """Return whether a type holds several models, by index or by name."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _holds_several(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return any(_holds_several(part) for part in get_args(annotation))
    return origin is not None and nested_model(annotation) is not None
