from __future__ import annotations

import httpx
import pytest

from gateway.local.download import (
    ModelUrlError,
    cache_key,
    file_name,
    is_url,
    parse_model_url,
    part_urls,
    printable,
    redirect_target,
    same_origin,
)
from tests.each_case import each_case

SECRET = "https://user:hunter2@models.example:8443/a/m.gguf?X-Signature=hunter2#hunter2"


@each_case(
    ("text", "is_address"),
    [
        ("https://h/m.gguf", True), ("HTTP://h/m", True), ("ftp://h/m.gguf", True),
        ("m.gguf", False), ("/m/https.gguf", False), ("C:\\m.gguf", False), ("a:b/m", False),
    ],
)  # fmt: skip
def test_what_has_a_scheme_is_an_address_and_anything_else_a_file(
    text: str, is_address: bool
) -> None:
    assert is_url(text) is is_address


@each_case(
    "text",
    [
        "http://models.example/m.gguf", "http://192.168.1.5/m.gguf", "ftp://models.example/m.gguf",
        "file:///etc/passwd", "https://", "https:///m.gguf", "https://h:0/m.gguf",
        "https://h:99999/m.gguf", "https://h:port/m.gguf", "https://h/m\n.gguf",
        "https://h/" + "x" * 9000,
    ],
)  # fmt: skip
def test_addresses_that_are_not_https_or_not_valid_are_refused(text: str) -> None:
    with pytest.raises(ModelUrlError):
        parse_model_url(text)


@pytest.mark.parametrize("host", ["127.0.0.1:81", "[::1]", "localhost"])
def test_http_is_allowed_where_nobody_can_listen_in(host: str) -> None:
    assert parse_model_url(f"http://{host}/m.gguf").scheme == "http"


def test_what_is_printed_holds_no_secret() -> None:
    url = parse_model_url(SECRET)
    assert printable(url) == "https://models.example:8443/a/m.gguf?..."
    assert "hunter2" not in cache_key(url)
    for text in (SECRET.replace("https", "http"), SECRET.replace(":8443", ":84430")):
        with pytest.raises(ModelUrlError) as refused:
            parse_model_url(text)
        assert "hunter2" not in str(refused.value)


@each_case(
    ("path", "name"),
    [
        ("/a/Model-Q4_K_M.gguf", "Model-Q4_K_M.gguf"),
        ("/a/Model.GGUF?download=true", "Model.gguf"),
        ("/a/..%2F..%2Fetc%2Fpasswd", "passwd.gguf"),
        ("/", "model.gguf"),
        ("/...gguf", "gguf.gguf"),
        ("/%00%1b[31m.gguf", "31m.gguf"),
        ("/" + "x" * 500 + ".gguf", "x" * 120 + ".gguf"),
        ("/sha256-abc", "sha256-abc.gguf"),
    ],
)
def test_the_files_name_is_safe(path: str, name: str) -> None:
    assert file_name(parse_model_url(f"https://h{path}")) == name


def test_a_split_model_has_an_address_for_each_file() -> None:
    first = parse_model_url("https://h/a%20b/m-00001-of-00003.gguf?sig=a%2Fb")
    assert [str(url) for url in part_urls(first)] == [
        f"https://h/a%20b/m-0000{number}-of-00003.gguf?sig=a%2Fb" for number in (1, 2, 3)
    ]
    later = parse_model_url("https://h/a%20b/m-00002-of-00003.gguf?sig=a%2Fb")
    assert part_urls(later) == part_urls(first)


@pytest.mark.parametrize("parts", ["00000", "99999"])
def test_a_split_model_of_no_or_endless_files_is_refused(parts: str) -> None:
    with pytest.raises(ModelUrlError, match="files"):
        part_urls(parse_model_url(f"https://h/m-00001-of-{parts}.gguf"))


def test_two_addresses_share_a_folder_only_where_they_are_one() -> None:
    key = cache_key(parse_model_url("https://h/m.gguf"))
    assert key == cache_key(parse_model_url("https://me:pw@h/m.gguf#x"))
    assert key != cache_key(parse_model_url("https://h/m.gguf?version=2"))


class TestRedirects:
    HERE = httpx.URL("https://models.example/m.gguf?token=hunter2")

    @each_case(
        ("location", "target", "is_same"),
        [
            ("/cdn/m.gguf", "https://models.example/cdn/m.gguf", True),
            ("https://models.example:443/m", "https://models.example/m", True),
            ("https://models.example:444/m", "https://models.example:444/m", False),
            ("https://cdn.example/m", "https://cdn.example/m", False),
            ("//other.example/m", "https://other.example/m", False),
        ],
    )
    def test_another_host_or_port_is_another_origin(
        self, location: str, target: str, is_same: bool
    ) -> None:
        found = redirect_target(self.HERE, location)
        assert (str(found), same_origin(self.HERE, found)) == (target, is_same)

    @each_case(
        "location",
        ["http://cdn.example/m?key=hunter2", "http://127.0.0.1/m", "file:///x", "", "data:,x"],
    )
    def test_one_that_leaves_https_is_refused_without_its_secrets(self, location: str) -> None:
        with pytest.raises(ModelUrlError) as refused:
            redirect_target(self.HERE, location)
        assert "hunter2" not in str(refused.value)

    def test_loopback_may_redirect_to_loopback(self) -> None:
        here = httpx.URL("http://127.0.0.1:81/m.gguf")
        assert redirect_target(here, "http://127.0.0.1:82/m.gguf").port == 82
