"""A client of `/v1/files` and `/v1/batches`, which waits for a gateway that is away."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import quote, urlsplit

from gateway.cli.client import (
    KEY_VARIABLE,
    GatewayAway,
    GatewayClient,
    GatewayRefused,
    find_key,
    objects,
    tls_context,
)
from gateway.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    import httpx

    from gateway.cli.batch_files import PreparedInput

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 120.0
"""Seconds without a byte; a large upload is written to the disk before it is answered."""

LONGEST_RETRY_AFTER = 60.0  # seconds of a pause that the gateway may ask for
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between tries; they double
PAGE = 100  # batches that are asked for at once
LONGEST_STEM = 100  # characters of an upload's name
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses of a batch that has ended."""

_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a request is tried again, unless the gateway says otherwise."""


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


class BatchClient(GatewayClient):
    """A client of the public listener, with the key of the batches' owner."""

    URL_FLAG = "--url"
    CA_FLAG = "--ca"
    LISTENER = "address"
    STRANGER = "{url} is no gateway with /v1/batches"

    @classmethod
    def connect(cls, url: str | None, key_file: Path | None, ca: Path | None) -> Self:
        """Connect by flags and environment. Raises CommandFailed."""
        url = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
            raise CommandFailed(f"--url {url}: must be like {DEFAULT_URL}", status=2)
        import httpx

        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        tls = tls_context(ca) if parts.scheme == "https" else None
        return cls(url, find_key(key_file), tls, timeout)

    def upload(self, file: BinaryIO, name: str) -> dict[str, Any]:
        """Upload a batch's input, streamed."""
        file.seek(0)
        return self.request(
            "POST", "/v1/files", data={"purpose": "batch"},
            files={"file": (name, file, "application/jsonl")}
        )  # fmt: skip

    def find_upload(self, name: str, size: int) -> dict[str, Any] | None:
        """Return the newest earlier upload of this name and size, if there is one."""
        for one in objects(self.request("GET", "/v1/files", {"purpose": "batch"}), "data"):
            if one.get("filename") == name and one.get("bytes") == size:
                return one
        return None

    def create(self, fields: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """Create a batch; with the same key again it is the same batch."""
        headers = {"idempotency-key": idempotency_key}
        return self.request("POST", "/v1/batches", body=fields, headers=headers)

    def batch(self, id_: str) -> dict[str, Any]:
        """Return one batch."""
        return self.request("GET", _path(id_))

    def batches(self, most: int) -> list[dict[str, Any]]:
        """Return the newest batches, at most so many."""
        found: list[dict[str, Any]] = []
        parameters: dict[str, str] = {}
        while len(found) < most:
            parameters["limit"] = str(min(PAGE, most - len(found)))
            page = self.request("GET", "/v1/batches", parameters)
            listed = objects(page, "data")
            found += listed
            if not page.get("has_more") or not listed:
                break
            parameters["after"] = str(listed[-1].get("id"))
        return found[:most]

    def act(self, id_: str, action: str) -> dict[str, Any]:
        """Cancel, pause or resume a batch."""
        return self.request("POST", f"{_path(id_)}/{action}")

    def download(self, path: str, write: Callable[[bytes], object]) -> None:
        """Give `write` the content at this path, in pieces."""
        with self._answered("GET", path) as response:
            for piece in response.iter_bytes():
                write(piece)

    def _refused(self, response: httpx.Response, body: Mapping[str, Any]) -> CommandFailed:
        found = body.get("error")
        error = found if isinstance(found, dict) else {}
        code = response.status_code
        told = f"the gateway at {self.url} answers {code}"
        if message := error.get("message"):
            told += f": {str(message).rstrip('.')}"
        if remedy := _remedy(code, error.get("code"), response.request.url.path):
            told += f" ({remedy})"
        if code in _AGAIN and response.headers.get("x-should-retry") != "false":
            return GatewayAway(told, _seconds(response.headers.get("retry-after")))
        return GatewayRefused(told, code, body)


def submit_input(
    client: BatchClient,
    found: PreparedInput,
    fields: Mapping[str, Any],
    key: str,
    patience: Patience,
) -> dict[str, Any]:
    """Upload the input and create its batch. Raises CommandFailed.

    An upload is found again by its name, which has a hash of its bytes, and a batch by its
    idempotency key: what is repeated after a lost answer makes nothing twice.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    from gateway.cli.progress import Progress

    name = upload_name(found)
    is_repeated = not key.startswith("cli-")

    def upload() -> dict[str, Any]:
        nonlocal is_repeated
        if is_repeated and (earlier := client.find_upload(name, found.size)) is not None:
            return earlier
        is_repeated = True
        columns = (TextColumn("uploading"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns) as progress:
            return client.upload(progress.wrap_file(found.file, found.size), name)

    uploaded = patience.call(upload)
    asked = {"input_file_id": uploaded.get("id"), "endpoint": found.endpoint, **fields}
    try:
        return patience.call(lambda: client.create(asked, key))
    except (GatewayAway, KeyboardInterrupt):
        print_note(
            f"whether the batch was made is not known; the same command with "
            f"--idempotency-key {key} makes no second one"
        )
        raise


def upload_name(found: PreparedInput) -> str:
    """The name of an upload: the same for the same bytes."""
    stem = "".join(c if c.isprintable() and c not in '"\\/' else "_" for c in found.stem)
    return f"{stem[:LONGEST_STEM]}-{found.sha256[:16]}.jsonl"


def _path(id_: str) -> str:
    return f"/v1/batches/{quote(id_, safe='')}"


def _remedy(code: int, error_code: object, path: str) -> str | None:
    """Say what the command's user can do."""
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


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else None
