"""The admin API of the running gateway, as the commands ask it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from gateway.tools.cli.options import settings_file
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

    from gateway.config.listeners import AdminSettings


LONGEST_ADMIN_KEY = 4096

REQUEST_TIMEOUT = 30.0
"""A probe of a node that hangs takes its whole time-out."""

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AdminClient:
    """Asks the admin API; every failure is a `CommandFailed` in words."""

    def __init__(self, url: str, key: str | None) -> None:
        import httpx

        self.url = url
        # With a transport of its own httpx does not take a proxy from the environment: the
        # gateway is on loopback or in a private network.
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=REQUEST_TIMEOUT,
            transport=httpx.HTTPTransport(),
        )

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes."""
        nodes = self._ask("GET", "/admin/nodes").get("nodes")
        return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []

    def node(self, name: str) -> dict[str, Any]:
        """One node."""
        return self._ask("GET", f"/admin/nodes/{quote(name, safe='')}")

    def node_action(self, name: str, action: str, **parameters: float) -> None:
        """Have a node drained, resumed or probed."""
        path = f"/admin/nodes/{quote(name, safe='')}/{action}"
        self._ask("POST", path, {key: f"{value:g}" for key, value in parameters.items()})

    def _ask(
        self, method: str, path: str, parameters: dict[str, str] | None = None
    ) -> dict[str, Any]:
        import httpx

        try:
            response = self._client.request(method, path, params=parameters)
        except httpx.ConnectError as error:
            raise CommandFailed(
                f"no gateway answers at {self.url} ({_reason(error)}): is it running? "
                "--admin-url says where its admin listener is"
            ) from None
        except httpx.HTTPError as error:
            raise CommandFailed(
                f"the gateway at {self.url} did not answer ({_reason(error)})"
            ) from None
        if response.is_success:
            return _object(response)
        raise CommandFailed(self._refusal(response))

    def _refusal(self, response: httpx.Response) -> str:
        if response.status_code == 401:
            return (
                f"the gateway at {self.url} refuses (401): "
                "name a file that holds its admin key with --admin-key-file"
            )
        error = _object(response, strict=False).get("error")
        message = error.get("message") if isinstance(error, dict) else error
        said = f": {message}" if message else ""
        return f"the gateway at {self.url} answers {response.status_code}{said}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._client.close()


def _reason(error: httpx.HTTPError) -> str:
    return str(error).partition("] ")[2] or str(error) or type(error).__name__


def _object(response: httpx.Response, *, strict: bool = True) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    if strict:
        raise CommandFailed(
            f"what answers at {response.url} is no gateway's admin API: "
            "--admin-url says where that is"
        )
    return {}


def connect_admin(
    url: str | None,
    key_file: Path | None,
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> AdminClient:
    """The admin API by flag, environment and settings, in this order.

    Raises: CommandFailed.
    """
    if url is not None and urlsplit(url).scheme not in {"http", "https"}:
        raise CommandFailed(f"--admin-url {url}: must be like http://127.0.0.1:8001", status=2)
    admin = _settings(config) if url is None or key_file is None else None
    if url is None:
        host = environment.get("LLAMA_GATEWAY_ADMIN_HOST") or (admin.host if admin else "127.0.0.1")
        port = environment.get("LLAMA_GATEWAY_ADMIN_PORT") or (admin.port if admin else 8001)
        host = _EVERY_ADDRESS.get(host, host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if key_file is None and admin is not None:
        key_file = admin.key_file
    return AdminClient(url.rstrip("/"), _key(key_file) if key_file else None)


def _settings(config: Path | None) -> AdminSettings | None:
    path = settings_file(config)
    if path is None:
        return None
    from gateway.config.errors import ConfigError
    from gateway.config.settings import load_settings

    try:
        return load_settings(path).admin
    except ConfigError as error:
        if config is not None:
            raise
        # A gateway that runs has older settings in force, and has to be reached just now.
        print_note(f"note: {path} is invalid and was not looked at ({error.problems[0]})")
        return None


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
