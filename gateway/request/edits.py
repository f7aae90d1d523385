"""Edits request bodies: only here, and only those that need it.

An edited body is parsed one level deep: everything inside stays the client's own bytes. A large
body is not even copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gateway.api.json_values import FIELDS_DECODER, as_raw
from gateway.api.tokens import BOUND_NAMES, Number
from gateway.config.scheduling import ModelRule
from gateway.request import multipart, request_limits
from gateway.request.body import MISSING, Body, ParsedBody

B = TypeVar("B", bound=Body)
_NULL = b"null"
# More than any client can mean. JSON integers may have any length and overflow a float.
_HUGE = 1 << 62
Edit = dict[str, Any]  # New values of a body's fields, by name; `msgspec.UNSET` removes one


def required_edit(parsed: ParsedBody, n_probs: int, context: Callable[[], int]) -> Edit:
    """The edit that a body with `has_edited_options` needs before a node may see it.

    `n_probs` is the operator's limit, `context` tells the tokens of the model's largest slot.
    Raises: GatewayError 400.
    """
    edit: Edit = {}
    if isinstance(parsed.priority, str):
        edit["priority"] = msgspec.UNSET
    if parsed.id_slot is not MISSING:
        edit["id_slot"] = msgspec.UNSET
    if parsed.lora is not MISSING:
        edit["lora"] = msgspec.UNSET
    if parsed.response_fields is not MISSING:
        edit |= _with_metered_fields(parsed.response_fields)
    if not (parsed.n_probs is parsed.top_logprobs is None and parsed.logprobs is MISSING):
        edit |= _limit_logprobs(parsed, n_probs)
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        window = getattr(parsed, name)
        if window is not None and not -1 <= window <= SMALL_WINDOW:
            # Below -1, too: of a number beyond 32 bits llama.cpp takes the lower ones.
            edit[name] = max(-1, min(window, context()))
    return edit


def lowest_bound(rules: tuple[ModelRule, ...], most: int | None) -> int | None:
    """The least of the rules' `max_tokens` and `most`; None: any number of tokens."""
    bounds = [rule.max_tokens for rule in rules if rule.max_tokens is not None]
    return min(bounds if most is None else [*bounds, most], default=None)


# Tokens to search for repetitions, which cost a node nothing. Of a larger number llama.cpp
# allocates 4 or 8 bytes a token, also beyond what a slot can hold.
SMALL_WINDOW = 1024
# Fields of llama.cpp's own completions that show the end of a stream, and count the tokens.
_METERED_FIELDS = ("stop", "timings")


def _with_metered_fields(selected: msgspec.Raw) -> Edit:
    """Add what the gateway itself reads to the fields that a client selects of a completion."""
    try:
        names = _STRINGS.decode(selected)
    except msgspec.ValidationError:
        return {}  # The server ignores it.
    missing = [name for name in _METERED_FIELDS if name not in names]
    return {"response_fields": [*names, *missing]} if names and missing else {}


_STRINGS = msgspec.json.Decoder(list[str])


def _limit_logprobs(parsed: ParsedBody, most: int) -> Edit:
    counts = {
        "n_probs": parsed.n_probs,
        "top_logprobs": parsed.top_logprobs,
        "logprobs": request_limits.logprobs_count(parsed.logprobs),
    }
    return {name: most for name, count in counts.items() if count is not None and count > most}


def apply_rules(body: B, rules: tuple[ModelRule, ...]) -> B:
    """`body` with the rules' `strip`, `default` and `set` applied; itself if they have none."""
    if not rules or not any(rule.set or rule.default or rule.strip for rule in rules):
        return body
    fields = raw_fields(body)
    for rule in rules:
        for name in rule.strip:
            fields.pop(name, None)
        for name, value in rule.default.items():
            # The limit of tokens has several names: whichever the client used counts.
            if all(_is_null(fields.get(other)) for other in _names_of(name)):
                fields[name] = as_raw(value)
        for name, value in rule.set.items():
            for other in _names_of(name):
                fields.pop(other, None)
            fields[name] = as_raw(value)
    return _with_fields(body, fields)


def _names_of(name: str) -> tuple[str, ...]:
    """All names of a field."""
    return BOUND_NAMES if name in BOUND_NAMES else (name,)


def apply_edit(body: B, edit: Edit) -> B:
    """`body` with `edit` applied."""
    fields = raw_fields(body)
    for name, value in edit.items():
        if value is msgspec.UNSET:
            fields.pop(name, None)
        else:
            fields[name] = as_raw(value)
    return _with_fields(body, fields)


def with_model(body: B, model: str) -> B:
    """`body` with another model's name, in the place of the old one."""
    if isinstance(body, bytes) and body.startswith(b"--"):
        return multipart.with_model(body, model)  # type: ignore[return-value]
    fields = raw_fields(body)
    fields["model"] = as_raw(model)
    return _with_fields(body, fields)


# Asks a node that does not stream for a plain response.
PLAIN: Edit = {"stream": False, "stream_options": msgspec.UNSET}
NO_PROMPT_CACHE: Edit = {"cache_prompt": False}  # Makes llama.cpp's server read a prompt anew
# Fields by which a client asks llama.cpp's server for figures of its prompt cache.
_FIGURE_FIELDS = ("return_progress", "timings_per_token")


def without_cache_figures(body: Body) -> Edit:
    """The edit by which a body asks for no figures of a node's prompt cache; usually empty."""
    if isinstance(body, bytes):
        found = [name for name in _FIGURE_FIELDS if name.encode() in body]
    else:
        found = [name for name in _FIGURE_FIELDS if body.has_any((name,))]
    return dict.fromkeys(found, msgspec.UNSET)


def raw_fields(body: Body) -> dict[str, msgspec.Raw]:
    """The fields of a body that was parsed, each value as the client's own bytes."""
    return FIELDS_DECODER.decode(body) if isinstance(body, bytes) else body.raw_fields()


def _with_fields(body: B, fields: dict[str, msgspec.Raw]) -> B:
    """A body of these fields, of the same kind as `body`."""
    if isinstance(body, bytes):
        return msgspec.json.encode(fields)  # type: ignore[return-value]
    return body.with_fields(fields)  # type: ignore[return-value]


def clamped_int(value: Number) -> int | None:
    """A number of a body as a bounded int; None for None."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return _HUGE
    return max(-_HUGE, min(int(value), _HUGE))


def _is_null(raw: msgspec.Raw | None) -> bool:
    return raw is None or (len(raw) == len(_NULL) and bytes(raw) == _NULL)
