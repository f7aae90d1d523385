"""Which keys a model has, as a file writes them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gateway.config.fields import ConfigModel


def keys_of(model: type[ConfigModel]) -> dict[str, FieldInfo]:
    """Tell the keys of a mapping by the names that the file uses."""
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else name: field
        for name, field in model.model_fields.items()
        if not field.exclude
    }


def model_in(annotation: Any) -> type[ConfigModel] | None:
    """Find the model inside of a type: of itself, of its items, or of its values."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        parts = parts[:1]
    elif origin not in {Union, types.UnionType, tuple} and len(parts) == 2:  # a mapping
        parts = parts[1:]
    for part in parts:
        if (found := model_in(part)) is not None:
            return found
    return None


def models_in(model: type[ConfigModel]) -> list[type[ConfigModel]]:
    """List a model and all models below it, each once, in the order of the keys."""
    found = [model]
    for one in found:
        for field in keys_of(one).values():
            inner = model_in(field.annotation)
            if inner is not None and inner not in found:
                found.append(inner)
    return found


def model_at(model: type[ConfigModel], loc: Sequence[str | int]) -> type[ConfigModel] | None:
    """Find the model of the mapping at a place below another model."""
    current: type[ConfigModel] | None = model
    inside = True  # the next part is a key of `current`, not an index or a free name
    for part in loc:
        if current is None:
            return None
        if inside:
            field = keys_of(current).get(str(part))
            if field is None:
                return None
            current = model_in(field.annotation)
            inside = not _many(field.annotation)
        else:
            inside = True
    return current


def _many(annotation: Any) -> bool:
    """Tell whether a type holds several models, by index or by name."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _many(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return any(_many(part) for part in get_args(annotation))
    return origin is not None and model_in(annotation) is not None
