"""A request on its way through the proxy: what the HTTP edge has read and nodes are sent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import msgspec

from gateway.lease import LeaseRequest
from gateway.proxy.inbound.large_body import Body, TimeSlicer
from gateway.request import Caller


# A struct of msgspec: a frozen dataclass of so many fields takes sixteen times as long to make.
class Request(msgspec.Struct, frozen=True, eq=False):
    """A request that can be sent to a node, more than once if attempts fail.

    Times are monotonic seconds of the gateway's clock.
    """

    id: str
    """Unique in this process; not chosen by the client."""
    x_request_id: str
    """`X-Request-ID`: the client's own if it sent a valid one, else `id`."""
    path: str
    """The path as nodes know it, for example `/v1/chat/completions`."""
    header_lines: bytes
    """The client's header lines that nodes get, each with its line end."""
    bodies: Mapping[str, Body]
    """The body for each of the model names."""
    model_in_body: str | None
    """The model's name in these bodies; None: they name none."""
    caller: Caller
    received_at: float
    lease_request: LeaseRequest
    """All that the scheduler may know of it."""
    stream: bool = False
    """Whether the client asked for a stream."""
    logprobs: bool = False
    """Whether the response contains log probabilities."""
    deadline: float | None = None
    """When the client stops waiting for the complete response."""
    client_has_timer: bool = False
    """Whether the client times out by itself at `deadline`, so that it needs no error."""
    prompt_list: PromptList | None = None
    """The prompts, if there are several to answer one by one (`proxy/multi_prompt.py`)."""


SubRequestMaker = Callable[[int, bytes], Generator[None, None, Request]]
"""Makes a prompt's request of its index and body, in short steps. Raises: GatewayError."""


@dataclass(frozen=True, slots=True)
class PromptList:
    """The prompts of one request."""

    prompts: list[msgspec.Raw]
    other_fields: dict[str, msgspec.Raw]
    """The body's other fields, which are sent with each prompt."""
    make_request: SubRequestMaker

    async def sub_request(self, index: int, time_slicer: TimeSlicer) -> Request:
        """The request of one prompt. Raises: GatewayError."""
        body = msgspec.json.encode(self.other_fields | {"prompt": self.prompts[index]})
        return await time_slicer.run(self.make_request(index, body))
