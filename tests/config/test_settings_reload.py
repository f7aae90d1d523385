from __future__ import annotations

from gateway.config import Settings
from gateway.config.settings import RESTART_KEYS, changed_restart_keys
from tests.each_case import each_case

OLD = Settings()


@each_case(
    ("changed", "keys"),
    [
        ({}, ()),
        ({"queue": {"max": 3}, "heartbeat": 0, "default_model": "m"}, ()),
        ({"limits": {"body_bytes": 1}}, ()),
        ({"listen": {"port": 9000}}, ("listen.port",)),
        ({"admin": {"hosts": ["h"]}, "queue": {"max": 3}}, ("admin.hosts",)),
        (
            {"limits": {"connections": 5, "header_bytes": 9, "n": 2}},
            ("limits.header_bytes", "limits.connections"),
        ),
        ({"listen": {"tls": {"cert": "c", "key": "k"}}}, ("listen.tls",)),
    ],
)
def test_only_keys_of_open_listeners_need_a_restart(
    changed: dict[str, object], keys: tuple[str, ...]
) -> None:
    new = Settings.model_validate(changed)
    assert changed_restart_keys(OLD, new) == keys
    assert changed_restart_keys(new, OLD) == keys


def test_a_changed_certificate_is_reported_by_its_key() -> None:
    old = Settings.model_validate({"listen": {"tls": {"cert": "a", "key": "k"}}})
    new = Settings.model_validate({"listen": {"tls": {"cert": "b", "key": "k"}}})
    assert changed_restart_keys(old, new) == ("listen.tls.cert",)


def test_the_keys_that_need_a_restart_exist() -> None:
    for key in RESTART_KEYS:
        found: object = OLD
        for part in key.split("."):
            found = getattr(found, part)
