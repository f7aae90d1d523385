from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.settings import Settings, masked_settings
from gateway.config.stored import StoreSettings, masked_store_url
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case


@each_case("text", ["off", "'off'", "OFF", "false"])
def test_the_store_can_be_switched_off(load_gateway: LoadSettings, text: str) -> None:
    assert load_gateway(f"store: {{url: {text}}}").store.url == "off"


def test_a_relative_path_starts_in_the_folder_of_the_settings_and_an_absolute_one_stays(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    url = load_gateway("store: {url: 'sqlite:///data/keys.db'}").store.url
    assert url == f"sqlite:///{tmp_path}/data/keys.db"
    assert load_gateway("store: {url: 'sqlite:////srv/x.db'}").store.url == "sqlite:////srv/x.db"


def test_a_password_may_come_from_a_variable(
    load_gateway: LoadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = load_gateway("store: {url: 'postgresql://a:${PW:-geheim}@db:5433/x?sslmode=require'}")
    assert url.store.url == "postgresql://a:geheim@db:5433/x?sslmode=require"


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


def test_a_folder_is_no_store(gateway_problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (problem,) = gateway_problems("store: {url: 'sqlite:///data'}")
    assert "folder" in problem.message


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
