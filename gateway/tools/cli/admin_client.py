"""The admin API of the running gateway, for commands: where it is, and what it answers in words."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from gateway.tools.cli import options
from gateway.tools.cli.http_client import (
    json_object,
    open_client,
    read_answer,
    reason,
    scheme_hint,
    tls_problem,
)
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

    from gateway.config.listeners import AdminSettings

LONGEST_ADMIN_KEY = 4096

LARGEST_ANSWER = 256 << 20
"""Bytes; a stream of events may be longer."""

LONGEST_LINE = 64 << 20
"""Bytes of an event; that of 10,000 nodes has some 8 million."""

REQUEST_TIMEOUT = 30.0
"""Seconds; longer than a probe of a node that hangs."""

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class NoGateway(CommandFailed):
    """Nothing listens at the address of the admin API."""


class AdminRefused(CommandFailed):
    """The admin API answers with an error."""

    def __init__(self, message: str, code: int, body: dict[str, Any]) -> None:
        # What the command's user has written wrongly is wrong usage.
        super().__init__(message, 2 if code == 400 else 1)
        self.code = code
        """The HTTP status."""
        self.body = body


class AdminClient:
    """A client of the admin API. Its methods raise CommandFailed, with words for people."""

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._client = open_client(url, key, REQUEST_TIMEOUT, tls)

    def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes."""
        nodes = self.request("GET", "/admin/nodes").get("nodes")
        return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []

    def node(self, name: str) -> dict[str, Any]:
        """Return one node."""
        return self.request("GET", f"/admin/nodes/{quote(name, safe='')}")

    def node_action(self, name: str, action: str, **parameters: float) -> None:
        """Drain, resume or probe a node."""
        path = f"/admin/nodes/{quote(name, safe='')}/{action}"
        self.request("POST", path, {key: f"{value:g}" for key, value in parameters.items()})

    def status(self) -> dict[str, Any]:
        """Return the gateway's status."""
        return self.request("GET", "/admin/status")

    def request(
        self,
        method: str,
        path: str,
        parameters: dict[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> dict[str, Any]:
        """Return what the admin API answers. Raises AdminRefused or NoGateway, too."""
        value = json_object(self._send(method, path, parameters, body, timeout))
        if value is None:
            raise CommandFailed(
                f"the server at {self.url}{path} is no gateway's admin API: "
                "--admin-url names its address"
            )
        return value

    def text(
        self,
        path: str,
        parameters: dict[str, str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT,
    ) -> str:
        """Return the text at this path."""
        return self._send("GET", path, parameters, None, timeout).decode(errors="replace")

    def events(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the data of each event of a stream, until it ends.

        Raises CommandFailed, if it breaks off or is silent for `REQUEST_TIMEOUT`.
        """
        import httpx

        try:
            with self._client.stream("GET", path) as response:
                if not response.is_success:
                    raise self._refused(response, read_answer(response, LARGEST_ANSWER))
                name = ""
                for line in _bounded_lines(response.iter_bytes()):
                    if line.startswith(b"event: "):
                        name = line[7:].decode("utf-8", "replace")
                    elif line.startswith(b"data: "):
                        value = json.loads(line[6:])
                        if isinstance(value, dict):
                            yield name, value
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError):
            raise CommandFailed(f"the stream of {self.url}{path} holds what is no JSON") from None

    def _send(
        self,
        method: str,
        path: str,
        parameters: dict[str, str] | None,
        body: Mapping[str, Any] | None,
        timeout: float,
    ) -> bytes:
        import httpx

        asked: dict[str, Any] = {"params": parameters, "json": body, "timeout": timeout}
        try:
            with self._client.stream(method, path, **asked) as response:
                content = read_answer(response, LARGEST_ANSWER)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.is_success:
            return content
        raise self._refused(response, content)

    def _refused(self, response: httpx.Response, content: bytes) -> AdminRefused:
        body = json_object(content) or {}
        return AdminRefused(self._error(response, body), response.status_code, body)

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        import httpx

        if not isinstance(error, httpx.ConnectError):
            told = f"the gateway at {self.url} did not answer ({reason(error)})"
            return CommandFailed(told + scheme_hint(self.url))
        if told := tls_problem(self.url, error, "--admin-ca"):
            return CommandFailed(told)
        return NoGateway(
            f"no gateway answers at {self.url} ({reason(error)}): is it running? "
            "--admin-url names its admin listener"
        )

    def _error(self, response: httpx.Response, body: Mapping[str, Any]) -> str:
        if response.status_code == 401:
            return (
                f"the gateway at {self.url} refuses (401): "
                "name a file that holds its admin key with --admin-key-file"
            )
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        detail = f": {message}" if message else ""
        return f"the gateway at {self.url} answers {response.status_code}{detail}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._client.close()


def _bounded_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream. Raises CommandFailed for one above `LONGEST_LINE`."""
    rest = bytearray()
    for part in parts:
        *lines, tail = part.split(b"\n")
        for line in lines:
            yield bytes(rest) + line
            rest.clear()
        rest += tail
        if len(rest) > LONGEST_LINE:
            raise CommandFailed("an event of the gateway is larger than any of a fleet")


def connect_admin(
    url: str | None,
    key_file: Path | None,
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
    *,
    ca: Path | None = None,
) -> AdminClient:
    """Open the admin API by flag, environment and settings, in this order.

    `ca`: PEM file of its certificate, or of the authority behind it. Raises CommandFailed.
    """
    if url is not None and urlsplit(url).scheme not in {"http", "https"}:
        raise CommandFailed(f"--admin-url {url}: must be like http://127.0.0.1:8001", status=2)
    needed = {} if url is not None else dict(_ADDRESS_OPTIONS)
    if key_file is None:
        needed["key_file"] = "--admin-key-file names the file of its key"
    for name, key in (("HOST", "host"), ("PORT", "port")):
        if environment.get(f"LLAMA_GATEWAY_ADMIN_{name}"):
            needed.pop(key, None)
    admin = _settings(config, needed) if needed else None
    own = None
    if url is None:
        own = admin.tls.cert if admin is not None and admin.tls is not None else None
        host = environment.get("LLAMA_GATEWAY_ADMIN_HOST") or (admin.host if admin else "127.0.0.1")
        port = environment.get("LLAMA_GATEWAY_ADMIN_PORT") or (admin.port if admin else 8001)
        host = _EVERY_ADDRESS.get(host, host)
        scheme = "http" if own is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    if key_file is None and admin is not None:
        key_file = admin.key_file
    if ca is None and (named := environment.get("LLAMA_GATEWAY_ADMIN_CA")):
        ca = Path(named)
    tls = _tls(ca, own) if urlsplit(url).scheme == "https" else None
    return AdminClient(url.rstrip("/"), _key(key_file) if key_file else None, tls)


def _tls(ca: Path | None, own: Path | None) -> ssl.SSLContext:
    """How to check the listener's certificate: by `ca`, else by `own` of the settings."""
    path = ca or own
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if path is None:
        return context
    try:
        if ca is None:
            # Exactly this certificate, whatever its names: the command may use another one, such as
            # 127.0.0.1. Authorities in the same file vouch for others, too, and are left out.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            begin, end, _ = path.read_text(encoding="ascii").partition(_PEM_END)
            context.load_verify_locations(cadata=begin + end)
        else:
            context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no certificate in PEM form"
        raise CommandFailed(
            f"{path}: the admin listener's certificate can't be read: {why}; name it, or the "
            "authority behind it, with --admin-ca",
            status=2,
        ) from None
    # A certificate that is no authority's may be trusted, too.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


_PEM_END = "-----END CERTIFICATE-----"


_ADDRESS_OPTIONS = dict.fromkeys(
    ("host", "port", "tls"), "--admin-url names the admin listener's address"
)


def _settings(config: Path | None, needed: Mapping[str, str]) -> AdminSettings | None:
    """Settings of the admin listener; of a file with mistakes those keys that are needed.

    `needed`: by key, what to give in its place.
    """
    path = options.settings_file(config)
    if path is None:
        return None
    from gateway.config.errors import ConfigError
    from gateway.config.settings import load_admin, load_settings

    try:
        return load_settings(path).admin
    except ConfigError as error:
        if not path.is_file():
            raise
        # The running gateway still has older settings, and the operator must be able to reach it.
        more = len(error.problems) - 1
        others = f" (and {more} more)" if more else ""
        problem = replace(error.problems[0], remedy="")
    try:
        admin = load_admin(path, needed)
    except ConfigError as error:
        missing = {
            remedy
            for key, remedy in needed.items()
            if any(f"{one.key}.".startswith(f"admin.{key}.") for one in error.problems)
        }
        instead = " and ".join(sorted(missing or set(needed.values())))
        raise CommandFailed(
            f"{error}\nthis is needed to find the gateway: correct it, or {instead}", status=2
        ) from None
    print_note(
        f"warning: {problem}{others}; a gateway that runs keeps the settings that it has: going on "
        "with `admin` of this file"
    )
    return admin


def _key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            key = file.read(LONGEST_ADMIN_KEY).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text"
        raise CommandFailed(f"the admin key file {path} can't be read: {why}", status=2) from None
    if not key or not key.isascii() or not key.isprintable():
        raise CommandFailed(f"the admin key file {path} holds no key", status=2)
    return key
