"""Lease requests for tests, made of flat fields: each goes to the part that has it."""

from __future__ import annotations

from typing import Any

from gateway.lease import LeaseCaller, LeaseRequest, RequestSize, WantedNode
from gateway.schedule.core.demand_model import TokenEstimates


def a_lease_request(request_id: str = "req_1", model: str = "demo", **fields: Any) -> LeaseRequest:
    """A request for a chat with this model.

    `caller` is the caller's id, which is the `fairness_key`, too, unless that is given.
    """
    caller = fields.pop("caller", "c")

    def take(part: type[Any]) -> dict[str, Any]:
        return {name: fields.pop(name) for name in part.__struct_fields__ if name in fields}

    request = LeaseRequest(
        request_id,
        LeaseCaller(caller, **{"fairness_key": caller, **take(LeaseCaller)}),
        WantedNode(model, **{"model_names": (model,), **take(WantedNode)}),
        RequestSize(**take(RequestSize)),
    )
    assert not fields, f"a lease request has no {', '.join(fields)}"
    return request


def a_size(text: Any, limit: Any = None, ids: Any = 0, media: Any = 0) -> RequestSize:
    """A request's size, as far as its tokens are estimated by it."""
    return RequestSize(text_bytes=text, max_tokens=limit, exact_tokens=ids, media_tokens=media)


def learn(
    estimates: TokenEstimates,
    model: str,
    caller: str,
    text: Any,
    prompt: Any,
    completion: Any,
    limit: Any,
    ids: Any = 0,
    media: Any = 0,
    *,
    complete: bool = True,
) -> None:
    size = a_size(text, limit, ids, media)
    estimates.learn(model, caller, size, prompt, completion, complete=complete)


def expected(
    estimates: TokenEstimates, model: str, caller: str, text: Any, limit: Any, *more: Any
) -> tuple[float, float]:
    """The tokens that are expected; `more`: those given as ids, and those of media."""
    return estimates.expected_tokens(model, caller, a_size(text, limit, *more))
