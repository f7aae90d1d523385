"""The one form of webhooks' URLs, and the strict allow-list by prefixes."""

from __future__ import annotations

import base64
import json
import string
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import Settings, changed_restart_keys, masked_settings
from gateway.config.stored import LONGEST_URL, StoreSettings, WebhookUrl, masked_store_url
from tests.config.conftest import LoadSettings, Problems
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
    ("target", "covered", "not_covered"),
    [
        ("https://h/hooks",
         ("https://h/hooks", "https://h/hooks/", "https://h/hooks/a/b?c=d", "https://h/hooks?c=d"),
         ("https://h/hooksy", "https://h/hook", "https://h/Hooks/a")),
        ("https://h/hooks/", ("https://h/hooks/a",), ("https://h/hooks",)),
        ("https://h",
         ("https://h/any", "https://H:443/any"),
         ("http://h/any", "https://h:8443/any", "https://h.evil.example/any", "https://evil-h/any")),
        ("https://h/a?k=1",
         ("https://h/a?k=1",), ("https://h/a?k=1&k=2", "https://h/a/b?k=1")),
    ],
)  # fmt: skip
def test_a_target_covers_itself_and_what_is_below(
    target: str, covered: tuple[str, ...], not_covered: tuple[str, ...]
) -> None:
    covers = WebhookUrl.parse(target).covers
    assert all(covers(WebhookUrl.parse(url)) for url in covered)
    assert not any(covers(WebhookUrl.parse(url)) for url in not_covered)


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


SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
SECOND = "whsec_" + base64.b64encode(b"t" * 24).decode()


def test_secrets_come_from_a_file_or_a_variable(load_gateway: LoadSettings, tmp_path: Path) -> None:
    (tmp_path / "hooks.secret").write_text(f"{SECRET}\n{SECOND}\n")
    by_file = "{url: 'https://Hooks.example.org:443/a', secret_file: hooks.secret}"
    by_name = "{url: 'https://other.example', secret_env: S, keys: ci, events: batch.completed}"
    settings = load_gateway(f"webhooks: {{targets: [{by_file}, {by_name}]}}", S=SECRET)
    first, second = settings.webhooks.targets
    assert [one.get_secret_value() for one in first.secrets] == [SECRET, SECOND]
    assert [one.get_secret_value() for one in second.secrets] == [SECRET]
    assert first.url == "https://hooks.example.org/a"
    assert (second.keys, second.events) == (("ci",), ("batch.completed",))
    assert changed_restart_keys(load_gateway("{}"), settings) == ()


@each_case(
    ("text", "key", "words"),
    [
        ("{url: 'https://h'}", "secret_file", "no secret"),
        ("{url: 'http://h', secret_env: S}", "url", "must begin with https"),
        ("{url: 'http://8.8.8.8', secret_env: S, allow_private: true}", "url", "is public"),
        ("{url: 'https://u:hidden@h', secret_env: S}", "url", "no user"),
        ("{url: 'https://h/a/../hidden', secret_env: S}", "url", "dot segment"),
        ("{url: 'https://h', secret_env: NONE}", "secret_env", "is not set"),
        ("{url: 'https://h', secret_env: EMPTY}", "secret_env", "holds 0 secrets"),
        ("{url: 'https://h', secret_env: BARE}", "secret_env", "does not begin with whsec_"),
        ("{url: 'https://h', secret_env: SHORT}", "secret_env", "has 4 bytes"),
        ("{url: 'https://h', secret_env: UNPADDED}", "secret_env", "no base64"),
        ("{url: 'https://h', secret_file: missing}", "secret_file", "no such file"),
        ("{url: 'https://h', secret_env: S, secret_file: f}", "secret_file", "beside secret_env"),
        ("{url: 'https://h', secrets: [hidden]}", "secrets", "must not stand in this file"),
        ("{url: 'https://h', secret_env: S, events: [batch.started]}", "events", "one of"),
        ("{secret_env: S}", "url", "is missing"),
    ],
)
def test_what_is_wrong_with_a_target_is_told_without_its_secrets(
    gateway_problems: Problems, tmp_path: Path, text: str, key: str, words: str
) -> None:
    (tmp_path / "f").write_text(SECRET)
    hidden = base64.b64encode(b"hiddenhiddenhiddenhiddenhidden!!").decode()
    problems = gateway_problems(
        f"webhooks:\n  targets:\n    - {text}\n",
        S=SECRET,
        EMPTY=" ",
        BARE=hidden,
        SHORT="whsec_" + base64.b64encode(b"abcd").decode(),
        UNPADDED="whsec_" + base64.b64encode(b"x" * 25).decode().rstrip("="),
    )
    found = [one for one in problems if one.key.startswith(f"webhooks.targets[0].{key}")]
    assert found, problems
    assert words in found[0].message
    shown = " ".join(f"{one.message} {one.remedy}" for one in problems)
    assert hidden not in shown
    assert "hidden" not in shown


def test_a_receiver_with_a_private_address_may_be_called_by_http(
    load_gateway: LoadSettings,
) -> None:
    text = "webhooks: {targets: [{url: 'http://10.0.0.7:8080', secret_env: S, %s: true}]}"
    for allowed in ("allow_private", "allow_http"):
        (target,) = load_gateway(text % allowed, S=SECRET).webhooks.targets
        assert target.url == "http://10.0.0.7:8080/"


def test_no_secret_is_shown(load_gateway: LoadSettings) -> None:
    urls = ("https://a.example/services/T0/hidden?k=hidden", "https://b.example")
    targets = ", ".join(f"{{url: '{url}', secret_env: S}}" for url in urls)
    settings = load_gateway(f"webhooks: {{targets: [{targets}]}}", S=SECRET)
    shown = masked_settings(settings)
    found = [target["url"] for target in shown["webhooks"]["targets"]]
    assert found == ["https://a.example/********", "https://b.example"]
    for text in (json.dumps(shown), repr(settings)):
        assert "hidden" not in text
        assert SECRET not in text


@each_case("text", ["off", "'off'", "OFF", "false"])
def test_the_store_can_be_switched_off(load_gateway: LoadSettings, text: str) -> None:
    assert load_gateway(f"store: {{url: {text}}}").store.url == "off"


def test_a_relative_path_starts_in_the_folder_of_the_settings_and_an_absolute_one_stays(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    for written, path in (("data/kept", f"{tmp_path}/data/kept"), ("/srv/kept", "/srv/kept")):
        text = f"store: {{url: 'sqlite:///{written}'}}\nbatches: {{folder: {written}}}"
        settings = load_gateway(text)
        assert settings.store.url == f"sqlite:///{path}"
        assert settings.batches.folder == Path(path)


@each_case(
    "url",
    [
        "sqlite://", "sqlite:///", "sqlite:///:memory:?cache=shared", "sqlite:///x?mode=ro",
        "sqlite:///..", "mysql://root:geheim@db/x", "postgresql:/geheim",
        "postgresql://a:ge/heim@db:x/y", "postgresql://a@db/x?password=geheim",
        "postgresql://a:ge#heim@db/x", "postgresql://a:12/heim@db/x", "postgresql://a:12?heim@db/x",
        "geheim", "[geheim]", "3",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_store_is_refused_and_never_shown(
    gateway_problems: Problems, url: str
) -> None:
    (problem,) = gateway_problems(f"store:\n  url: '{url}'" if url != "3" else "store: {url: 3}")
    assert problem.key == "store.url"
    assert problem.remedy
    assert "heim" not in str(problem)


@each_case(
    ("url", "shown"),
    [
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("postgresql://a@b/c", "postgresql://a@b/c"),
        ("postgresql://a:p%40w@b:1/c?x=y", "postgresql://a:***@b:1/c?x=y"),
        ("postgresql://a:@b/c", "postgresql://a:***@b/c"),
        ("off", "off"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked_store_url(url) == shown
    settings = Settings(store=StoreSettings(url=url))
    assert "p%40w" not in repr(settings)
    assert masked_settings(settings)["store"]["url"] == shown
