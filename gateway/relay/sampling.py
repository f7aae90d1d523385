"""Fields by which a small request makes a node say or do a great deal.

llama.cpp repeats most options of `/completion` in its last event, and with `verbose` on the other
paths; a bias given as a text is told token by token, at up to 24 times its size; what may be the
beginning of a `stop` text is held back and then told in one event. It searches its whole vocabulary
for each of `dry_sequence_breakers`, and goes through all `samplers` for each token. With the demo
model 5,000 breakers stop every slot for 0.6 s, with a vocabulary of 128,000 for a minute.
"""

from __future__ import annotations

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.relay.peek import NOTHING, Peek
from gateway.relay.values import UNREADABLE

ECHO = 32
"""Bytes of one event that a byte of the request's body may become: a bias for each character of a
text is 24 bytes (above), and blanks that were sent as a token's id are up to 21 times as long."""

OPTION_BYTES = 1024
"""Largest `samplers` and `dry_sequence_breakers`: all samplers that llama.cpp has are 150 bytes."""

_NUMBER = msgspec.json.Decoder(bool | int | float | None)


def check(peeked: Peek, limits: LimitSettings) -> None:
    """See that none is larger than it may. Raises: GatewayError 400."""
    for name, setting in (
        ("stop", "stop_bytes"),
        ("stop_sequences", "stop_bytes"),
        ("logit_bias", "logit_bias_bytes"),
        ("response_fields", "logit_bias_bytes"),
    ):
        most = getattr(limits, setting)
        if len(getattr(peeked, name)) > most:
            raise errors.invalid_request(
                f"'{name}' has more than {most} bytes. Shorten it, or ask the operator to raise "
                f"'limits.{setting}'.",
                name,
            )
    for name in ("samplers", "dry_sequence_breakers"):
        if len(getattr(peeked, name)) > OPTION_BYTES:
            raise errors.invalid_request(
                f"'{name}' has more than {OPTION_BYTES} bytes. Shorten it.", name
            )
    if bytes(peeked.grammar_triggers) not in _NO_TRIGGERS:
        # One of type 2 is a pattern of C++'s std::regex: `((.*)*)*b` stops all slots for ever.
        raise errors.invalid_request(
            "'grammar_triggers' are the server's own; requests can't have them.",
            "grammar_triggers",
        )


_NO_TRIGGERS = (b"", b"null", b"[]")


def logprobs(raw: msgspec.Raw) -> int | float | None:
    """The number that `logprobs` is, llama.cpp's other name for `n_probs`; None: it is none.

    In a chat it is true or false. Raises: GatewayError 400.
    """
    if raw is NOTHING:
        return None
    try:
        value = _NUMBER.decode(raw) if len(raw) < OPTION_BYTES else ""
    except UNREADABLE:
        value = ""
    if isinstance(value, str):
        raise errors.invalid_request("'logprobs' must be a number, or true or false.", "logprobs")
    return None if isinstance(value, bool) else value


def tells_probabilities(peeked: Peek) -> bool:
    """Whether the answer has probabilities, some thousands of bytes for each token."""
    return bool(
        peeked.n_probs
        or peeked.top_logprobs
        or (peeked.logprobs is not NOTHING and bytes(peeked.logprobs) not in _NO_LOGPROBS)
    )


_NO_LOGPROBS = (b"null", b"false", b"0")


def largest_event(body: int, limits: LimitSettings, *, probabilities: bool) -> int:
    """Bytes of the largest event that a request with a body of so many bytes may cause.

    With probabilities the tokens of a `stop` text that is held back count each as thousands.
    """
    most = max(limits.response_bytes, limits.event_bytes)
    return most if probabilities else min(limits.event_bytes + ECHO * body, most)
