"""The header `Prefer` (RFC 7240), of which the gateway knows `respond-async`."""

from __future__ import annotations

import re

from gateway.request import Headers

LONGEST_PREFER = 1024
"""Bytes of one field that are read; a longer one says nothing."""

_MEMBERS = re.compile(rb'(?:[^",]|"(?:[^"\\]|\\.)*")+')

_PREFERENCE = re.compile(
    rb'[ \t]*respond-async[ \t]*(?:=[ \t]*(?:"")?[ \t]*)?(?:;.*)?', re.IGNORECASE | re.DOTALL
)
"""The token, without a value; parameters are ignored."""


def prefers_async(headers: Headers) -> bool:
    """Whether the client wants to have the response later: it says `respond-async`."""
    for name, value in headers:
        if name == b"prefer" and len(value) <= LONGEST_PREFER:
            for member in _MEMBERS.findall(value):
                if _PREFERENCE.fullmatch(member) is not None:
                    return True
    return False
