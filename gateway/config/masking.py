"""The settings as plain values that may be shown."""

from typing import Any

from gateway.config.settings import Settings

MASK = "********"


def masked(settings: Settings) -> dict[str, Any]:
    """Turn settings into what JSON can hold, with the hashes of keys masked.

    Paths of key files stay: they are places, not secrets.
    """
    shown = settings.model_dump(mode="json", by_alias=True)
    for key in shown["keys"]:
        key["sha256"] = MASK
    return shown
