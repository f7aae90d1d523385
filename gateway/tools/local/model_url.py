"""The address of a model: what is allowed, what is printed of it, and the files behind it.

An address may hold secrets, in its query (a signed link) or before its host (a password). They are
sent to that host alone, and `printable` leaves them out.
"""

from __future__ import annotations

import hashlib
import re
from ipaddress import ip_address
from pathlib import PurePosixPath
from urllib.parse import unquote

import httpx

from gateway.tools.local import LocalFleetError
from gateway.tools.local.gguf_file import PART_NAME

MOST_URL_CHARACTERS = 8192

MOST_NAME_CHARACTERS = 120

MOST_PARTS = 256
"""Files of a split model; the largest models published so far have some 30."""

UNNAMED = "model"

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class ModelUrlError(LocalFleetError):
    """The address can't be used, by the way it is written."""


def is_url(model: str) -> bool:
    """Whether `--model` names an address rather than a file."""
    return SCHEME.match(model) is not None


def parse_model_url(text: str) -> httpx.URL:
    """Return the address of a model. Raises ModelUrlError, whose text holds no secret of it."""
    try:
        url = _checked(httpx.URL(_bounded(text.strip())))
    except (httpx.InvalidURL, ValueError):
        raise ModelUrlError(
            "--model: not a valid URL. Remedy: https://HOST/PATH.gguf, in quotes where it holds "
            "characters of the shell"
        ) from None
    _check_scheme(url)
    return url


def redirect_target(current: httpx.URL, location: str) -> httpx.URL:
    """Return where a redirect leads. Raises ModelUrlError where it leaves https."""
    try:
        target = _checked(current.join(_bounded(location)))
    except (httpx.InvalidURL, ValueError):
        raise ModelUrlError(
            f"{printable(current)}: redirects to something that is no URL"
        ) from None
    if target.scheme != "https" and not (is_loopback(current) and is_loopback(target)):
        raise ModelUrlError(
            f"{printable(current)}: redirects to {printable(target)}, which is not https"
        )
    _check_scheme(target)
    return target


def same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    """Whether credentials for one address may be sent to the other."""
    return _origin(one) == _origin(other)


def printable(url: httpx.URL) -> str:
    """Return the address without password and query, for people and files."""
    shown = f"{url.scheme}://{url.netloc.decode(errors='replace')}{url.path}"
    return f"{shown}?..." if url.query else shown


def is_loopback(url: httpx.URL) -> bool:
    """Whether the address is of this machine, so that nobody can listen in."""
    if url.host == "localhost":
        return True
    try:
        return ip_address(url.host).is_loopback
    except ValueError:
        return False


def file_name(url: httpx.URL) -> str:
    """Return a safe name for the file behind an address; it ends in `.gguf`.

    Servers show the model under this name, without the ending.
    """
    last = PurePosixPath(unquote(url.path)).name
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", last).strip("._")
    stem = safe[: -len(".gguf")] if safe.lower().endswith(".gguf") else safe
    return f"{stem[:MOST_NAME_CHARACTERS] or UNNAMED}.gguf"


def part_urls(url: httpx.URL) -> list[httpx.URL]:
    """Return the addresses of all files of the model, in order: several where it is split."""
    path, mark, query = url.raw_path.decode("ascii").partition("?")
    folder, _, last = path.rpartition("/")
    match = PART_NAME.match(last)
    if match is None:
        return [url]
    total = int(match["parts"])
    if not 1 <= total <= MOST_PARTS:
        raise ModelUrlError(
            f"{printable(url)}: a model of {total} files; at most {MOST_PARTS} are supported"
        )
    names = [f"{match['stem']}-{number:05}-of-{total:05}.gguf" for number in range(1, total + 1)]
    return [url.copy_with(raw_path=f"{folder}/{name}{mark}{query}".encode()) for name in names]


def cache_key(url: httpx.URL) -> str:
    """Return a name for the address's folder in the cache. It tells nothing of its secrets."""
    whole = str(url.copy_with(username=None, password=None, fragment=None))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _bounded(text: str) -> str:
    if not 0 < len(text) <= MOST_URL_CHARACTERS or not text.isprintable():
        raise ValueError("length or characters")
    return text


def _checked(url: httpx.URL) -> httpx.URL:
    """Return the address without its fragment. Raises ValueError."""
    if not url.host or (url.port is not None and not 1 <= url.port <= 65535):
        raise ValueError("host or port")
    return url.copy_with(fragment=None)


def _check_scheme(url: httpx.URL) -> None:
    if url.scheme == "https" or (url.scheme == "http" and is_loopback(url)):
        return
    raise ModelUrlError(
        f"--model: {printable(url)}: only https is supported (http on this machine's own "
        "addresses only): a model could be replaced on its way. Remedy: https://, or download the "
        "file yourself and name it"
    )


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    default = 443 if url.scheme == "https" else 80
    return url.scheme, url.host, url.port or default
