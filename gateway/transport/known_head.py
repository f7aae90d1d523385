"""The head of a message, parsed once for all messages on a connection that repeat it.

A client sends one head again and again, and so does a node; only their Content-Length differs.
Parsing costs some ten calls into Python for each message, comparing costs three of C's.
"""

from __future__ import annotations

import re

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ ]?([0-9]{1,9})(?=\r\n)", re.IGNORECASE)

_HEAD_END = b"\r\n\r\n"

MOST_LENGTH_DIGITS = 9
"""Of a body's length: what has more does not come in one read."""


class KnownHead:
    """The bytes of a head, up to the digits of its Content-Length and behind them."""

    __slots__ = ("_before", "_begin", "_behind", "_size", "_start", "_whole")

    def __init__(self, before: bytes, digits: bytes, behind: bytes) -> None:
        self._before = before
        self._behind = behind
        self._start = len(before)
        # As it came the first time: most of what repeats a head repeats the length, too.
        self._whole = before + digits + behind
        self._begin = len(self._whole)
        self._size = self._begin + int(digits)

    @classmethod
    def from_message(cls, data: bytes) -> KnownHead | None:
        """The head of the whole message that `data` is, or None if there is more to it than that.

        What was parsed of it holds for every message whose `body` is then found.
        """
        end = data.find(_HEAD_END) + len(_HEAD_END)
        found = _CONTENT_LENGTH.findall(data, 0, end)
        if len(found) != 1 or len(data) - end != int(found[0]):
            # Also where the parser saw the head end before that.
            return None
        length = _CONTENT_LENGTH.search(data, 0, end)
        assert length is not None
        return cls(data[: length.start(1)], length[1], data[length.end(1) : end])

    def match_body(self, data: bytes) -> bytes | None:
        """The body, if `data` is a whole message with this head and nothing else."""
        if len(data) == self._size and data.startswith(self._whole):
            return data[self._begin :]
        start = self._start
        if not data.startswith(self._before):
            return None
        end = data.find(b"\r", start, start + MOST_LENGTH_DIGITS + 1)
        if end <= start or not data.startswith(self._behind, end):
            return None
        digits = data[start:end]
        begin = end + len(self._behind)
        if digits.isdigit() and int(digits) == len(data) - begin:
            return data[begin:]
        return None
