"""The models that a caller may see, for `/v1/models` and `/props`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.catalog import ServedModels, ServerFigures
from gateway.config.cache_privacy import NodeLabels
from gateway.config.routing import CATCH_ALL
from gateway.proxy.api.base import ModelSummary
from gateway.proxy.inbound.request import ModelAliases
from gateway.request import Caller

MODEL_OWNER = "llama-gateway"


@dataclass(frozen=True, slots=True)
class VisibleModels:
    """The models of the nodes that one caller may see, under one version of the settings.

    A model is visible if some node serves it, down or not. So is a name of the settings that
    stands for such a model. A request for any other name is 404.
    """

    catalog: ServedModels
    model_names: ModelAliases
    caller: Caller
    labels: NodeLabels = ()
    """Labels of the nodes that the caller may use; empty: all nodes."""

    def visible_names(self) -> list[str]:
        """All visible names: the nodes' models in the inventory's order, then the settings' names.

        With a catch-all, then the names of the caller's key.
        """
        key_names = sorted(self.caller.models or ()) if self.model_names.has_catch_all else ()
        names = dict.fromkeys(
            (*self.catalog.model_names(self.labels), *self.model_names.rules, *key_names)
        )
        return [name for name in names if name != CATCH_ALL and name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a request for this name would find nodes, if only by the catch-all."""
        rule = self._rule_name(name)
        allowed = self.caller.may_use(name) or (rule != name and self.caller.may_use(rule))
        return allowed and any(
            self.catalog.serves(target.name, self.labels)
            for target in self.model_names.resolve(rule, self.catalog)
        )

    def _rule_name(self, name: str) -> str:
        """The name itself, or the catch-all if neither the settings nor the nodes know it."""
        return CATCH_ALL if self.model_names.is_catch_all(name, self.catalog) else name

    def servers_of(self, names: Iterable[str]) -> list[ServerFigures]:
        """The servers of any of these names, down or not, each once."""
        targets = (
            target.name
            for name in names
            for target in self.model_names.resolve(self._rule_name(name), self.catalog)
        )
        return self.catalog.servers_of(targets, self.labels)

    def model_object(self, name: str, created: int) -> dict[str, Any]:
        """A model in OpenAI's form. `created` is in seconds since 1970."""
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": MODEL_OWNER,
        }
        servers = self.servers_of([name])
        sizes = {
            "n_ctx": _largest(server.context for server in servers),
            "n_ctx_train": _largest(server.trained_context for server in servers),
        }
        if meta := {key: size for key, size in sizes.items() if size is not None}:
            model["meta"] = meta
        return model

    def summary(self, name: str, created: int) -> ModelSummary:
        """A model for APIs that describe models. `created` is in seconds since 1970."""
        servers = self.servers_of([name])
        return ModelSummary(
            name,
            created,
            frozenset().union(*(server.endpoints for server in servers)),
            is_up=any(server.is_up for server in servers),
            on_gpu=any(server.on_gpu for server in servers),
            context=_largest(server.context for server in servers),
            parameters=next((one.parameters for one in servers if one.parameters), None),
            size=next((one.size for one in servers if one.size), None),
            quantization=next((one.quantization for one in servers if one.quantization), None),
            file=next((one.file for one in servers if one.file), None),
        )


def add_anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """The model, with the fields that Anthropic's clients read."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {**model, "type": "model", "display_name": model["id"], "created_at": created}


def list_response(models: Sequence[dict[str, Any]], *, anthropic: bool) -> dict[str, Any]:
    """The list of models in OpenAI's form; `anthropic`: with Anthropic's fields too."""
    if not anthropic:
        return {"object": "list", "data": models}
    return {
        "object": "list",
        "data": [add_anthropic_fields(model) for model in models],
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }


def props_response(servers: Sequence[ServerFigures]) -> dict[str, Any]:
    """The body of `/props` for these servers: sizes, but no paths and no templates."""
    context = _largest(server.context for server in servers)
    return {
        "default_generation_settings": {} if context is None else {"n_ctx": context},
        "total_slots": sum(server.slots for server in servers),
        "modalities": {
            "vision": any(server.has_vision for server in servers),
            "audio": any(server.has_audio for server in servers),
            "video": any(server.has_video for server in servers),
        },
    }


def _largest(sizes: Iterable[int | None]) -> int | None:
    """The largest of those that are known."""
    return max((size for size in sizes if size is not None), default=None)
