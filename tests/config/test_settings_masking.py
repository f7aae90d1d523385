from __future__ import annotations

import json

from gateway.config import Settings
from gateway.config.settings import MASK, masked_settings
from tests.config.conftest import LoadSettings

HASH = "0123456789abcdef" * 4


def test_hashes_are_masked_and_the_rest_is_shown(load_gateway: LoadSettings) -> None:
    settings = load_gateway(
        f"""
        keys: [{{id: a, sha256: {HASH}, name: Team A}}]
        listen: {{trusted_proxies: [10.0.0.0/8]}}
        models: {{m: {{set: {{temperature: 0.2}}}}}}
        """
    )
    shown = masked_settings(settings)
    assert HASH not in json.dumps(shown)
    [key] = shown["keys"]
    assert {name: value for name, value in key.items() if value} == {
        "id": "a",
        "sha256": MASK,
        "name": "Team A",
    }
    assert {"class", "max_class", "models", "group", "limits", "user_limits", "expires"} <= set(key)
    assert shown["listen"]["trusted_proxies"] == ["10.0.0.0/8"]
    assert shown["models"]["m"]["set"] == {"temperature": 0.2}
    assert settings.keys[0].sha256 == HASH


def test_all_settings_are_shown_as_json() -> None:
    assert set(json.loads(json.dumps(masked_settings(Settings())))) == set(Settings.model_fields)
