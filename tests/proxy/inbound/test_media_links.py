"""URLs that a node might fetch are found in every form, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

from gateway.proxy.inbound.media import find_links, may_have_links
from tests.each_case import each_case


def found(value: Any) -> tuple[list[str], bool]:
    body = json.dumps(value).encode()
    assert may_have_links(body)
    links, has_images = find_links(body)
    return [link.url for link in links], has_images


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
        {"type": "document", "source": {"type": "content", "content": [{"image_url": REMOTE}]}},
        {"type": "tool_result", "content": [{"source": {"type": "url", "url": REMOTE}}]},
    ],
)
def test_a_link_is_found_in_every_form(part: Any) -> None:
    for body in (
        {"messages": [{"content": [part]}]},
        {"messages": [{"role": "tool", "content": [part]}]},
        {"messages": [{"content": [{"type": "tool_result", "content": [part]}]}]},
        {"input": [{"type": "message", "content": [part]}]},
        {"input": [{"type": "function_call_output", "output": [part]}]},
        {"input": [{"type": "computer_call_output", "output": part}]},
        {"documents": [{"content": [part]}]},
    ):
        assert found(body)[0] == [REMOTE]


def test_a_source_that_holds_its_text_or_file_is_no_link() -> None:
    for kind in ("text", "base64"):
        source = {"type": kind, "media_type": "text/plain", "data": f"See: {REMOTE}"}
        part = {"type": "document", "source": source}
        for one in (part, {"type": "tool_result", "content": [part]}):
            assert found({"messages": [{"content": [one]}]}) == ([], False)


@each_case(
    "elsewhere",
    [
        {"image_url": REMOTE},
        {"type": "image", "image_url": {"url": REMOTE}},
        {"source": {"type": "url", "url": REMOTE}},
        {"content": [{"type": "image_url", "image_url": {"url": REMOTE}}]},
        {"multimodal_data": [REMOTE]},
        {"server_url": REMOTE},
    ],
)
def test_what_no_server_looks_at_is_no_link(elsewhere: Any) -> None:
    """Arguments and schemas of tools, and what clients keep beside a prompt."""
    call = {"type": "tool_use", "id": "1", "name": "open", "input": elsewhere}
    written = {"type": "function", "function": {"name": "open", "arguments": elsewhere}}
    schema = {"type": "object", "properties": elsewhere, "default": elsewhere}
    for body in (
        {"messages": [{"role": "assistant", "content": [call]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [written]}]},
        {"input": [{"type": "function_call", "name": "open", "arguments": elsewhere}]},
        {"input": [{"type": "web_search_call", "action": elsewhere}]},
        {"tools": [{"type": "function", "function": {"parameters": schema}}]},
        {"tools": [{"name": "open", "input_schema": schema}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"metadata": elsewhere},
        {"chat_template_kwargs": elsewhere},
    ):
        assert find_links(json.dumps(body).encode()) == ([], False)


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


@each_case("url", ["file:///etc/passwd", "HTTP://a/", "ftp:x", "httpd.internal/x", " http"])
def test_whatever_a_node_may_fetch_is_a_link(url: str) -> None:
    assert found({"input": [{"image_url": {"url": url}}]})[0] == [url]


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
        assert found({"prompt": part}) == found({"prompt": [part]}) == (links, is_image)


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
