"""The one form of webhooks' URLs, and the strict allow-list by prefixes."""

from __future__ import annotations

import string

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.stored import LONGEST_URL, WebhookUrl
from tests.each_case import each_case


@each_case(
    ("text", "form"),
    [
        ("https://Hooks.Example.org", "https://hooks.example.org/"),
        ("HTTPS://hooks.example.org:443/a", "https://hooks.example.org/a"),
        ("http://hooks.example.org:80/a/", "http://hooks.example.org/a/"),
        ("http://hooks.example.org:443/a", "http://hooks.example.org:443/a"),
        ("https://10.0.0.1:8443/x?a=b%26c", "https://10.0.0.1:8443/x?a=b%26c"),
        ("https://[2001:DB8:0:0::1]/x", "https://[2001:db8::1]/x"),
        ("https://xn--bcher-kva.example/a%C3%A9", "https://xn--bcher-kva.example/a%C3%A9"),
        ("https://h?x=1", "https://h/?x=1"),
    ],
)
def test_a_url_has_one_form(text: str, form: str) -> None:
    assert str(WebhookUrl.parse(text)) == form
    assert str(WebhookUrl.parse(form)) == form


@each_case(
    "text",
    [
        "", "hooks.example.org", "//hooks.example.org/", "ftp://hooks.example.org/",
        "file:///etc/passwd", "https:///a", "https:hooks.example.org/a",
        "https:/hooks.example.org/a", "https://user@hooks.example.org/",
        "https://user:pass@hooks.example.org/", "https://hooks.example.org@evil.example/",
        "https://hooks.example.org%40evil.example/", "https://hooks.example.org\\@evil.example/",
        "https://hooks.example.org\\.evil.example/", "https://hooks.example.org /",
        " https://hooks.example.org/", "https://hooks.example.org/\n",
        "https://hooks.example.org/a\tb", "https://hooks.example.org/a#b",
        "https://hooks.example.org./", "https://.hooks.example.org/", "https://hooks..example.org/",
        "https://-hooks.example.org/", "https://hooks.example.org:/",
        "https://hooks.example.org:0/", "https://hooks.example.org:65536/",
        "https://hooks.example.org:+443/", "https://hooks.example.org:0443/",
        "https://hooks.example.org:443:443/", "https://\u217etp.example/", "https://\uff0e/",
        "https://h\u00e9.example/", "https://127.1/", "https://2130706433/", "https://0x7f000001/",
        "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://127.0.0.01/", "https://1.2.3.4.5/",
        "https://[::1/", "https://::1/", "https://[::1]x/", "https://[fe80::1%25eth0]/",
        "https://[fe80::1%eth0]/", "https://[127.0.0.1]/", "https://h/a//b", "https://h//a",
        "https://h/./a", "https://h/a/..", "https://h/a/../b", "https://h/a/%2e%2e/b",
        "https://h/a/%2E./b", "https://h/a%2fb", "https://h/a%5Cb", "https://h/a\\b",
        "https://h/a%00", "https://h/a%0d%0ahost: evil", "https://h/a%41", "https://h/a%25b",
        "https://h/a%", "https://h/a%4", "https://h/a%zz", "https://h/..;/a", "https://h/a;b",
        "https://h/a?b c", "https://h/a?%zz", "https://h/" + "a" * LONGEST_URL,
    ],
)  # fmt: skip
def test_what_two_programs_could_read_differently_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|has|longer") as caught:
        WebhookUrl.parse(text)
    assert "evil" not in str(caught.value)
    assert "pass" not in str(caught.value).replace("password", "")


@each_case(
    ("target", "url", "covered"),
    [
        ("https://h/hooks", "https://h/hooks", True),
        ("https://h/hooks", "https://h/hooks/", True),
        ("https://h/hooks", "https://h/hooks/a/b?c=d", True),
        ("https://h/hooks", "https://h/hooks?c=d", True),
        ("https://h/hooks", "https://h/hooksy", False),
        ("https://h/hooks", "https://h/hook", False),
        ("https://h/hooks", "https://h/Hooks/a", False),
        ("https://h/hooks/", "https://h/hooks", False),
        ("https://h/hooks/", "https://h/hooks/a", True),
        ("https://h", "https://h/any", True),
        ("https://h", "https://H:443/any", True),
        ("https://h", "http://h/any", False),
        ("https://h", "https://h:8443/any", False),
        ("https://h", "https://h.evil.example/any", False),
        ("https://h", "https://evil-h/any", False),
        ("https://h/a?k=1", "https://h/a?k=1", True),
        ("https://h/a?k=1", "https://h/a?k=1&k=2", False),
        ("https://h/a?k=1", "https://h/a/b?k=1", False),
    ],
)
def test_a_target_covers_itself_and_what_is_below(target: str, url: str, covered: bool) -> None:
    assert WebhookUrl.parse(target).covers(WebhookUrl.parse(url)) is covered


_PIECES = st.sampled_from(
    [
        *(
            "https://h.example/hooks", "https://", "http://", "h.example", "/hooks", "/", "//",
            "/../",
        ),
        *("/../", "..", ".", "%2e", "%2f", "%5c", "\\", "@", ":", ":443", ":8443", "#", "?", ";"),
        *(
            "%C3", "evil.example", "[", "]", "::1", "127.0.0.1", "0x7f", "\u2024", "\t", " ", "%00",
            "%25",
        ),
        *("a", "A", "~", "=", "&"),
    ]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=8).map("".join) | st.text(string.printable, max_size=40))
def test_whatever_is_covered_goes_to_the_host_and_below_the_path(text: str) -> None:
    target = WebhookUrl.parse("https://h.example/hooks")
    try:
        url = WebhookUrl.parse(text)
    except ValueError:
        return
    assert str(WebhookUrl.parse(str(url))) == str(url)
    # What an HTTP client makes of it.
    for seen in (httpx.URL(str(url)), httpx.URL(text)):
        assert (seen.scheme, seen.host) == (url.scheme, url.host)
        assert seen.port in {url.port, None}
        assert seen.raw_path.decode() == f"{url.path}{url.query}"
        assert seen.userinfo == b""
        if target.covers(url):
            assert seen.host == "h.example"
            assert seen.path == "/hooks" or seen.path.startswith("/hooks/")
            # Joining and normalising lead nowhere else.
            assert httpx.URL("https://h.example/x").join(seen).raw_path == seen.raw_path


@given(st.lists(st.sampled_from(["a", "b~", "c%C3%A9", "hooks", "x.y"]), max_size=5))
def test_every_path_below_is_covered(segments: list[str]) -> None:
    target = WebhookUrl.parse("https://h.example:8443/hooks")
    below = WebhookUrl.parse("/".join(["https://H.example:8443/hooks", *segments]))
    assert target.covers(below)
