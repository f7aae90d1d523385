"""What models there are, as clients are told: `/v1/models` and `/props`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.config.routing import CATCH_ALL
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Node
from gateway.proxy.inbound.model_names import ModelAliases
from gateway.request import Caller

MODEL_OWNER = "llama-gateway"


@dataclass(frozen=True, slots=True)
class VisibleModels:
    """The models of a fleet under one version of the settings, as one caller may see them.

    A model is here if some node serves it, down or not. So is a name of the settings that stands
    for such a model; one that stands for none is not, since a request for it would be 404.
    """

    fleet: Fleet
    model_names: ModelAliases
    caller: Caller

    def visible_names(self) -> list[str]:
        """Every public name: nodes' models in the inventory's order, then the settings' names.

        Then those that the caller's key names and the catch-all takes.
        """
        own = sorted(self.caller.models or ()) if self.model_names.has_catch_all else ()
        every = dict.fromkeys(
            (*self.fleet.model_index.model_names(), *self.model_names.rules, *own)
        )
        return [name for name in every if name != CATCH_ALL and name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a request for this name would find nodes, by the catch-all too."""
        known = self._known(name)
        allowed = self.caller.may_use(name) or (known != name and self.caller.may_use(known))
        return allowed and any(
            self.fleet.model_index.serves(meaning.name)
            for meaning in self.model_names.resolve(known)
        )

    def _known(self, name: str) -> str:
        """The name that the settings or the nodes know it by."""
        return CATCH_ALL if self.model_names.is_catch_all(name, self.fleet.model_index) else name

    def nodes_serving(self, names: Iterable[str]) -> list[Node]:
        """The nodes that serve any of these names, down or not, each once."""
        serving = (
            node
            for name in names
            for meaning in self.model_names.resolve(self._known(name))
            for node in self.fleet.model_index.nodes_for(meaning.name)
        )
        return list(dict.fromkeys(serving))

    def model_object(self, name: str, created: int) -> dict[str, Any]:
        """One model in OpenAI's form. `created` is in seconds since 1970."""
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": MODEL_OWNER,
        }
        nodes = self.nodes_serving([name])
        sizes = {"n_ctx": largest_context(nodes), "n_ctx_train": _largest_trained(nodes)}
        if meta := {key: size for key, size in sizes.items() if size is not None}:
            card["meta"] = meta
        return card


def add_anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """The same model with what Anthropic's clients read of it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {**model, "type": "model", "display_name": model["id"], "created_at": created}


def list_response(models: Sequence[dict[str, Any]], *, anthropic: bool) -> dict[str, Any]:
    """All of them, in OpenAI's form or in both."""
    if not anthropic:
        return {"object": "list", "data": models}
    return {
        "object": "list",
        "data": [add_anthropic_fields(card) for card in models],
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }


def props_response(nodes: Sequence[Node]) -> dict[str, Any]:
    """What `/props` may say of these nodes: sizes, and nothing of their files or templates."""
    context = largest_context(nodes)
    return {
        "default_generation_settings": {} if context is None else {"n_ctx": context},
        "total_slots": sum(node.slots_total for node in nodes),
        "modalities": {
            "vision": any(_sees(node) for node in nodes),
            "audio": any(node.properties.audio is True for node in nodes),
        },
    }


def largest_context(nodes: Iterable[Node]) -> int | None:
    """Tokens of one slot of the roomiest node; None: no node has said."""
    return max((node.context for node in nodes if node.context is not None), default=None)


def _largest_trained(nodes: Iterable[Node]) -> int | None:
    sizes = (node.properties.trained_context for node in nodes)
    return max((size for size in sizes if size is not None), default=None)


def _sees(node: Node) -> bool:
    if node.spec.endpoints is not None:
        return "vision" in node.spec.endpoints
    return node.properties.vision is True and "vision" not in node.properties.refused
