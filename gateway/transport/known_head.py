"""Recognises the head of a message, so that it is parsed once for all messages that repeat it.

A client sends the same head again and again, and so does a node; only the Content-Length differs.
Parsing costs some ten calls into Python for each message, comparing three into C.
"""

from __future__ import annotations

import re

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ ]?([0-9]{1,9})(?=\r\n)", re.IGNORECASE)

_HEAD_END = b"\r\n\r\n"

MOST_LENGTH_DIGITS = 9
"""Digits of a Content-Length; a body that needs more does not come in one read."""


class KnownHead:
    """The bytes of a head, before and after the digits of its Content-Length."""

    __slots__ = ("_after", "_before", "_begin", "_size", "_start", "_whole")

    def __init__(self, before: bytes, digits: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._start = len(before)
        # As it came the first time: most messages that repeat a head repeat the length, too.
        self._whole = before + digits + after
        self._begin = len(self._whole)
        self._size = self._begin + int(digits)

    @classmethod
    def from_message(cls, data: bytes) -> KnownHead | None:
        """The head of `data`, which is one message; None if its head can't be recognised.

        The parsed headers hold for every message of which `match_body` returns the body.
        """
        end = data.find(_HEAD_END) + len(_HEAD_END)
        found = _CONTENT_LENGTH.findall(data, 0, end)
        if len(found) != 1 or len(data) - end != int(found[0]):
            # Also when the parser saw an earlier end of the head.
            return None
        length = _CONTENT_LENGTH.search(data, 0, end)
        assert length is not None
        return cls(data[: length.start(1)], length[1], data[length.end(1) : end])

    def match_body(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one message with this head; else None."""
        if len(data) == self._size and data.startswith(self._whole):
            return data[self._begin :]
        start = self._start
        if not data.startswith(self._before):
            return None
        end = data.find(b"\r", start, start + MOST_LENGTH_DIGITS + 1)
        if end <= start or not data.startswith(self._after, end):
            return None
        digits = data[start:end]
        begin = end + len(self._after)
        if digits.isdigit() and int(digits) == len(data) - begin:
            return data[begin:]
        return None
