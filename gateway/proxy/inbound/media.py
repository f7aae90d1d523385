"""What pictures and sound in a prompt cost in tokens, by the first bytes of their base64 text.

Encoders differ. llama.cpp's for the Qwen-VL family makes a token of each 28 x 28 pixels, 8 to
4,096 in all (`clip.cpp`, `set_limit_image_tokens(8, 4096)`), those of Pixtral and Mistral 3 much
the same; Gemma 3 makes 256 of any picture, LLaVA 1.5 576 (24 x 24). So the guess goes by the
picture's size, and what a model's `usage` tells corrects it (`scheduling/token_estimates.py`).
Encoders of sound work on pieces of 30 s: Voxtral makes 375 tokens of each.
"""

from __future__ import annotations

import binascii
import re
from typing import NamedTuple

PIXELS_PER_TOKEN = 28
"""Of a picture's width or height that one token covers."""

LEAST_IMAGE_TOKENS, MOST_IMAGE_TOKENS = 8, 4096

UNREADABLE_IMAGE_TOKENS = 576
"""Tokens of a picture that does not tell its size (LLaVA 1.5's)."""

SURE_IMAGE_TOKENS = 256
"""A picture costs fewer only if it is small: even Gemma 3's cost this much."""

AUDIO_CHUNK_SECONDS, AUDIO_CHUNK_TOKENS = 30, 375

SURE_AUDIO_CHUNK_TOKENS = 64
"""Tokens of a piece of sound that hardly any encoder stays below."""

SHORTEST_BASE64 = 64
"""Characters of base64; no file is shorter."""

FILE_HEADER_BYTES = 64
"""Bytes within which all formats but JPEG tell their size."""

MOST_JPEG_SEGMENTS = 32
"""Of a JPEG that are passed on the way to its size."""

MOST_MEDIA_FILES = 4096
"""Files in one prompt that are looked at; the others count as unreadable pictures."""

LONGEST_DATA_URL_TYPE = 128
"""Bytes that stand before `;base64,` in such an address at most."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/_\-\\]{%d}" % SHORTEST_BASE64)

_VALUE = re.compile(rb'"(?:data|multimodal_data)"\s*:\s*(?:\[\s*)?"')

_NEXT = re.compile(rb'"\s*,\s*"')

_SLASHES = bytes.maketrans(b"-_", b"+/")


class MediaCost(NamedTuple):
    """The files in a prompt: how many bytes of it they are, their tokens, the fewest tokens."""

    base64_bytes: int = 0
    tokens: int = 0
    min_tokens: int = 0


def measure_media(data: bytes) -> MediaCost:
    """What of a prompt's JSON is base64, and what that costs.

    Addresses `data:...;base64,` count where they are whole values, not where a text quotes one;
    bare base64 under the keys that APIs have for it (`data`, `multimodal_data`).
    """
    spans: list[tuple[int, int]] = []
    at = data.find(b";base64,")
    while at >= 0:
        start = at + len(b";base64,")
        quote = data.rfind(b'"', max(0, at - LONGEST_DATA_URL_TYPE), at)
        if quote >= 0 and data[quote - 1 : quote] != b"\\" and data.startswith(b"data:", quote + 1):
            end = data.find(b'"', start)
            if end < 0:
                break
            spans.append((start, end))
            start = end
        at = data.find(b";base64,", start)
    for found in _VALUE.finditer(data):
        start = found.end()
        while _BASE64.match(data, start):
            end = data.find(b'"', start)
            if end < 0:
                break
            spans.append((start, end))
            following = _NEXT.match(data, end)
            if following is None:
                break
            start = following.end()
    size = tokens = least = 0
    for number, (start, end) in enumerate(spans):
        costs, surely = (
            file_cost(data, start, end) if number < MOST_MEDIA_FILES else UNREADABLE_IMAGE_COST
        )
        size += end - start
        tokens += costs
        least += surely
    return MediaCost(size, tokens, least)


def is_base64(data: bytes, start: int) -> bool:
    """Whether what stands there may be a file."""
    return _BASE64.match(data, start) is not None


_SOUNDS = (b"RIFF", b"ID3", b"OggS", b"fLaC", b"\xff\xfb", b"\xff\xf3")

UNREADABLE_IMAGE_COST = (UNREADABLE_IMAGE_TOKENS, SURE_IMAGE_TOKENS)


def file_cost(data: bytes, start: int, end: int) -> tuple[int, int]:
    """(tokens, the fewest tokens) of one file whose base64 stands there."""
    if data.find(b"\\", start, end) >= 0:
        # Slashes that are escaped move all that follows: then only the beginning is read.
        data = data[start : min(end, start + 4 * FILE_HEADER_BYTES)].replace(b"\\/", b"/")
        length, start, end = end - start, 0, len(data)
    else:
        length = end - start
    head = _bytes(data, start, end, 0, FILE_HEADER_BYTES)
    if head.startswith(_SOUNDS) and head[8:12] != b"WEBP":
        return _sound(head, length * 3 // 4)
    size = _dimensions(head) or _jpeg(head, data, start, end)
    if size is None or min(size) <= 0:
        return UNREADABLE_IMAGE_COST
    width, height = size
    tokens = -(-width // PIXELS_PER_TOKEN) * -(-height // PIXELS_PER_TOKEN)
    tokens = min(max(tokens, LEAST_IMAGE_TOKENS), MOST_IMAGE_TOKENS)
    return tokens, min(tokens, SURE_IMAGE_TOKENS)


def _sound(head: bytes, size: int) -> tuple[int, int]:
    """The same of sound, by the rate that a WAV tells, else by 128 kbit/s."""
    rate = int.from_bytes(head[28:32], "little") if head[8:12] == b"WAVE" else 16_000
    pieces = max(1, -(-size // (max(rate, 1000) * AUDIO_CHUNK_SECONDS)))
    return pieces * AUDIO_CHUNK_TOKENS, pieces * SURE_AUDIO_CHUNK_TOKENS


def _dimensions(head: bytes) -> tuple[int, int] | None:
    """Width and height in pixels, where a format tells them at its beginning."""
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head.startswith(b"BM") and len(head) >= 26:
        low = int.from_bytes(head[18:22], "little", signed=True)
        return low, abs(int.from_bytes(head[22:26], "little", signed=True))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    """The three kinds of WebP: extended, lossless, lossy (RFC 9649)."""
    kind = head[12:16]
    if kind == b"VP8X":
        return (
            int.from_bytes(head[24:27], "little") + 1,
            int.from_bytes(head[27:30], "little") + 1,
        )
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        return (
            int.from_bytes(head[26:28], "little") & 0x3FFF,
            int.from_bytes(head[28:30], "little") & 0x3FFF,
        )
    return None


def _jpeg(head: bytes, data: bytes, start: int, end: int) -> tuple[int, int] | None:
    """A JPEG tells its size behind other segments, which are passed over unread."""
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    for _ in range(MOST_JPEG_SEGMENTS):
        segment = _bytes(data, start, end, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        kind = segment[1]
        if 0xC0 <= kind <= 0xCF and kind not in {0xC4, 0xC8, 0xCC}:
            return int.from_bytes(segment[7:9]), int.from_bytes(segment[5:7])
        # Bytes that fill up between segments, or a whole segment.
        at += 1 if kind == 0xFF else 2 + int.from_bytes(segment[2:4])
    return None


def _bytes(data: bytes, start: int, end: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` of the file whose base64 stands in `data[start:end]`."""
    first = offset // 3 * 4
    text = data[start + first : min(end, start + first + (count // 3 + 2) * 4)]
    text = text[: len(text) // 4 * 4].translate(_SLASHES)
    try:
        return binascii.a2b_base64(text)[offset % 3 :][:count]
    except binascii.Error:
        return b""
