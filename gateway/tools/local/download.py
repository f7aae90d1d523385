"""Gets a model from an address into the cache: resumed, within limits, once for all processes.

An address may hold secrets, in its query (a signed link) or before its host (a password). They are
sent to that host alone, over redirects too, and `printable` leaves them out.

The bytes arrive in `NAME.part`, and what they are is in `NAME.source.json`. A part is resumed where
the server tells that it still has the same content (`If-Range`), or a digest proves it at the end.
A file has its own name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

import httpx
import msgspec

from gateway import __version__
from gateway.config.errors import single_line
from gateway.tools.local import LocalFleetError, ModelFileError
from gateway.tools.local.cache import downloads_folder, file_lock
from gateway.tools.local.gguf import PART_NAME, ModelFile, least_size
from gateway.tools.local.memory import format_gib

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


MOST_REDIRECTS = 8

TIMEOUT = httpx.Timeout(30.0, read=60.0)  # seconds; of the body: between two pieces of it

MOST_RETRY_AFTER = 60.0  # seconds of a server's Retry-After that are waited

MOST_BYTES = 1 << 50
"""A file that is announced as larger is none."""

CONTENT_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)")

UNSATISFIED_RANGE = re.compile(r"bytes \*/(\d{1,16})")

REDIRECTS = frozenset({301, 302, 303, 307, 308})

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(LocalFleetError):
    """The file can't be read. The text names the server and what it answered."""

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable  # whether a later try may help
        self.retry_after = retry_after  # seconds, where the server names them


class RangeRefusedError(RemoteError):
    """The server has no such range. `total` is the file's size, where it says so."""

    def __init__(self, message: str, total: int | None) -> None:
        super().__init__(message)
        self.total = total


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells one content of a file from another one under the same address."""

    etag: str | None = None
    last_modified: str | None = None

    @property
    def if_range(self) -> str | None:
        """The value of `If-Range`, which takes no weak ETag; None: a part can't be resumed."""
        if self.etag is not None and not self.etag.startswith("W/"):
            return self.etag
        return self.last_modified


@dataclass(frozen=True, slots=True)
class RemoteBody:
    """The bytes of a file from `start` on. Reading `chunks` raises httpx.TransportError."""

    start: int
    total: int | None  # bytes of the whole file; None: the server does not say
    version: FileVersion
    chunks: Iterator[bytes]


def open_client(verify: ssl.SSLContext | None = None) -> httpx.Client:
    """Return a client for `open_remote`; SSL_CERT_FILE and proxies of the environment count.

    Addresses of this machine are reached without a proxy.
    """
    return httpx.Client(
        timeout=TIMEOUT,
        verify=True if verify is None else verify,
        follow_redirects=False,
        mounts=dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]")),
    )


@contextmanager
def open_remote(
    client: httpx.Client,
    url: httpx.URL,
    *,
    start: int = 0,
    if_range: str | None = None,
    token: str | None = None,
) -> Iterator[RemoteBody]:
    """Open the file at `url` from byte `start` on.

    With `if_range` the body begins at 0 instead where the file is no longer that version. Raises
    RemoteError, and ModelUrlError for a redirect to where it may not lead.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": f"llama-gateway/{__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if if_range is not None:
            headers["If-Range"] = if_range
    response = _follow(client, url, headers, token)
    try:
        yield _body(response, start)
    finally:
        response.close()


def describe_failure(error: httpx.HTTPError) -> RemoteError:
    """Return a connection's failure as a RemoteError of the host's."""
    host = error.request.url.host if _has_request(error) else "the server"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return RemoteError(
            f"{host}: its certificate is not trusted: {single_line(str(error))}. Remedy: the PEM "
            "file of its authority in SSL_CERT_FILE"
        )
    # The texts of some errors are empty, and others quote what the server sent.
    what = single_line(str(error))[:200] or type(error).__name__
    return RemoteError(f"{host}: {what}", retryable=True)


def _follow(
    client: httpx.Client, url: httpx.URL, headers: dict[str, str], token: str | None
) -> httpx.Response:
    """Send the request, again to where redirects lead; return an unread response."""
    current = url
    for _ in range(MOST_REDIRECTS + 1):
        sent = dict(headers)
        if token is not None and same_origin(current, url):
            sent["Authorization"] = f"Bearer {token}"
        try:
            request = client.build_request("GET", current, headers=sent)
            response = client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise describe_failure(error) from error
        if response.status_code not in REDIRECTS:
            return response
        response.close()
        current = redirect_target(current, response.headers.get("location", ""))
    raise RemoteError(f"{printable(url)}: more than {MOST_REDIRECTS} redirects")


def _body(response: httpx.Response, start: int) -> RemoteBody:
    """Judge the response's head. Raises RemoteError."""
    where = printable(response.request.url)
    headers = response.headers
    version = FileVersion(headers.get("etag"), headers.get("last-modified"))
    if response.status_code in {200, 206}:
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise RemoteError(f"{where}: sends the file as {single_line(encoding)}, unasked")
    match response.status_code:
        case 200:
            return RemoteBody(0, _content_length(response), version, response.iter_raw())
        case 206:
            first, total = _content_range(response)
            if first != start:
                raise RangeRefusedError(f"{where}: sends another range than the one asked", total)
            return RemoteBody(start, total, version, response.iter_raw())
        case 416:
            found = UNSATISFIED_RANGE.fullmatch(headers.get("content-range", "").strip())
            raise RangeRefusedError(f"{where}: has no such range", int(found[1]) if found else None)
    raise _refusal(response, where)


def _content_length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length")
    if text is None:
        return None
    where = printable(response.request.url)
    if not (text.isascii() and text.isdecimal()) or int(text[:20]) > MOST_BYTES:
        raise RemoteError(f"{where}: announces a length that is none: {single_line(text[:40])}")
    return int(text)


def _content_range(response: httpx.Response) -> tuple[int, int | None]:
    """Return the first byte of a partial body and the whole file's size."""
    text = response.headers.get("content-range", "").strip()
    found = CONTENT_RANGE.fullmatch(text)
    if found is None:
        where = printable(response.request.url)
        raise RangeRefusedError(f"{where}: sends a part without a usable Content-Range", None)
    return int(found[1]), None if found[3] == "*" else int(found[3])


def _refusal(response: httpx.Response, where: str) -> RemoteError:
    status = response.status_code
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    remedy = {
        401: ". Remedy: a token, in the variable that --token-env names",
        403: (
            ". Remedy: a token with access, in the variable that --token-env names; for a gated "
            "model accept its terms on its page first"
        ),
        404: ". Remedy: check the address; a private model needs a token, see --token-env",
    }.get(status, "")
    return RemoteError(
        f"{where}: HTTP {status}{phrase}{remedy}",
        retryable=status in RETRYABLE,
        retry_after=_retry_after(response.headers.get("retry-after", "")),
    )


def _retry_after(text: str) -> float | None:
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return min(float(text), MOST_RETRY_AFTER)
    return None


def _has_request(error: httpx.HTTPError) -> bool:
    try:
        return error.request is not None
    except RuntimeError:  # httpx: it was never set
        return False


MIB = 1 << 20

DISK_RESERVE = 256 * MIB  # stays free

FREE_CHECK_BYTES = 64 * MIB  # between two looks at the disk, where the length is unknown

FIRST_LOOK = 32  # bytes after which it shows whether it is a model at all

LAST_LOOK = 256 * MIB
"""A head that is longer is judged at the end only; the largest vocabularies take some 20 MiB."""

MOST_FAILURES = 6  # in a row, none of which brought LEAST_PROGRESS

LEAST_PROGRESS = MIB

MOST_TRIES = 200

MOST_RESTARTS = 3  # from the first byte

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a further try

STALL_SECONDS, STALL_BYTES = 60.0, 64 << 10
"""A server that sends less in that time is left, and asked again."""

HASH_BLOCK = 4 * MIB


class DownloadError(LocalFleetError):
    """The file can't be downloaded. What has arrived is kept, unless the text says otherwise."""


class DigestError(DownloadError):
    """The file is not the one whose digest was given; it is removed."""


class _TooLargeError(DownloadError):
    pass


class _BrokenOffError(Exception):
    """The body ended early, or came too slowly. The text says which."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where a file comes from, beside it on the disk. It holds no secret of the address."""

    url: str  # printable
    etag: str | None = None
    last_modified: str | None = None
    total: int | None = None
    sha256: str | None = None  # of the whole file, once it is there

    @property
    def version(self) -> FileVersion:
        """The content that a part is of."""
        return FileVersion(self.etag, self.last_modified)


@dataclass(frozen=True, slots=True)
class DownloadWish:
    """What to download, and within which limits."""

    url: httpx.URL
    target: Path
    sha256: str | None = None  # lower-case hexadecimal
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None
    space_beside: int = 0  # bytes on the disk that other files will need


@dataclass(frozen=True, slots=True)
class DownloadHooks:
    """What a download asks and tells. Times and pauses are passed in by tests."""

    check_size: Callable[[int], None] = lambda _: None  # raises where so large a file is no use
    # Returns the least size that a part asks for, None while it can't tell; raises ModelFileError.
    least_size: Callable[[Path], int | None] = lambda _: 0
    progress: Callable[[int, int | None], None] = lambda _done, _total: None
    note: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    free_space: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


def part_path(target: Path) -> Path:
    """The file in which a download arrives."""
    return target.with_name(f"{target.name}.part")


def record_path(target: Path) -> Path:
    """The file with the source of `target`, or of its part."""
    return target.with_name(f"{target.name}.source.json")


def read_record(target: Path) -> SourceRecord | None:
    """Return the source of a file; None where it has none that can be read."""
    try:
        return msgspec.json.decode(record_path(target).read_bytes(), type=SourceRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_record(target: Path, record: SourceRecord) -> None:
    """Replace the record of a file. Raises OSError."""
    path = record_path(target)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(path)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(client: httpx.Client, wish: DownloadWish, hooks: DownloadHooks) -> str:
    """Download to `wish.target`; return the file's SHA-256. Raises LocalFleetError and OSError."""
    transfer = _Transfer(client, wish, hooks)
    transfer.part.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(transfer.part, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            transfer.fetch(file)
            os.fsync(file.fileno())
        return transfer.finish()
    except OSError as error:
        raise DownloadError(
            f"{transfer.part}: {(error.strerror or str(error)).lower()}; what has arrived is kept"
        ) from error
    except (DigestError, ModelFileError, _TooLargeError):
        transfer.remove()
        raise
    finally:
        transfer.remove_empty()


class _Transfer:
    """One download, over as many connections as it takes."""

    def __init__(self, client: httpx.Client, wish: DownloadWish, hooks: DownloadHooks) -> None:
        self.part = part_path(wish.target)
        self._client = client
        self._wish = wish
        self._hooks = hooks
        self._record = read_record(wish.target) or SourceRecord(printable(wish.url))
        self._digest = hashlib.sha256()
        self._have = 0
        self._least: int | None = None  # bytes that the head asks for
        self._next_look = FIRST_LOOK
        self._next_space_check = FREE_CHECK_BYTES
        self._restarts = 0

    def fetch(self, file: BinaryIO) -> None:
        """Go on until the whole file is there. Raises LocalFleetError and OSError."""
        self._take_up(file)
        failures, best = 0, self._have
        for number in range(1, MOST_TRIES + 1):
            try:
                self._try_once(file)
            except (_BrokenOffError, RemoteError) as error:
                if isinstance(error, RemoteError) and not error.retryable:
                    raise
                gained = self._have - best
                best = max(best, self._have)
                failures = 1 if gained >= LEAST_PROGRESS else failures + 1
                if failures >= MOST_FAILURES or number == MOST_TRIES:
                    raise self._given_up(str(error)) from error
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))
                if isinstance(error, RemoteError) and error.retry_after is not None:
                    pause = max(pause, error.retry_after)
                self._hooks.note(f"{error}; next try in {pause:.0f} s")
                self._hooks.sleep(pause)
            else:
                return

    def finish(self) -> str:
        """Give the whole file its own name; return its digest. Raises DigestError and OSError."""
        wish, found = self._wish, self._digest.hexdigest()
        if wish.sha256 is not None and found != wish.sha256:
            raise DigestError(
                f"{printable(wish.url)}: the file has the SHA-256 {found}, not {wish.sha256}: it "
                "is another file or was damaged, and has been removed. Remedy: compare the digest "
                "with its publisher's; the same command downloads it again"
            )
        self.part.chmod(0o644)
        self.part.replace(wish.target)
        write_record(wish.target, replace(self._record, total=self._have, sha256=found))
        return found

    def remove(self) -> None:
        """Remove the part, and its record unless a whole file has one."""
        self.part.unlink(missing_ok=True)
        if not self._wish.target.exists():
            record_path(self._wish.target).unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Remove a part without a byte."""
        if self._have == 0:
            self.remove()

    def _take_up(self, file: BinaryIO) -> None:
        """Go on with the part of an earlier run where that is safe."""
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        if self._record.version.if_range is None and self._wish.sha256 is None:
            self._hooks.note(
                "The server does not tell whether its file has changed: downloading it again from "
                "the start (with --sha256 it could be resumed)"
            )
            self._empty(file)
            return
        file.seek(0)
        while block := file.read(HASH_BLOCK):
            self._digest.update(block)
            self._have += len(block)
        self._hooks.note(f"Resuming after {format_gib(self._have)}")
        self._look(self._record.total)

    def _try_once(self, file: BinaryIO) -> None:
        """Read one response into the part. Raises _BrokenOffError and RemoteError."""
        wish = self._wish
        expected = self._record.total
        if self._have and self._have == expected:
            return
        if_range = self._record.version.if_range
        try:
            with open_remote(
                self._client, wish.url, start=self._have, if_range=if_range, token=wish.token
            ) as body:
                self._accept(file, body)
                self._receive(file, body)
        except RangeRefusedError as error:
            # All was there, as the server says; else it has another file, or can't resume.
            if error.total is not None and error.total == self._have:
                self._record = replace(self._record, total=self._have)
            else:
                self._start_over(file, str(error))
                raise _BrokenOffError(str(error)) from error
        except httpx.HTTPError as error:
            raise _BrokenOffError(str(describe_failure(error))) from error
        self._check_end()

    def _check_end(self) -> None:
        """Judge the end of a body. Raises _BrokenOffError where more should have come."""
        where, total = printable(self._wish.url), self._record.total
        if total is not None and self._have < total:
            raise _BrokenOffError(f"{where}: ended after {self._have:,} of {total:,} bytes")
        if self._least is None:
            self._least = self._hooks.least_size(self.part)
        if self._least is not None and self._have >= self._least:
            return
        if total is None:  # the end of the connection was the only sign of the end
            of = "" if self._least is None else f" of at least {self._least:,}"
            raise _BrokenOffError(f"{where}: ended after {self._have:,}{of} bytes")
        raise ModelFileError(
            f"{where}: the file on the server is cut short, after {self._have:,} bytes; it is "
            "removed. Remedy: another address, or tell its publisher"
        )

    def _accept(self, file: BinaryIO, body: RemoteBody) -> None:
        """Compare a response with what is known, and check that it fits, before it is read."""
        known, version = self._record, body.version
        if body.start == 0:
            if self._have:
                self._start_over(file, "the server sends the file from its start")
            # Else the first response, whose version counts.
        elif (known.total is not None and body.total is not None and body.total != known.total) or (
            known.etag is not None and version.etag is not None and version.etag != known.etag
        ):
            self._start_over(file, "the file has changed on the server")
            raise _BrokenOffError(f"{printable(self._wish.url)}: has changed meanwhile")
        total = body.total if body.total is not None else (known.total if body.start else None)
        if body.start == 0:
            known = SourceRecord(known.url, version.etag, version.last_modified)
        self._record = replace(known, total=total)
        write_record(self._wish.target, self._record)
        if total is not None:
            self._check_size(total)
        self._check_space(0 if total is None else total - self._have)

    def _receive(self, file: BinaryIO, body: RemoteBody) -> None:
        hooks, total = self._hooks, self._record.total
        file.seek(self._have)
        hooks.progress(self._have, total)
        window_began, window_bytes = hooks.clock(), 0
        for chunk in body.chunks:
            if total is not None and self._have + len(chunk) > total:
                raise _TooLargeError(
                    f"{printable(self._wish.url)}: sends more than the {total:,} bytes that it "
                    "announced; what has arrived is removed"
                )
            self._check_most(self._have + len(chunk))
            _write_whole(file, chunk)
            self._digest.update(chunk)
            self._have += len(chunk)
            self._look(total)
            if total is None and self._have >= self._next_space_check:
                self._next_space_check = self._have + FREE_CHECK_BYTES
                self._check_space(0)
            hooks.progress(self._have, total)
            window_bytes += len(chunk)
            if (now := hooks.clock()) - window_began >= STALL_SECONDS:
                if window_bytes < STALL_BYTES:
                    raise _BrokenOffError(
                        f"{printable(self._wish.url)}: sent only {window_bytes:,} bytes in "
                        f"{now - window_began:.0f} s"
                    )
                window_began, window_bytes = now, 0

    def _look(self, total: int | None) -> None:
        """Judge the head as soon as enough of it is there."""
        while self._least is None and self._next_look <= self._have:
            self._next_look *= 2
            if self._next_look <= self._have:
                continue  # only the latest counts
            if self._have > LAST_LOOK:
                return
            self._least = self._hooks.least_size(self.part)
            if self._least is None:
                return
            if total is not None and self._least > total:
                raise ModelFileError(
                    f"{printable(self._wish.url)}: announces {total:,} bytes, but its head asks "
                    f"for at least {self._least:,}: the file on the server is cut short. Remedy: "
                    "another address, or tell its publisher"
                )
            if total is None:
                self._check_size(self._least)
                self._check_space(self._least - self._have)

    def _check_size(self, size: int) -> None:
        self._check_most(size)
        self._hooks.check_size(size)

    def _check_most(self, size: int) -> None:
        most = self._wish.most_bytes
        if most is not None and size > most:
            raise _TooLargeError(
                f"{printable(self._wish.url)}: larger than --max-bytes allows ({most:,} bytes); "
                "what has arrived is removed"
            )

    def _check_space(self, more: int) -> None:
        needed = max(0, more) + self._wish.space_beside
        folder = self.part.parent
        free = self._hooks.free_space(folder)
        if free - needed < DISK_RESERVE:
            raise DownloadError(
                f"{printable(self._wish.url)}: not enough space on the disk: {format_gib(needed)} "
                f"more are needed and {format_gib(DISK_RESERVE)} must stay free, but {folder} has "
                f"{format_gib(free)}. Remedy: llama-gateway cache list shows what it holds; or "
                "another folder, in LLAMA_GATEWAY_CACHE"
            )

    def _start_over(self, file: BinaryIO, why: str) -> None:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise self._given_up(why)
        self._hooks.note(f"Starting over: {why}")
        self._empty(file)

    def _empty(self, file: BinaryIO) -> None:
        file.truncate(0)
        self._digest = hashlib.sha256()
        self._have, self._least = 0, None
        self._next_look, self._next_space_check = FIRST_LOOK, FREE_CHECK_BYTES
        self._record = SourceRecord(self._record.url)

    def _given_up(self, why: str) -> DownloadError:
        return DownloadError(
            f"{why}; given up after several tries. {format_gib(self._have)} are kept: the same "
            "command goes on from there"
        )


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of `data`: an unbuffered file may take a part of it, as where a disk fills."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


FIRST_WAIT = 0.2  # seconds at another process's lock before this one says that it waits

WAIT_ROUND = 30.0

MOST_IDLE_ROUNDS = 20
"""Rounds in which the other process's download may not grow: it checks a digest, or hangs."""


@dataclass(frozen=True, slots=True)
class ModelWish:
    """A model to be downloaded."""

    url: httpx.URL
    sha256: tuple[str, ...] = ()  # of each file, in order
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None  # of all files


def fetch_model(
    wish: ModelWish,
    cache: Path,
    hooks: DownloadHooks,
    *,
    check_fits: Callable[[ModelFile], None],
    make_client: Callable[[], httpx.Client] = open_client,
) -> Path:
    """Return the first file of the model in the cache, downloaded now unless it is there.

    `check_fits` raises where a model of that size is of no use here; it is asked before the first
    byte is read. Raises LocalFleetError and OSError.
    """
    urls = part_urls(wish.url)
    if wish.sha256 and len(wish.sha256) != len(urls):
        raise ModelUrlError(
            f"--sha256: given {len(wish.sha256)} times, but the model has {len(urls)} "
            f"{'file' if len(urls) == 1 else 'files'}; give it once for each, in order"
        )
    if found := _with_digest(wish, cache):
        return found
    folder = downloads_folder(cache) / cache_key(urls[0])
    targets = [folder / file_name(url) for url in urls]
    if _complete(wish, targets):
        return targets[0]
    with _only_process(folder, targets, hooks.note):
        if not _complete(wish, targets):
            with make_client() as client:
                _download_all(client, wish, urls, targets, hooks, check_fits)
    return targets[0]


def _download_all(
    client: httpx.Client,
    wish: ModelWish,
    urls: list[httpx.URL],
    targets: list[Path],
    hooks: DownloadHooks,
    check_fits: Callable[[ModelFile], None],
) -> None:
    sizes = [target.stat().st_size if target.exists() else 0 for target in targets]
    if len(urls) > 1:
        for index, (url, target) in enumerate(zip(urls, targets, strict=True)):
            if not target.exists():
                with open_remote(client, url, token=wish.token) as body:
                    sizes[index] = body.total or 0
    name = targets[0].stem
    for index, (url, target) in enumerate(zip(urls, targets, strict=True)):
        if target.exists():
            continue

        def check_size(size: int, index: int = index) -> None:
            sizes[index] = size
            check_fits(ModelFile(targets[0], name, sum(sizes), None))

        beside = sum(
            max(0, sizes[later] - _part_size(targets[later]))
            for later in range(index + 1, len(urls))
            if not targets[later].exists()
        )
        others = sum(sizes) - sizes[index]
        digest = download(
            client,
            DownloadWish(
                url,
                target,
                sha256=wish.sha256[index] if wish.sha256 else None,
                token=wish.token,
                most_bytes=None if wish.most_bytes is None else max(0, wish.most_bytes - others),
                space_beside=beside,
            ),
            replace(hooks, check_size=check_size, least_size=least_size),
        )
        if not wish.sha256:
            hooks.note(f"{target.name} has the SHA-256 {digest}; --sha256 checks it next time")


def _complete(wish: ModelWish, targets: list[Path]) -> bool:
    """Whether all files are there. Raises DigestError where one is not the file that was asked."""
    if not all(target.is_file() for target in targets):
        return False
    for target, wanted in zip(targets, wish.sha256, strict=False):
        record = read_record(target)
        digest = record.sha256 if record is not None else None
        if digest is None:
            digest = file_digest(target)
            if record is not None:
                write_record(target, replace(record, sha256=digest))
        if digest != wanted:
            raise DigestError(
                f"{target}: the file in the cache has the SHA-256 {digest}, not {wanted}. Remedy: "
                f"correct --sha256, or download it again after: llama-gateway cache remove "
                f"{target.name}"
            )
    return True


def _with_digest(wish: ModelWish, cache: Path) -> Path | None:
    """Return a downloaded file with the digest that was asked, from whatever address."""
    if len(wish.sha256) != 1:
        return None
    for record in sorted(downloads_folder(cache).glob("*/*.gguf.source.json")):
        target = record.with_name(record.name.removesuffix(".source.json"))
        found = read_record(target)
        if found is not None and found.sha256 == wish.sha256[0] and target.is_file():
            return target
    return None


@contextmanager
def _only_process(folder: Path, targets: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a model's downloads; wait while another process makes progress with it."""
    path = folder.with_name(f"{folder.name}.lock")
    idle, seen, wait = 0, -1, FIRST_WAIT
    while True:
        lock = file_lock(path, timeout=wait)
        try:
            lock.__enter__()
            break
        except TimeoutError:
            if wait == FIRST_WAIT:
                note("Another process is downloading this model: waiting for it")
            wait = WAIT_ROUND
            size = sum(_part_size(target) for target in targets)
            idle, seen = (idle + 1, seen) if size == seen else (0, size)
            if idle >= MOST_IDLE_ROUNDS:
                raise DownloadError(
                    f"{path}: another process holds the lock of this download and has made no "
                    f"progress for {idle * WAIT_ROUND:.0f} s. Remedy: end it"
                ) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _part_size(target: Path) -> int:
    try:
        return part_path(target).stat().st_size
    except OSError:
        return 0
