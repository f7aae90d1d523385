"""Images and audio in a prompt: their cost in tokens, and the URLs that a node would fetch.

The cost is estimated from the first bytes of the base64 text. Encoders differ. llama.cpp's for the
Qwen-VL family makes a token of each 28 x 28 pixels, 8 to 4,096 in all (`clip.cpp`,
`set_limit_image_tokens(8, 4096)`), those of Pixtral and Mistral 3 much the same; Gemma 3 makes 256
of any image, LLaVA 1.5 576 (24 x 24). So the estimate goes by the image's size, and a model's
`usage` corrects it (`schedule/core/demand_model.py`). Audio encoders work on chunks of 30 s:
Voxtral makes 375 tokens of each.
"""

from __future__ import annotations

import binascii
import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gateway import errors
from gateway.api.json_values import JSON_ERRORS, VALUE_DECODER

PIXELS_PER_TOKEN = 28  # Of an image's width or height, covered by one token
LEAST_IMAGE_TOKENS, MOST_IMAGE_TOKENS = 8, 4096
UNREADABLE_IMAGE_TOKENS = 576  # Tokens of an image whose size cannot be read (LLaVA 1.5's)
SURE_IMAGE_TOKENS = 256  # Only a small image costs fewer: even Gemma 3's cost this much
AUDIO_CHUNK_SECONDS, AUDIO_CHUNK_TOKENS = 30, 375
SURE_AUDIO_CHUNK_TOKENS = 64  # Tokens of a chunk of audio that hardly any encoder stays below
SHORTEST_BASE64 = 64  # Characters; no file in base64 is shorter
FILE_HEADER_BYTES = 64  # Bytes within which all formats but JPEG have their size
MOST_JPEG_SEGMENTS = 32  # Segments of a JPEG that are skipped on the way to its size
# Files in one prompt that are measured; the others count as unreadable images.
MOST_MEDIA_FILES = 4096
LONGEST_DATA_URL_TYPE = 128  # Bytes before `;base64,` in a data URL at most
_BASE64 = re.compile(rb"[A-Za-z0-9+/_\-\\]{%d}" % SHORTEST_BASE64)
_BASE64_KEY = re.compile(rb'"(?:data|multimodal_data)"\s*:\s*(?:\[\s*)?"')
_NEXT_ITEM = re.compile(rb'"\s*,\s*"')
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class MediaCost(NamedTuple):
    """The files in a prompt: bytes of their base64, estimated tokens, fewest tokens."""

    base64_bytes: int = 0
    tokens: int = 0
    min_tokens: int = 0


def measure_media(data: bytes) -> MediaCost:
    """The cost of all base64 in a prompt's JSON.

    A data URL (`data:...;base64,`) counts where it is a whole value, not where a text quotes one;
    bare base64 counts under the keys that APIs have for it (`data`, `multimodal_data`).
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
    for found in _BASE64_KEY.finditer(data):
        start = found.end()
        while _BASE64.match(data, start):
            end = data.find(b'"', start)
            if end < 0:
                break
            spans.append((start, end))
            following = _NEXT_ITEM.match(data, end)
            if following is None:
                break
            start = following.end()
    base64_bytes = tokens = min_tokens = 0
    for number, (start, end) in enumerate(spans):
        cost, min_cost = (
            file_cost(data, start, end) if number < MOST_MEDIA_FILES else UNREADABLE_IMAGE_COST
        )
        base64_bytes += end - start
        tokens += cost
        min_tokens += min_cost
    return MediaCost(base64_bytes, tokens, min_tokens)


def is_base64(data: bytes, start: int) -> bool:
    """Whether a file in base64 may begin at `start`."""
    return _BASE64.match(data, start) is not None


_AUDIO_MAGIC = (b"RIFF", b"ID3", b"OggS", b"fLaC", b"\xff\xfb", b"\xff\xf3")
UNREADABLE_IMAGE_COST = (UNREADABLE_IMAGE_TOKENS, SURE_IMAGE_TOKENS)


def file_cost(data: bytes, start: int, end: int) -> tuple[int, int]:
    """(tokens, fewest tokens) of the file whose base64 is `data[start:end]`."""
    if data.find(b"\\", start, end) >= 0:
        # Escaped slashes shift all that follows: then only the beginning is read.
        data = data[start : min(end, start + 4 * FILE_HEADER_BYTES)].replace(b"\\/", b"/")
        length, start, end = end - start, 0, len(data)
    else:
        length = end - start
    head = _decode_base64(data, start, end, 0, FILE_HEADER_BYTES)
    if head.startswith(_AUDIO_MAGIC) and head[8:12] != b"WEBP":
        return _audio_cost(head, length * 3 // 4)
    size = _dimensions(head) or _jpeg_dimensions(head, data, start, end)
    if size is None or min(size) <= 0:
        return UNREADABLE_IMAGE_COST
    width, height = size
    tokens = -(-width // PIXELS_PER_TOKEN) * -(-height // PIXELS_PER_TOKEN)
    tokens = min(max(tokens, LEAST_IMAGE_TOKENS), MOST_IMAGE_TOKENS)
    return tokens, min(tokens, SURE_IMAGE_TOKENS)


def _audio_cost(head: bytes, size: int) -> tuple[int, int]:
    """(tokens, fewest tokens) of audio, by a WAV's byte rate, else by 128 kbit/s."""
    rate = int.from_bytes(head[28:32], "little") if head[8:12] == b"WAVE" else 16_000
    chunks = max(1, -(-size // (max(rate, 1000) * AUDIO_CHUNK_SECONDS)))
    return chunks * AUDIO_CHUNK_TOKENS, chunks * SURE_AUDIO_CHUNK_TOKENS


def _dimensions(head: bytes) -> tuple[int, int] | None:
    """Width and height in pixels, for formats that have them at the beginning."""
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head.startswith(b"BM") and len(head) >= 26:
        low = int.from_bytes(head[18:22], "little", signed=True)
        return low, abs(int.from_bytes(head[22:26], "little", signed=True))
    return None


def _jpeg_dimensions(head: bytes, data: bytes, start: int, end: int) -> tuple[int, int] | None:
    """A JPEG has its size after other segments, which are skipped unread."""
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    for _ in range(MOST_JPEG_SEGMENTS):
        segment = _decode_base64(data, start, end, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        kind = segment[1]
        if 0xC0 <= kind <= 0xCF and kind not in {0xC4, 0xC8, 0xCC}:
            return int.from_bytes(segment[7:9]), int.from_bytes(segment[5:7])
        # Skip a fill byte between segments, or a whole segment.
        at += 1 if kind == 0xFF else 2 + int.from_bytes(segment[2:4])
    return None


def _decode_base64(data: bytes, start: int, end: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` of the file whose base64 is `data[start:end]`."""
    first = offset // 3 * 4
    text = data[start + first : min(end, start + first + (count // 3 + 2) * 4)]
    text = text[: len(text) // 4 * 4].translate(_FROM_URL_SAFE)
    try:
        return binascii.a2b_base64(text)[offset % 3 :][:count]
    except binascii.Error:
        return b""


MEDIA_KEYS = frozenset(
    {"image_url", "video_url", "audio_url", "file_url", "input_audio", "input_video", "input_image"}
)

# Names of what may hold a link in a message's or a tool result's part.
LINK_KEYS = frozenset({*MEDIA_KEYS, "source", "multimodal_data"})
# A tuple, not a set: a foreign `type` may be a list, which cannot be looked up in one.
IMAGE_TYPES = ("image_url", "input_image", "image")
# Types of a `source` that holds what it stands for; a tuple as above.
INLINE_TYPES = ("base64", "text")

MEDIA_FIELDS = frozenset(
    {
        "messages", "input", "prompt", "content", "documents", "query", "system", "instructions",
    }
)  # fmt: skip
"""The body's fields in which servers look for media: in lists, objects, and their `PART_KEYS`.

Nowhere else: a tool's schema, its arguments and `metadata` may hold the same names.
"""

# What holds the parts of a message or of a tool's result.
PART_KEYS = frozenset({"content", "output"})
# Fields with tool servers, which a node calls whatever their address looks like.
SERVER_KEYS = {"tools": "server_url", "mcp_servers": "url"}


class Link(NamedTuple):
    """A URL that a node might fetch."""

    url: str
    key: str
    """The name of its place: a media key, `source`, `multimodal_data`, or one of `SERVER_KEYS`."""


def may_have_links(body: bytes) -> bool:
    """Whether `body` could hold an image or a link to one; an escape could spell anything."""
    # A search for a single byte is several times as fast as one for a word, so it comes first. And
    # `find`, since `in` first asks whether its operand is a number, which costs as much again.
    return (
        (
            body.find(b"_") >= 0
            and (
                body.find(b"_url") >= 0
                or body.find(b"input_") >= 0
                or body.find(b"multimodal_data") >= 0
                or body.find(b"mcp_servers") >= 0
            )
        )
        or (body.find(b"\\") >= 0 and body.find(b"\\u") >= 0)
        or body.find(b'"source"') >= 0
    )


def find_links(body: bytes) -> tuple[list[Link], bool]:
    """The URLs that a node might fetch for this body, and whether it holds an image.

    Raises: GatewayError 400.
    """
    try:
        fields = VALUE_DECODER.decode(body)
    except JSON_ERRORS:
        raise errors.invalid_json("it can't be read") from None
    links: list[Link] = []
    if not isinstance(fields, dict):
        return links, False
    for field, key in SERVER_KEYS.items():
        listed = fields.get(field)
        for item in listed if isinstance(listed, list) else ():
            url = item.get(key) if isinstance(item, dict) else None
            if isinstance(url, str):
                links.append(Link(url, field))
    has_images = False
    pending: list[Any] = [value for name, value in fields.items() if name in MEDIA_FIELDS]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            has_images = has_images or item.get("type") in IMAGE_TYPES
            has_images = has_images or isinstance(item.get("multimodal_data"), list | dict)
            for key, inner in item.items():
                if key in PART_KEYS:
                    pending.append(inner)
                elif key in LINK_KEYS:
                    links += [Link(url, key) for url in _urls_in(key, inner)]
                    if key == "source" and isinstance(inner, dict):
                        pending.append(inner.get("content"))
    return links, has_images


def _urls_in(key: str, value: Any) -> list[str]:
    """The URLs in the value of one of `LINK_KEYS`."""
    if key == "multimodal_data":
        texts = value if isinstance(value, list) else ()
        return [text for text in texts if isinstance(text, str) and ":" in text]
    if key == "source" and not (isinstance(value, dict) and value.get("type") not in INLINE_TYPES):
        return []
    # Of a media part the text itself, or its `url` and `data`.
    if isinstance(value, str):
        return [value] if may_be_url(value) else []
    if isinstance(value, dict):
        url, data = value.get("url"), value.get("data")
        found = [url] if isinstance(url, str) and may_be_url(url) else []
        return [*found, data] if isinstance(data, str) and ":" in data else found
    return []


def may_be_url(text: str) -> bool:
    """Whether a node might read `text` as a URL."""
    # Some HTTP clients, curl's library among them, accept a URL without `://`.
    return ":" in text or text.lstrip()[:4].lower() == "http"


def check_links(links: list[Link], hosts: tuple[str, ...], prompt_field: str | None) -> None:
    """Refuse URLs that a node would have to fetch, but for those of `hosts`.

    Raises: GatewayError 400.
    """
    for url, key in links:
        if url.startswith("data:") or _is_allowed(url, hosts):
            continue
        allow = "An operator can allow hosts in 'limits.media_hosts'."
        if key in SERVER_KEYS:
            raise errors.invalid_request(
                f"'{SERVER_KEYS[key]}' in '{key}' names a tool server, which the node itself would "
                f"call. {allow}",
                key,
            )
        field = prompt_field or "messages"
        raise errors.invalid_request(
            f"'{key}' in '{field}' holds a URL, which the node itself would have to fetch: only "
            f"'data:' URLs may be sent for images and files. {allow}",
            field,
        )


def _is_allowed(link: str, hosts: tuple[str, ...]) -> bool:
    """Whether a node may fetch it; never if URL parsers may disagree about its host."""
    if _AMBIGUOUS_URL.search(link):
        return False
    try:
        parts = urlsplit(link)
        return parts.scheme in {"http", "https"} and parts.hostname in hosts
    except ValueError:
        return False


_AMBIGUOUS_URL = re.compile(r"[^!-~]|[\\@]")
