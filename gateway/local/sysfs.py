"""Reading `/sys` and `/proc` under any root: what is not there is empty, never an error."""

from __future__ import annotations

from pathlib import Path

KIB = 1024
_UNITS = {"K": KIB, "M": KIB**2, "G": KIB**3}


def read_text(path: Path) -> str:
    """What the file holds; empty where it can't be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The whole number in the file, or None."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def read_list(path: Path) -> set[int] | None:
    """The numbers of the kernel list in the file; None where there is none."""
    text = read_text(path)
    return parse_list(text) if text.strip() else None


def parse_list(text: str) -> set[int]:
    """The numbers of a kernel list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def shown_list(numbers: set[int] | tuple[int, ...]) -> str:
    """Numbers as a kernel list, which systemd's `CPUAffinity=` and taskset take as well."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_size(text: str) -> int:
    """Bytes of a size such as `32768K`; 0 where it is none."""
    text = text.strip()
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    return int(digits) * unit if digits.isdecimal() else 0


def read_meminfo(path: Path) -> dict[str, int]:
    """Bytes by name. A node's file has `Node 0` in front of every name."""
    sizes: dict[str, int] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name and words and words[0].isdigit():
            sizes[name.split()[-1]] = int(words[0]) * KIB
    return sizes
