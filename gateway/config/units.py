"""Durations and byte sizes as people write them: `30s`, `1h30m`, `64MiB`, `500kB`."""

import math
import re

_DURATION = re.compile(r"(?:(?:\d+(?:\.\d*)?|\.\d+)\s*(?:ms|s|m|h|d)\s*)+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(b|kb|mb|gb|tb|kib|mib|gib|tib)", re.IGNORECASE)
_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}

# A text longer than this is no duration or size, and isn't worth matching.
_LONGEST = 40


def parse_duration(value: object) -> float:
    """Turn a number of seconds or a text such as `30s`, `250ms`, `1h30m` into seconds.

    Raises ValueError for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _finite(value)
    if isinstance(value, str) and len(value) <= _LONGEST and value.isascii():
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        if _DURATION.fullmatch(text):
            parts = _DURATION_PART.findall(text)
            return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)
    raise ValueError("not a duration")


def parse_size(value: object) -> int:
    """Turn a number of bytes or a text such as `64MiB`, `1 GiB`, `500kB` into bytes.

    Raises ValueError for anything else, a fraction of a byte included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and _finite(value).is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= _LONGEST and value.isascii():
        text = value.strip()
        if text.isdigit():
            return int(text)
        if found := _SIZE.fullmatch(text):
            size = float(found[1]) * _BYTES[found[2].lower()]
            if size.is_integer():
                return int(size)
    raise ValueError("not a size")


def show_size(size: int) -> str:
    """Write bytes in the largest binary unit that divides them: `64MiB`, `1GiB`, `1000 bytes`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}"


def show_duration(seconds: float) -> str:
    """Write seconds shortly: `15s`, `0.05s`, `5m`, `1h`."""
    for unit, factor in (("h", 3600), ("m", 60)):
        if seconds and seconds % factor == 0:
            return f"{seconds / factor:g}{unit}"
    return f"{seconds:g}s"


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("out of range") from None
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number
