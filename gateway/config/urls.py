"""The address of a node: checked closely, because every request is built on it."""

import re
from urllib.parse import urlsplit

from gateway.config.fields import is_host, wrong

_EXAMPLE = "such as http://10.0.0.11:8080"
_PORT = re.compile(r":([0-9]{1,20})$")
_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")


def node_url(value: object) -> object:
    """Normalise a node's address: http or https, a host, perhaps a port and a path prefix.

    The scheme and the host come back in lower case and the path without its last slash. The
    address itself is never shown in an error: it may hold a password.
    """
    if not isinstance(value, str):
        return value
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
    except ValueError:
        raise wrong("is no valid URL", _EXAMPLE) from None
    try:
        port = parts.port
    except ValueError:
        shown = _PORT.search(parts.netloc)
        said = f" {shown[1]}" if shown else ""
        raise wrong(f"has a wrong port{said}", f"a port is a number up to 65535, {_EXAMPLE}") from (
            None
        )
    if parts.scheme not in {"http", "https"} or not host:
        raise wrong("must be an http or https URL with a host", _EXAMPLE)
    if "@" in parts.netloc:
        raise wrong(
            "must not hold a user or a password",
            "name the node's key by api_key_env or api_key_file",
        )
    if "?" in value or "#" in value:
        raise wrong("must not have a query or a fragment", "leave away what follows ? or #")
    if not is_host(host) or port == 0:
        raise wrong("must name a valid host and port", _EXAMPLE)
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path):
        raise wrong("has characters in its path that a URL can't have", "percent-encode them")
    if path.endswith("/v1"):
        raise wrong("must not end in /v1", "leave /v1 away; the gateway adds it")
    bracketed = f"[{host}]" if ":" in host else host
    netloc = bracketed if port is None else f"{bracketed}:{port}"
    return f"{parts.scheme}://{netloc}{path}"


def url_host(url: str) -> str:
    """Tell the host of an address that `node_url` has normalised."""
    return urlsplit(url).hostname or ""
