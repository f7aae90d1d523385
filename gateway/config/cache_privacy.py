"""What callers may learn of the prompts that nodes have cached, and whose caches they may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from gateway.config.fields import ConfigModel, LowercasedOrOff, NonEmptyText, TypeLabel

NodeLabels = tuple[tuple[str, str], ...]
"""Labels that a node must have, sorted by name; empty: any node."""


def has_labels(labels: Mapping[str, str], wanted: NodeLabels) -> bool:
    """Whether a node with these `labels` has all that are wanted."""
    return all(labels.get(name) == value for name, value in wanted)


class CacheSpec(ConfigModel):
    """Prompt caches and privacy. A key's own entry counts, else its group's, else the top level's.

    Each says what that caller may learn of others. To keep a caller's own prompts from the rest,
    it must hold for the rest: at the top level.
    """

    hide: bool | None = None
    """Take the figures that tell what was cached out of responses: `cached_tokens` and its kin,
    `timings` of the prompt, progress of the prefill, `id_slot`. Unset: no."""
    isolate: Annotated[Literal["group", "key", "off"] | None, LowercasedOrOff] = None
    """Whose prompts may draw a request to the node that has them cached: those of its `group`
    (without one, of its key), of its `key` (without one, of its address), or everybody's (`off`).
    Unset: `off`."""
    nodes: Annotated[
        Mapping[NonEmptyText, str] | None, Field(max_length=64), TypeLabel("mapping of texts")
    ] = None
    """Labels of the nodes that it may use, such as `{tenant: a}`: nodes with all of them, and no
    other. `{}`: all nodes. Unset: all nodes."""
    prompt_cache: bool | None = None
    """`false`: llama.cpp's server reads each prompt anew (`cache_prompt: false`), which costs its
    whole prefill. Unset: what the client asks for."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What holds for the requests of one caller."""

    hide: bool = False
    """Whether responses must not tell what was cached."""
    scope: str = ""
    """Names those whose prompts may draw its requests to a node; empty: everybody's may."""
    node_labels: NodeLabels = ()
    """Labels of the nodes that it may use."""
    prompt_cache: bool = True
    """Whether nodes may serve its prompts from their caches."""

    def scope_of(self, request_id: str) -> str:
        """The scope of one request: its own, if no node may serve its prompt from a cache."""
        return self.scope if self.prompt_cache else f"request {request_id}"


SHARED_CACHE = CachePolicy()
"""Nothing is hidden, and all share all."""


def cache_policy(specs: Iterable[CacheSpec | None], caller: str, group: str | None) -> CachePolicy:
    """The policy of a caller by `specs`, the most specific first; each field counts by itself.

    `caller`: its id; `group`: the name of its group.
    """
    hide: bool | None = None
    isolate: str | None = None
    nodes: Mapping[str, str] | None = None
    prompt_cache: bool | None = None
    for spec in specs:
        if spec is not None:
            hide = spec.hide if hide is None else hide
            isolate = spec.isolate if isolate is None else isolate
            nodes = spec.nodes if nodes is None else nodes
            prompt_cache = spec.prompt_cache if prompt_cache is None else prompt_cache
    scope = ""
    if isolate == "group" and group is not None:
        scope = f"group {group}"
    elif isolate not in {None, "off"}:
        scope = f"caller {caller}"
    found = CachePolicy(
        hide is True, scope, tuple(sorted((nodes or {}).items())), prompt_cache is not False
    )
    return SHARED_CACHE if found == SHARED_CACHE else found
