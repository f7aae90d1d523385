"""The models of the two configuration files."""

from __future__ import annotations

from gateway.config.fields import ConfigModel
from gateway.config.yaml_file import keys_of, nested_model


def models_below(model: type[ConfigModel]) -> list[type[ConfigModel]]:
    """List a model and all models below it, each once, in the order of the keys."""
    found = [model]
    for one in found:
        for field in keys_of(one).values():
            inner, _ = nested_model(field.annotation)
            if inner is not None and inner not in found:
                found.append(inner)
    return found
