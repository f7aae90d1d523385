"""Images and audio in a prompt: their cost, and the URLs that a node would fetch."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.media import (
    AUDIO_CHUNK_TOKENS,
    MOST_IMAGE_TOKENS,
    SURE_IMAGE_TOKENS,
    UNREADABLE_IMAGE_TOKENS,
    MediaCost,
    find_links,
    may_have_links,
    measure_media,
)
from tests.each_case import each_case
from tests.forward.pictures import bmp, data_url, gif, jpeg, png, wav

IMAGES = [
    png(560, 280), gif(560, 280), bmp(560, 280), jpeg(560, 280), jpeg(560, 280, before=1),
    jpeg(560, 280, before=60_000, marker=0xC0),
]  # fmt: skip


WEBP = b"RIFF\xd0\0\0\0WEBPVP8 \xc8\0\0\0" + bytes(200)  # llama.cpp's server reads none


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def found(value: Any) -> MediaCost:
    return measure_media(json.dumps(value).encode())


@each_case("data", IMAGES)
def test_an_image_costs_a_token_per_patch(data: bytes) -> None:
    for padding in range(3):
        url = data_url(data + bytes(padding), "image/any")
        media = found([{"type": "image_url", "image_url": {"url": url}}])
        assert media.tokens == 20 * 10
        assert media.base64_bytes == len(url) - len("data:image/any;base64,")


@each_case(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(png(560, 280))}},
        {"type": "image_url", "image_url": data_url(png(560, 280))},
        {"type": "input_image", "image_url": data_url(png(560, 280))},
        {"source": {"type": "base64", "data": text_of(png(560, 280)), "media_type": "image/png"}},
        {"prompt_string": "see", "multimodal_data": [text_of(png(560, 280))]},
    ],
)
def test_images_are_found_in_every_apis_form(part: Any) -> None:
    assert found([part]).tokens == 200
    assert found({"content": [part, {"type": "text", "text": "and"}, part]}).tokens == 400


TALL = [text_of(png(28, 28 * many)) for many in (10, 20, 30)]


def audio(data: bytes) -> list[dict[str, Any]]:
    return [{"type": "input_audio", "input_audio": {"data": text_of(data)}}]


@each_case(
    ("body", "tokens"),
    [
        (json.dumps({"data": TALL}, indent=1), 60),
        (json.dumps({"url": data_url(gif(560, 280) + b"\xff" * 3000)}).replace("/", "\\/"), 200),
        (json.dumps(data_url(png(100_000, 100_000))), MOST_IMAGE_TOKENS),
        (json.dumps(data_url(png(1, 1))), 8),
        (json.dumps(data_url(b"\xff\xd8" + b"\xff\xe1\x00\x02" * 999)), UNREADABLE_IMAGE_TOKENS),
        (json.dumps(audio(wav(29, 2000))), AUDIO_CHUNK_TOKENS),
        (json.dumps(audio(wav(31, 2000))), 2 * AUDIO_CHUNK_TOKENS),
        (json.dumps([{"data": text_of(b"ID3" + bytes(16_000 * 40))}]), 2 * AUDIO_CHUNK_TOKENS),
    ],
)
def test_media_cost_by_their_size_within_bounds(body: str, tokens: int) -> None:
    assert measure_media(body.encode()).tokens == tokens


@each_case(("side", "fewest"), [(2000, SURE_IMAGE_TOKENS), (56, 8)])
def test_an_image_may_cost_less(side: int, fewest: int) -> None:
    assert found(data_url(png(side, side))).min_tokens == fewest


@each_case(
    "item",
    [
        {"text": f'<img src="{data_url(png(560, 280))}">'},
        {"text": f"see {data_url(png(560, 280))}"},
        {"text": json.dumps({"data": text_of(bytes(999))})},
        {"data": "the quick brown fox jumps over the lazy dog " * 20},
        {"data": {"type": "object"}},
        {"data": "short"},
    ],
)
def test_quoted_and_other_data_are_no_image(item: dict[str, Any]) -> None:
    assert found([item]) == MediaCost()


@each_case(
    "data",
    [bytes(3000), b"\xff\xd8\xff" + bytes(3000), b"<svg>" + 99 * b"x", png(0, 0), b"\x89PNG", WEBP],
)
def test_an_image_of_unreadable_size_costs_a_usual_one(data: bytes) -> None:
    assert found(data_url(data)) == (len(text_of(data)), UNREADABLE_IMAGE_TOKENS, SURE_IMAGE_TOKENS)


@each_case(
    "body",
    [
        b";base64," * 500_000, b'"data:;base64,' * 300_000, b'"data"' + b" " * 4_000_000,
        b'"data":' * 500_000, b'"data":["' + b"A" * 64 + b'","' * 1_000_000,
        b'{"data":"' + b"A" * 4_000_000, b'{"data":"' + b"\\/" * 2_000_000 + b'"',
    ],
)  # fmt: skip
def test_measuring_takes_time_linear_in_the_length(body: bytes) -> None:
    began = time.process_time()
    measure_media(body)
    # Half a second; hours if the time grew with the square of the length.
    assert time.process_time() - began < 20


@given(st.binary(max_size=300))
def test_any_bytes_cost_something_sane(data: bytes) -> None:
    for start in (b"", b"\xff\xd8\xff", b"RIFF", b"RIFF0000WEBPVP8 ", b"BM", b"\x89PNG\r\n\x1a\n"):
        media = found(data_url(start + data))
        assert 8 <= media.tokens <= max(MOST_IMAGE_TOKENS, 2 * AUDIO_CHUNK_TOKENS)
        assert 0 < media.min_tokens <= media.tokens


def links_of(value: Any) -> tuple[list[str], bool]:
    body = json.dumps(value).encode()
    assert may_have_links(body)
    links, has_images = find_links(body)
    return [link.url for link in links], has_images


REMOTE = "http://169.254.169.254/latest"


LINKS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": REMOTE}},
    {"type": "image_url", "image_url": REMOTE},
    {"type": "video_url", "video_url": {"url": REMOTE}},
    {"type": "input_audio", "input_audio": {"data": REMOTE, "format": "wav"}},
    {"type": "input_audio", "input_audio": {"url": REMOTE}},
    {"type": "input_image", "image_url": REMOTE},
    {"type": "input_file", "file_url": REMOTE},
    {"type": "image", "source": {"type": "url", "url": REMOTE}},
    {"type": "document", "source": {"url": REMOTE}},
    {"type": "document", "source": {"type": "content", "content": [{"image_url": REMOTE}]}},
    {"type": "tool_result", "content": [{"source": {"type": "url", "url": REMOTE}}]},
]
"""Every form of a link."""


def bodies_with(part: Any) -> list[dict[str, Any]]:
    """Bodies with this part wherever a server looks for links."""
    return [
        {"messages": [{"content": [part]}]},
        {"messages": [{"role": "tool", "content": [part]}]},
        {"messages": [{"content": [{"type": "tool_result", "content": [part]}]}]},
        {"input": [{"type": "message", "content": [part]}]},
        {"input": [{"type": "function_call_output", "output": [part]}]},
        {"input": [{"type": "computer_call_output", "output": part}]},
        {"documents": [{"content": [part]}]},
    ]


@each_case("part", LINKS)
def test_a_link_is_found_in_every_form(part: Any) -> None:
    for body in bodies_with(part):
        assert links_of(body)[0] == [REMOTE]


SOURCE = {"type": "text", "media_type": "text/plain", "data": f"See: {REMOTE}"}
NO_LINKS: list[dict[str, Any]] = [
    {"image_url": REMOTE},
    {"type": "image", "image_url": {"url": REMOTE}},
    {"source": {"type": "url", "url": REMOTE}},
    {"content": [{"type": "image_url", "image_url": {"url": REMOTE}}]},
    {"multimodal_data": [REMOTE]},
    {"server_url": REMOTE},
]


def bodies_with_elsewhere(elsewhere: Any) -> list[dict[str, Any]]:
    """Arguments and schemas of tools, and what clients keep beside a prompt: no server looks."""
    call = {"type": "tool_use", "id": "1", "name": "open", "input": elsewhere}
    written = {"type": "function", "function": {"name": "open", "arguments": elsewhere}}
    schema = {"type": "object", "properties": elsewhere, "default": elsewhere}
    return [
        {"messages": [{"role": "assistant", "content": [call]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [written]}]},
        {"input": [{"type": "function_call", "name": "open", "arguments": elsewhere}]},
        {"input": [{"type": "web_search_call", "action": elsewhere}]},
        {"tools": [{"type": "function", "function": {"parameters": schema}}]},
        {"tools": [{"name": "open", "input_schema": schema}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"metadata": elsewhere},
        {"chat_template_kwargs": elsewhere},
    ]


@each_case("elsewhere", NO_LINKS)
def test_what_no_server_looks_at_is_no_link(elsewhere: Any) -> None:
    for body in bodies_with_elsewhere(elsewhere):
        assert find_links(json.dumps(body).encode()) == ([], False)
    for kind in ("text", "base64"):  # a source that holds its text or file
        part = {"type": "document", "source": SOURCE | {"type": kind}}
        for one in (part, {"type": "tool_result", "content": [part]}):
            assert links_of({"messages": [{"content": [one]}]}) == ([], False)


@each_case(
    "body",
    [
        b'{"image\\u005furl":"http://a/"}',
        b'{"\\u0069mage_url":{"u\\u0072l":"http://a/"}}',
        b'{"sourc\\u0065":{"type":"url","url":"http://a/"}}',
        b'{"image_url":"\\u0068ttp://a/"}',
        b'{"image_url":"http:\\/\\/a\\/"}',
    ],
)
def test_an_escape_hides_no_link(body: bytes) -> None:
    for place in (b'{"input":[%b]}', b'{"\\u006dessages":[{"c\\u006fntent":[%b]}]}'):
        assert may_have_links(place % body)
        assert [link.url for link in find_links(place % body)[0]] == ["http://a/"]


@each_case(
    "url",
    [
        "http://a/x.png", "HTTP://a/", "https://a/", "http:/a", "file:///etc/passwd", "ftp:x",
        "javascript:x", " http://a", "httpd.internal/x", " http",
    ],
)  # fmt: skip
def test_whatever_a_node_may_fetch_is_a_link(url: str) -> None:
    assert links_of({"input": [{"image_url": {"url": url}}]})[0] == [url]


def test_images_are_seen() -> None:
    data = "data:image/png;base64,QUFB"
    source = {"type": "base64", "media_type": "image/png", "data": "QUFB"}
    for part, links, is_image in (
        ({"type": "image_url", "image_url": {"url": data}}, [data], True),
        ({"type": "image", "source": source}, [], True),
        ({"multimodal_data": ["QUFB"]}, [], True),
        ({"multimodal_data": ["http://a/"]}, ["http://a/"], True),
        ({"type": "input_audio", "input_audio": {"data": "QUFB"}}, [], False),
    ):
        assert links_of({"prompt": part}) == links_of({"prompt": [part]}) == (links, is_image)


def test_text_about_links_is_no_link() -> None:
    assert links_of({"content": 'see "image_url":"http://a/" and "source"'}) == ([], False)
    assert not may_have_links(b'{"messages":[{"role":"user","content":"http://a/"}]}')
