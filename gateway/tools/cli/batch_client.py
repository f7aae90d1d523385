"""A client of `/v1/files` and `/v1/batches`, whose errors tell what to do."""

from __future__ import annotations

import contextlib
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import quote, urlsplit

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

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

KEY_VARIABLE = "LLAMA_GATEWAY_KEY"

LONGEST_KEY = 4096
"""Bytes of a key file that are read."""

CONNECT_SECONDS = 10.0

ANSWER_SECONDS = 120.0
"""Seconds without a byte; a large upload is written to the disk before it is answered."""

LARGEST_ANSWER = 16 << 20
"""Bytes of a JSON answer."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds between tries; they double."""

PAGE = 100
"""Batches that are asked for at once."""

_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a request is tried again, unless the gateway says otherwise."""


class GatewayAway(CommandFailed):
    """No gateway answers, or it can't at this time: another try may help."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GatewayRefused(CommandFailed):
    """The gateway answers with an error that another try does not change."""

    def __init__(self, message: str, code: int) -> None:
        # What the command's user has written wrongly is wrong usage.
        super().__init__(message, 2 if code == 400 else 1)
        self.code = code
        """The HTTP status."""


@dataclass(slots=True)
class Patience:
    """Tries again while no gateway answers, for `seconds` from the first failure on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)
    note: Callable[[str], None] = print_note

    def call(self, job: Callable[[], T]) -> T:
        """The job's result. Raises CommandFailed: GatewayAway only after all this time."""
        failed_at: float | None = None
        pause = FIRST_PAUSE
        while True:
            try:
                result = job()
            except GatewayAway as error:
                now = self.clock()
                if failed_at is None:
                    failed_at = now
                    if self.seconds > 0:
                        self.note(f"{error}; trying again for up to {self.seconds:.0f} s")
                left = failed_at + self.seconds - now
                if left <= 0:
                    raise
                wait = max(pause * self.rng.uniform(0.8, 1.2), error.retry_after or 0.0)
                self.sleep(min(wait, left))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if failed_at is not None:
                    self.note(f"the gateway answers again after {self.clock() - failed_at:.0f} s")
                return result


class BatchClient:
    """A client of the public listener. Its methods raise CommandFailed, with words for people."""

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        import httpx

        self.url = url
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._client = open_client(url, key, timeout, tls)

    # Files.

    def upload(self, file: BinaryIO, name: str) -> dict[str, Any]:
        """Upload a batch's input, streamed."""
        file.seek(0)
        return self._json(
            "POST", "/v1/files", data={"purpose": "batch"},
            files={"file": (name, file, "application/jsonl")},
        )  # fmt: skip

    def find_upload(self, name: str, size: int) -> dict[str, Any] | None:
        """The newest earlier upload of this name and size, if there is one."""
        listed = self._json("GET", "/v1/files", params={"purpose": "batch"})
        for one in _objects(listed, "data"):
            if one.get("filename") == name and one.get("bytes") == size:
                return one
        return None

    # Batches.

    def create(self, fields: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """Create a batch; with the same key again it is the same batch."""
        headers = {"idempotency-key": idempotency_key}
        return self._json("POST", "/v1/batches", json=dict(fields), headers=headers)

    def batch(self, id_: str) -> dict[str, Any]:
        """One batch."""
        return self._json("GET", _path(id_))

    def batches(self, most: int) -> list[dict[str, Any]]:
        """The newest batches, at most so many."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while len(found) < most:
            limit = min(PAGE, most - len(found))
            params = {"limit": str(limit)} | ({"after": after} if after is not None else {})
            page = self._json("GET", "/v1/batches", params=params)
            listed = _objects(page, "data")
            found += listed
            if not page.get("has_more") or not listed:
                break
            after = str(listed[-1].get("id"))
        return found[:most]

    def act(self, id_: str, action: str) -> dict[str, Any]:
        """Cancel, pause or resume a batch."""
        return self._json("POST", f"{_path(id_)}/{action}")

    # Results.

    def download(self, path: str, write: Callable[[bytes], object]) -> None:
        """Give `write` what is at this path, in pieces."""
        import httpx

        with self._told(), self._client.stream("GET", path) as response:
            if not response.is_success:
                self._refuse(response)
            try:
                for piece in response.iter_bytes():
                    write(piece)
            except httpx.DecodingError:
                raise CommandFailed(f"the answer of {self.url}{path} can't be read") from None

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """What the gateway answers: a JSON object."""
        with self._told(), self._client.stream(method, path, **request) as response:
            content = read_answer(response, LARGEST_ANSWER)
            if not response.is_success:
                self._refuse(response, content)
        value = json_object(content)
        if value is None:
            raise CommandFailed(
                f"the server at {self.url} is no gateway with /v1/batches: --url names its address"
            )
        return value

    def _refuse(self, response: httpx.Response, content: bytes | None = None) -> None:
        """Raise what an error's answer means. Raises: GatewayAway, GatewayRefused."""
        body = (
            json_object(read_answer(response, LARGEST_ANSWER) if content is None else content) or {}
        )
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        error_code = error.get("code") if isinstance(error, dict) else None
        code = response.status_code
        told = f"the gateway at {self.url} answers {code}"
        if message:
            told += f": {str(message).rstrip('.')}"
        if remedy := _remedy(code, error_code, response.request.url.path):
            told += f" ({remedy})"
        if code in _AGAIN and response.headers.get("x-should-retry") != "false":
            raise GatewayAway(told, _seconds(response.headers.get("retry-after")))
        raise GatewayRefused(told, code)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell errors of the connection in words. Raises: GatewayAway, CommandFailed."""
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            if told := tls_problem(self.url, error, "--ca"):
                raise CommandFailed(told) from None
            raise GatewayAway(
                f"no gateway answers at {self.url} ({reason(error)}): is it running? "
                "--url names its address"
            ) from None
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError):
            raise
        except httpx.HTTPError as error:
            told = f"the gateway at {self.url} did not answer ({reason(error)})"
            if hint := scheme_hint(self.url):
                raise CommandFailed(f"{told}{hint}") from None
            raise GatewayAway(told) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._client.close()


def connect(
    url: str | None, key_file: Path | None, ca: Path | None, environment: Mapping[str, str]
) -> BatchClient:
    """A client by flags and environment. Raises CommandFailed."""
    url = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
        raise CommandFailed(f"--url {url}: must be like {DEFAULT_URL}", status=2)
    tls = tls_context(ca) if parts.scheme == "https" else None
    return BatchClient(url, find_key(key_file, environment), tls)


def find_key(key_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The API key by flag or environment. Raises CommandFailed."""
    key = _key_of_file(key_file) if key_file else environment.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise CommandFailed(f"{KEY_VARIABLE} holds no key", status=2)
    return key or None


def environment() -> Mapping[str, str]:
    """The process's environment."""
    return os.environ


def _key_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            key = file.read(LONGEST_KEY).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text"
        raise CommandFailed(f"the key file {path} can't be read: {why}", status=2) from None
    if not key or not key.isascii() or not key.isprintable():
        raise CommandFailed(f"the key file {path} holds no key", status=2)
    return key


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """What https is checked by: `ca`, and the system's authorities. Raises CommandFailed."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if ca is not None:
        try:
            context.load_verify_locations(cafile=ca)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it holds no certificate in PEM form"
            raise CommandFailed(f"--ca {ca}: can't be read: {why}", status=2) from None
        # A certificate that is no authority's may be trusted, too.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _path(id_: str) -> str:
    return f"/v1/batches/{quote(id_, safe='')}"


def _remedy(code: int, error_code: object, path: str) -> str | None:
    """What the command's user can do."""
    if code == 401:
        return f"name a file that holds an API key with --key-file, or set {KEY_VARIABLE}"
    if code == 404 and path.startswith("/v1/batches/"):
        return "'llama-gateway batch list' shows this key's batches"
    if code == 404:
        return "is it a gateway with batches? --url names its address"
    if code == 413:
        return "submit it in several batches"
    if error_code == "insufficient_quota":
        return "files expire, or DELETE /v1/files/ID removes one"
    return None


def _objects(page: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = page.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, 60.0) if seconds > 0 else None
