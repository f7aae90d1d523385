"""What models there are, as clients are told: `/v1/models` and `/props`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.config.routing import CATCH_ALL
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Node
from gateway.relay.naming import Names
from gateway.request import Caller

OWNER = "llama-gateway"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models of a fleet under one version of the settings, as one caller may see them.

    A model is here if some node serves it, down or not. So is a name of the settings that stands
    for such a model; one that stands for none is not, since a request for it would be 404.
    """

    fleet: Fleet
    names: Names
    caller: Caller

    def all(self) -> list[str]:
        """Every public name: nodes' models in the inventory's order, then the settings' names.

        Then those that the caller's key names and the catch-all takes.
        """
        own = sorted(self.caller.models or ()) if self.names.catches else ()
        every = dict.fromkeys((*self.fleet.catalogue.model_names(), *self.names.rules, *own))
        return [name for name in every if name != CATCH_ALL and name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a request for this name would find nodes, by the catch-all too."""
        known = self._known(name)
        allowed = self.caller.may_use(name) or (known != name and self.caller.may_use(known))
        return allowed and any(
            self.fleet.catalogue.known(meaning.name) for meaning in self.names.meanings(known)
        )

    def _known(self, name: str) -> str:
        """The name that the settings or the nodes know it by."""
        return CATCH_ALL if self.names.caught(name, self.fleet.catalogue) else name

    def nodes(self, names: Iterable[str]) -> list[Node]:
        """The nodes that serve any of these names, down or not, each once."""
        serving = (
            node
            for name in names
            for meaning in self.names.meanings(self._known(name))
            for node in self.fleet.catalogue.nodes_for(meaning.name)
        )
        return list(dict.fromkeys(serving))

    def card(self, name: str, created: int) -> dict[str, Any]:
        """One model in OpenAI's form. `created` is in seconds since 1970."""
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": OWNER,
        }
        nodes = self.nodes([name])
        sizes = {"n_ctx": largest_context(nodes), "n_ctx_train": _largest_trained(nodes)}
        if meta := {key: size for key, size in sizes.items() if size is not None}:
            card["meta"] = meta
        return card


def for_anthropic(card: dict[str, Any]) -> dict[str, Any]:
    """The same model with what Anthropic's clients read of it."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    return {**card, "type": "model", "display_name": card["id"], "created_at": created}


def listing(cards: Sequence[dict[str, Any]], *, anthropic: bool) -> dict[str, Any]:
    """All of them, in OpenAI's form or in both."""
    if not anthropic:
        return {"object": "list", "data": cards}
    return {
        "object": "list",
        "data": [for_anthropic(card) for card in cards],
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }


def properties(nodes: Sequence[Node]) -> dict[str, Any]:
    """What `/props` may say of these nodes: sizes, and nothing of their files or templates."""
    context = largest_context(nodes)
    return {
        "default_generation_settings": {} if context is None else {"n_ctx": context},
        "total_slots": sum(node.slots_total for node in nodes),
        "modalities": {
            "vision": any(_sees(node) for node in nodes),
            "audio": any(node.facts.audio is True for node in nodes),
        },
    }


def largest_context(nodes: Iterable[Node]) -> int | None:
    """Tokens of one slot of the roomiest node; None: no node has said."""
    return max((node.context for node in nodes if node.context is not None), default=None)


def _largest_trained(nodes: Iterable[Node]) -> int | None:
    sizes = (node.facts.trained_context for node in nodes)
    return max((size for size in sizes if size is not None), default=None)


def _sees(node: Node) -> bool:
    if node.spec.endpoints is not None:
        return "vision" in node.spec.endpoints
    return node.facts.vision is True and "vision" not in node.facts.refused
