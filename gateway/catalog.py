"""What the public edge may ask about nodes and the wait queue: questions with plain answers.

The fleet and the scheduler answer them. Names of nodes do not pass, but in an error that may be
shown to clients of a trusted listener (`GatewayError.reveal_nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from gateway.config.keys import NodeLabels
from gateway.errors import GatewayError
from gateway.lease import QueuePosition


# A struct of msgspec: of ten thousand nodes all are made, hashed and compared every few seconds.
class ServerFigures(msgspec.Struct, frozen=True, gc=False):
    """One node's server, as `/v1/models`, `/props` and other APIs describe it; it may be down."""

    slots: int
    context: int | None  # tokens of one slot; None: not known
    trained_context: int | None  # tokens that the model was trained with; None: not known
    has_vision: bool
    has_audio: bool
    has_video: bool
    endpoints: frozenset[str]
    """What it serves, as far as it is known: by the inventory, or by what it has refused."""
    is_up: bool
    on_gpu: bool
    parameters: int | None  # the model's parameters; None: not known, as the next three
    size: int | None  # the model's size in bytes
    quantization: str | None
    file: str | None  # the model's file, without its folder


class ServedModels(Protocol):
    """The models that nodes serve, by public name (`nodes.model_index.ModelIndex`).

    Asked by each request, so it must be cheap.

    `labels`: those of the nodes that the caller may use; empty: all nodes.
    """

    @property
    def paused(self) -> frozenset[str]:
        """Public model names that an operator has paused, and other names of such models."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """For names that all nodes which serve them give to one model: its own name."""

    def model_names(self, labels: NodeLabels = ()) -> tuple[str, ...]:
        """The public model names that nodes serve, declared or reported, down or not."""

    def one_name_each(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of the names that servers give to one model: the one that most nodes serve."""

    def serves(self, model: str, labels: NodeLabels = ()) -> bool:
        """Whether some node serves this public model name, down or not."""

    def may_serve(self, model: str) -> bool:
        """Whether some node serves this public model name, or may yet report that it does."""

    def not_found_error(
        self, model: str | None, labels: NodeLabels = (), targets: Sequence[str] = ()
    ) -> GatewayError:
        """Why no node can serve this model name; None: the request names no model.

        `targets`: the models that it stands for.
        """

    def servers_of(self, models: Iterable[str], labels: NodeLabels = ()) -> list[ServerFigures]:
        """The servers of any of these models, down or not, each once."""


class FleetCatalog(Protocol):
    """All nodes: their models, and whether any of them could work."""

    @property
    def model_index(self) -> ServedModels:
        """The models that they serve."""

    @property
    def is_probed(self) -> bool:
        """Whether every node of the first inventory has been probed once."""

    def has_free_slot(self) -> bool:
        """Whether some node could begin a request now."""

    def has_usable_node(self) -> bool:
        """Whether some node is alive, or is a standby node that a request would start."""


class RequestQueue(Protocol):
    """The requests that wait for a slot."""

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests, since the gateway shuts down."""

    def has_room(self) -> bool:
        """Whether one more request could be taken: at once, or into the queue."""

    def retry_after(self) -> float:
        """Seconds until the next request is expected to end: worth a try then."""

    def queue_position(self, request_id: str) -> QueuePosition | None:
        """Where a request stands, up to a moment ago; None: it does not wait."""

    def refuse(self, request_id: str, error: GatewayError) -> bool:
        """End the wait of a request with this error; returns whether it was waiting."""

    def shed(self, request_id: str, error: GatewayError) -> bool:
        """The same, to free its memory: not if it has been granted a slot meanwhile."""

    def keep_in_queue(self, request_id: str) -> None:
        """The request's client has the head of a response: it is displaced last."""
