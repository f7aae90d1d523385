"""Lease requests for tests, made of flat fields: each goes to the part that has it."""

from __future__ import annotations

from typing import Any

from gateway.lease import LeaseCaller, LeaseRequest, RequestSize, WantedNode


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
