"""A second run of a response whose first one was lost: it must repeat what was seen of that.

Followers may have seen the events of the first run, so those of the second take their place only
as long as they are the same. How a text is cut into deltas does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from gateway.proxy.json_values import JsonObject


class NotRepeated(Exception):  # noqa: N818 - said of the run
    """The second run has given something else than the first."""


class Repetition:
    """Drops the events of a second run as long as they repeat these, those of the first."""

    def __init__(self, events: Iterable[JsonObject]) -> None:
        texts: dict[int, list[str]] = {}
        expected: list[tuple[bytes, bool]] = []
        for value in events:
            key, text = _parts(value)
            if text is None:
                expected.append((key, False))
                continue
            if not expected or expected[-1] != (key, True):
                expected.append((key, True))
            texts.setdefault(len(expected) - 1, []).append(text)
        self._expected = deque(
            (key, "".join(texts[at]) if is_text else None)
            for at, (key, is_text) in enumerate(expected)
        )

    @property
    def done(self) -> bool:
        """Whether all has been repeated."""
        return not self._expected

    def new_part(self, value: JsonObject) -> JsonObject | None:
        """The part of the next event that is new, if any is. Raises: NotRepeated."""
        if not self._expected:
            return value
        key, text = _parts(value)
        expected_key, expected_text = self._expected[0]
        if key != expected_key or (text is None) != (expected_text is None):
            raise NotRepeated
        if text is None or expected_text is None:
            self._expected.popleft()
            return None
        if expected_text.startswith(text):
            left = expected_text[len(text) :]
            if left:
                self._expected[0] = key, left
            else:
                self._expected.popleft()
            return None
        if len(self._expected) > 1 or not text.startswith(expected_text):
            raise NotRepeated
        self._expected.popleft()
        return value | {"delta": text[len(expected_text) :]}


def _parts(value: JsonObject) -> tuple[bytes, str | None]:
    """What an event is, without its number, and the text that it adds, if it is a delta."""
    delta = value.get("delta")
    fields = {name: one for name, one in value.items() if name != "sequence_number"}
    if isinstance(delta, str):
        del fields["delta"]
    key = msgspec.json.encode(fields, order="sorted")
    return key, delta if isinstance(delta, str) else None
