"""What may change in a node's line of the inventory without making it another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.inventory import NodeSpec


def server(spec: NodeSpec) -> tuple[object, ...]:
    """What makes it another server when it changes."""
    return (spec.url, spec.kind)


def ways(spec: NodeSpec) -> tuple[object, ...]:
    """What makes new connections necessary when it changes."""
    return (spec.url, spec.kind, spec.tls, spec.api_key)
