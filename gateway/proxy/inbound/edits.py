"""The only place that edits bodies, and only those that need it.

An edited body is parsed one level deep: everything inside stays the client's own bytes. A large one
(`large.py`) is not even copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.config.routing import ModelRule
from gateway.proxy.inbound import multipart, request_limits
from gateway.proxy.inbound.large_body import Body
from gateway.proxy.inbound.parsed_body import MISSING, Number, ParsedBody

B = TypeVar("B", bound=Body)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")

_NULL = b"null"

_HUGE = 1 << 62
"""More than anybody can mean; JSON knows integers of any length, and floats overflow by them."""

Edit = dict[str, Any]
"""What becomes of a body's fields: a new value, or `msgspec.UNSET` to take one out."""


def required_edit(
    parsed: ParsedBody,
    rules: tuple[ModelRule, ...],
    *,
    max_tokens_field: str | None,
    max_tokens: int | None,
    n_probs: int,
) -> Edit | None:
    """The edit that the contract asks for; None, as nearly always, when there is none.

    `max_tokens` and `n_probs` are the operator's bounds; `length_field` is the name that this
    path has for the answer's length.
    """
    cap = max_tokens
    for rule in rules:
        if rule.max_tokens is not None:
            cap = rule.max_tokens if cap is None else min(cap, rule.max_tokens)
    edit: Edit = {}
    if isinstance(parsed.priority, str):
        edit["priority"] = msgspec.UNSET
    if parsed.id_slot is not MISSING:
        edit["id_slot"] = msgspec.UNSET
    if parsed.lora is not MISSING:
        edit["lora"] = msgspec.UNSET
    if not (parsed.n_probs is parsed.top_logprobs is None and parsed.logprobs is MISSING):
        edit |= _bounded_probabilities(parsed, n_probs)
    if cap is not None and max_tokens_field is not None:
        present = {name: getattr(parsed, name) for name in _LENGTHS}
        for name, value in present.items():
            if value is not None and not 0 <= value <= cap:
                edit[name] = cap
        if all(value is None for value in present.values()):
            edit[max_tokens_field] = cap
    return edit or None


def _bounded_probabilities(peeked: ParsedBody, most: int) -> Edit:
    asked = {
        "n_probs": peeked.n_probs,
        "top_logprobs": peeked.top_logprobs,
        "logprobs": request_limits.logprobs_count(peeked.logprobs),
    }
    return {name: most for name, value in asked.items() if value is not None and value > most}


def apply_rules(body: B, rules: tuple[ModelRule, ...]) -> B:
    """`body` with the rules' parameters stripped, defaulted and set; itself if they have none."""
    if not rules or not any(rule.set or rule.default or rule.strip for rule in rules):
        return body
    fields = raw_fields(body)
    for rule in rules:
        for name in rule.strip:
            fields.pop(name, None)
        for name, value in rule.default.items():
            # A length has several names: whichever the client used counts.
            names = _LENGTHS if name in _LENGTHS else (name,)
            if all(_is_null(fields.get(other)) for other in names):
                fields[name] = _raw(value)
        for name, value in rule.set.items():
            fields[name] = _raw(value)
    return _body(body, fields)


def apply_edit(body: B, edit: Edit) -> B:
    """`body` with `edit` made."""
    fields = raw_fields(body)
    for name, value in edit.items():
        if value is msgspec.UNSET:
            fields.pop(name, None)
        else:
            fields[name] = _raw(value)
    return _body(body, fields)


def with_model(body: B, model: str) -> B:
    """`body` with another model's name, in the place where the old one stood."""
    if isinstance(body, bytes) and body.startswith(b"--"):
        return multipart.with_model(body, model)  # type: ignore[return-value]
    fields = raw_fields(body)
    fields["model"] = _raw(model)
    return _body(body, fields)


def raw_fields(body: Body) -> dict[str, msgspec.Raw]:
    """The fields of a body that has been peeked at, each as the client's own bytes."""
    return _FIELDS.decode(body) if isinstance(body, bytes) else body.raw_fields()


def _body(before: B, fields: dict[str, msgspec.Raw]) -> B:
    """The body that these fields make, of the same kind as before."""
    if isinstance(before, bytes):
        return msgspec.json.encode(fields)  # type: ignore[return-value]
    return before.with_fields(fields)  # type: ignore[return-value]


def clamped_int(value: Number) -> int | None:
    """A number of a body as an int that can be reckoned with; None for none."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return _HUGE
    return max(-_HUGE, min(int(value), _HUGE))


def _is_null(raw: msgspec.Raw | None) -> bool:
    return raw is None or (len(raw) == len(_NULL) and bytes(raw) == _NULL)


def _raw(value: object) -> msgspec.Raw:
    plain = dict(value) if isinstance(value, Mapping) else value
    return msgspec.Raw(msgspec.json.encode(plain))
