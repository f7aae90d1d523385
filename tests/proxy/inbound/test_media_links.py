"""URLs that a node might fetch are found in every form, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

from gateway.proxy.inbound.media import find_links, may_have_links
from tests.each_case import each_case


def found(value: Any) -> tuple[list[str], bool]:
    body = json.dumps(value).encode()
    assert may_have_links(body)
    return find_links(body)


REMOTE = "http://169.254.169.254/latest"


@each_case(
    "part",
    [
        {"type": "image_url", "image_url": {"url": REMOTE}},
        {"type": "image_url", "image_url": REMOTE},
        {"type": "video_url", "video_url": {"url": REMOTE}},
        {"type": "input_audio", "input_audio": {"data": REMOTE, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"url": REMOTE}},
        {"type": "input_image", "image_url": REMOTE},
        {"type": "input_file", "file_url": REMOTE},
        {"type": "image", "source": {"type": "url", "url": REMOTE}},
        {"type": "document", "source": {"url": REMOTE}},
        {"type": "tool_result", "content": [{"source": {"type": "url", "url": REMOTE}}]},
    ],
)
def test_a_link_is_found_in_every_form(part: Any) -> None:
    assert found({"messages": [{"content": [part]}]})[0] == [REMOTE]
    assert found({"a": part})[0] == [REMOTE]


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
    assert may_have_links(body)
    assert find_links(body)[0] == ["http://a/"]


@each_case("url", ["file:///etc/passwd", "HTTP://a/", "ftp:x", "httpd.internal/x", " http"])
def test_whatever_a_node_may_fetch_is_a_link(url: str) -> None:
    assert found({"image_url": {"url": url}})[0] == [url]


def test_images_are_seen() -> None:
    data = "data:image/png;base64,QUFB"
    assert found({"type": "image_url", "image_url": {"url": data}}) == ([data], True)
    source = {"type": "base64", "media_type": "image/png", "data": "QUFB"}
    assert found({"type": "image", "source": source}) == ([], True)
    assert found({"multimodal_data": ["QUFB"]}) == ([], True)
    assert found({"multimodal_data": ["http://a/"]}) == (["http://a/"], True)
    assert found({"type": "input_audio", "input_audio": {"data": "QUFB"}}) == ([], False)


def test_a_tools_schema_is_no_image() -> None:
    schema = {
        "type": ["object", "null"],
        "properties": {
            "source": {"type": "string"},
            "image_url": {"type": ["string", "null"], "description": "An address"},
        },
        "required": ["source", "image_url"],
    }
    assert found({"tools": [{"function": {"parameters": schema}}]}) == ([], False)


def test_text_about_links_is_no_link() -> None:
    assert found({"content": 'see "image_url":"http://a/" and "source"'}) == ([], False)
    assert not may_have_links(b'{"messages":[{"role":"user","content":"http://a/"}]}')
