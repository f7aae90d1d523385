"""`Prefer: respond-async` is honoured where it is said, and nowhere else."""

from __future__ import annotations

import pytest

from gateway.http.request_head import LONGEST_PREFER, prefers_async


@pytest.mark.parametrize(
    "value",
    [
        b"respond-async",
        b"Respond-Async",
        b" respond-async , wait=100",
        b"wait=100, respond-async",
        b'foo="a, b", respond-async; bar=1',
        b'respond-async=""',
        b"respond-async ; x",
    ],
)
def test_the_token_is_found(value: bytes) -> None:
    assert prefers_async([(b"prefer", value)])
    assert prefers_async([(b"prefer", b"wait=1"), (b"prefer", value)])


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"respond-asynchronously",
        b"xrespond-async",
        b"respond-async=1",
        b'foo="respond-async"',
        b'foo="a, respond-async"',
        b"return=minimal",
        b"wait=100; respond-async",
        b"respond-async" + b" " * LONGEST_PREFER,
        b'"' * LONGEST_PREFER,
    ],
)
def test_other_preferences_are_ignored(value: bytes) -> None:
    assert not prefers_async([(b"prefer", value)])
    assert not prefers_async([(b"x-prefer", b"respond-async")])
