"""Which changed settings take effect at once, and which need a restart."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.fields import ConfigModel
from gateway.config.settings import Settings

# What is fixed when a listener opens. Everything else is read anew after a reload.
AT_START = (
    "listen",
    "admin",
    "limits.connections",
    "limits.header_bytes",
    "limits.header_timeout",
    "limits.send_timeout",
)


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Name the changed keys that only a restart brings into force, such as `listen.port`."""
    return tuple(key for key in _changed(old, new) if is_fixed_at_start(key))


def is_fixed_at_start(key: str) -> bool:
    """Tell whether a key, such as `listen.port`, is read only when the gateway starts."""
    return any(key == fixed or key.startswith(f"{fixed}.") for fixed in AT_START)


def _changed(old: ConfigModel, new: ConfigModel, prefix: str = "") -> Iterator[str]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, ConfigModel) and isinstance(after, ConfigModel):
            yield from _changed(before, after, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
