"""The models that a caller may see, for `/v1/models` and `/props`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.config.routing import CATCH_ALL
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Node
from gateway.proxy.api.base import ModelSummary
from gateway.proxy.inbound.model_names import ModelAliases
from gateway.request import Caller
from gateway.scheduling.fleet_sync import ALIVE_STATES

MODEL_OWNER = "llama-gateway"


@dataclass(frozen=True, slots=True)
class VisibleModels:
    """The models of a fleet that one caller may see, under one version of the settings.

    A model is visible if some node serves it, down or not. So is a name of the settings that
    stands for such a model. A request for any other name is 404.
    """

    fleet: Fleet
    model_names: ModelAliases
    caller: Caller

    def visible_names(self) -> list[str]:
        """All visible names: the nodes' models in the inventory's order, then the settings' names.

        With a catch-all, then the names of the caller's key.
        """
        key_names = sorted(self.caller.models or ()) if self.model_names.has_catch_all else ()
        names = dict.fromkeys(
            (*self.fleet.model_index.model_names(), *self.model_names.rules, *key_names)
        )
        return [name for name in names if name != CATCH_ALL and name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a request for this name would find nodes, if only by the catch-all."""
        rule = self._rule_name(name)
        allowed = self.caller.may_use(name) or (rule != name and self.caller.may_use(rule))
        return allowed and any(
            self.fleet.model_index.serves(target.name) for target in self.model_names.resolve(rule)
        )

    def _rule_name(self, name: str) -> str:
        """The name itself, or the catch-all if neither the settings nor the nodes know it."""
        return CATCH_ALL if self.model_names.is_catch_all(name, self.fleet.model_index) else name

    def nodes_serving(self, names: Iterable[str]) -> list[Node]:
        """The nodes that serve any of these names, down or not, each once."""
        nodes = (
            node
            for name in names
            for target in self.model_names.resolve(self._rule_name(name))
            for node in self.fleet.model_index.nodes_for(target.name)
        )
        return list(dict.fromkeys(nodes))

    def model_object(self, name: str, created: int) -> dict[str, Any]:
        """A model in OpenAI's form. `created` is in seconds since 1970."""
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": MODEL_OWNER,
        }
        nodes = self.nodes_serving([name])
        sizes = {"n_ctx": largest_context(nodes), "n_ctx_train": _largest_trained_context(nodes)}
        if meta := {key: size for key, size in sizes.items() if size is not None}:
            model["meta"] = meta
        return model

    def summary(self, name: str, created: int) -> ModelSummary:
        """A model for APIs that describe models. `created` is in seconds since 1970."""
        nodes = self.nodes_serving([name])
        reported = [node.properties for node in nodes]
        return ModelSummary(
            name,
            created,
            frozenset().union(*map(_known_endpoints, nodes)),
            is_up=any(node.state in ALIVE_STATES for node in nodes),
            on_gpu=any(node.spec.tier == "gpu" for node in nodes),
            context=largest_context(nodes),
            parameters=next((one.n_params for one in reported if one.n_params), None),
            size=next((one.size for one in reported if one.size), None),
            quantization=next((one.ftype for one in reported if one.ftype), None),
            file=next((one.file for one in reported if one.file), None),
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


def props_response(nodes: Sequence[Node]) -> dict[str, Any]:
    """The body of `/props` for these nodes: sizes, but no paths and no templates."""
    context = largest_context(nodes)
    return {
        "default_generation_settings": {} if context is None else {"n_ctx": context},
        "total_slots": sum(node.slots_total for node in nodes),
        "modalities": {
            "vision": any(_has_vision(node) for node in nodes),
            "audio": any(node.properties.audio is True for node in nodes),
        },
    }


def largest_context(nodes: Iterable[Node]) -> int | None:
    """Most tokens of one slot on any node; None: no node has reported its context."""
    return max((node.context for node in nodes if node.context is not None), default=None)


def _largest_trained_context(nodes: Iterable[Node]) -> int | None:
    sizes = (node.properties.trained_context for node in nodes)
    return max((size for size in sizes if size is not None), default=None)


def _known_endpoints(node: Node) -> frozenset[str]:
    """What a node serves, as far as it is known: by the inventory, or by what it has refused."""
    if node.spec.endpoints is not None:
        return frozenset(node.spec.endpoints)
    found = {"embeddings" if "chat" in node.properties.refused else "chat"}
    return frozenset(found | {"vision"} if _has_vision(node) else found)


def _has_vision(node: Node) -> bool:
    if node.spec.endpoints is not None:
        return "vision" in node.spec.endpoints
    return node.properties.vision is True and "vision" not in node.properties.refused
