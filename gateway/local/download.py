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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

import httpx
import msgspec

from gateway import __version__
from gateway.config.errors import single_line
from gateway.local import LocalFleetError, ModelFileError
from gateway.local.cache import DOWNLOADS, file_lock
from gateway.local.gguf import ModelFile, least_size, part_names
from gateway.local.memory import MIB, format_gib
from gateway.system import replace_file


class ModelUrlError(LocalFleetError):
    """The address can't be used, by the way it is written."""


def is_url(model: str) -> bool:
    """Whether `--model` names an address rather than a file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", model) is not None


def parse_model_url(text: str, base: httpx.URL | None = None) -> httpx.URL:
    """Return the address of a model, or the one to which `base` redirects, without its fragment.

    Raises ModelUrlError, whose text holds no secret of it.
    """
    where = "--model" if base is None else f"{printable(base)}: redirects"
    url = None
    if 0 < len(text) <= 8192 and text.isprintable():
        with suppress(httpx.InvalidURL, ValueError):
            url = httpx.URL(text.strip()) if base is None else base.join(text)
    if url is None or not url.host or (url.port is not None and not 1 <= url.port <= 65535):
        raise ModelUrlError(
            f"{where}: not a valid URL. Remedy: https://HOST/PATH.gguf, in quotes where it holds "
            "characters of the shell"
        )
    is_local = is_loopback(url) and (base is None or is_loopback(base))
    if url.scheme != "https" and not (url.scheme == "http" and is_local):
        raise ModelUrlError(
            f"{where}: {printable(url)}: only https is supported (http on this machine's own "
            "addresses only): a model could be replaced on its way. Remedy: https://, or download "
            "the file yourself and name it"
        )
    return url.copy_with(fragment=None)


def same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    """Whether credentials for one address may be sent to the other."""
    # httpx drops a port that is the scheme's own.
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def printable(url: httpx.URL) -> str:
    """Return the address without password and query, for people and files."""
    shown = f"{url.scheme}://{url.netloc.decode(errors='replace')}{url.path}"
    return f"{shown}?..." if url.query else shown


def is_loopback(url: httpx.URL) -> bool:
    """Whether the address is of this machine, so that nobody can listen in."""
    with suppress(ValueError):
        return ip_address(url.host).is_loopback
    return url.host == "localhost"


def file_name(url: httpx.URL) -> str:
    """Return a safe name for the file behind an address; it ends in `.gguf`.

    Servers show the model under this name, without the ending.
    """
    last = PurePosixPath(unquote(url.path)).name
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", last).strip("._")
    stem = safe[: -len(".gguf")] if safe.lower().endswith(".gguf") else safe
    return f"{stem[:120] or 'model'}.gguf"


def part_urls(url: httpx.URL) -> list[httpx.URL]:
    """Return the addresses of all files of the model, in order: several where it is split."""
    path, mark, query = url.raw_path.decode("ascii").partition("?")
    folder, _, last = path.rpartition("/")
    names = part_names(last)
    if names == [last]:
        return [url]
    most = 256  # the largest models published so far have some 30
    if not 1 <= len(names) <= most:
        raise ModelUrlError(
            f"{printable(url)}: a model of {len(names)} files; at most {most} are supported"
        )
    return [url.copy_with(raw_path=f"{folder}/{name}{mark}{query}".encode()) for name in names]


def cache_key(url: httpx.URL) -> str:
    """Return a name for the address's folder in the cache. It tells nothing of its secrets."""
    whole = str(url.copy_with(username=None, password=None, fragment=None))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


MOST_REDIRECTS = 8


class RemoteError(LocalFleetError):
    """The file can't be read. The text names the server and what it answered."""

    def __init__(
        self, message: str, *, retryable: bool = True, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable  # whether a later try may help
        self.retry_after = retry_after  # seconds, where the server names them


class RangeRefusedError(RemoteError):
    """The server has no such range of the file, so it must be read from its start."""


@dataclass(frozen=True, slots=True)
class RemoteBody:
    """The bytes of a file from `start` on. Reading `chunks` raises httpx.TransportError."""

    start: int
    total: int | None  # bytes of the whole file; None: the server does not say
    etag: str | None
    last_modified: str | None
    chunks: Iterator[bytes]


def open_client(verify: ssl.SSLContext | None = None) -> httpx.Client:
    """Return a client for `open_remote`; SSL_CERT_FILE and proxies of the environment count.

    Addresses of this machine are reached without a proxy.
    """
    return httpx.Client(
        timeout=httpx.Timeout(30.0, read=60.0),  # of the body: between two pieces of it
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
    """Open the file at `url` from byte `start` on, over redirects; only its host gets `token`.

    With `if_range` the body begins at 0 instead where the file is no longer that version. Raises
    RemoteError, and ModelUrlError for a redirect to where it may not lead.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": f"llama-gateway/{__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if if_range is not None:
            headers["If-Range"] = if_range
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
        try:
            if response.status_code not in {301, 302, 303, 307, 308}:
                yield _body(response, start)
                return
        finally:
            response.close()
        current = parse_model_url(response.headers.get("location", ""), current)
    told = f"{printable(url)}: more than {MOST_REDIRECTS} redirects"
    raise RemoteError(told, retryable=False)


def describe_failure(error: httpx.HTTPError) -> RemoteError:
    """Return a connection's failure as a RemoteError of the host's."""
    host = error.request.url.host
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return RemoteError(
            f"{host}: its certificate is not trusted: {single_line(str(error))}. Remedy: the PEM "
            "file of its authority in SSL_CERT_FILE",
            retryable=False,
        )
    # The texts of some errors are empty, and others quote what the server sent.
    what = single_line(str(error))[:200] or type(error).__name__
    return RemoteError(f"{host}: {what}")


def _body(response: httpx.Response, start: int) -> RemoteBody:
    """Judge a response by its head. Raises RemoteError."""
    where, headers = printable(response.request.url), response.headers
    encoding = headers.get("content-encoding", "identity")
    if response.status_code in {200, 206} and encoding.strip().lower() != "identity":
        told = f"{where}: sends the file as {single_line(encoding)}, unasked"
        raise RemoteError(told, retryable=False)
    content_range = headers.get("content-range", "").strip()
    match response.status_code:
        case 200:
            length = headers.get("content-length")  # digits: httpx refuses any other
            first, total = 0, None if length is None else int(length)
        case 206:
            found = re.fullmatch(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)", content_range)
            if found is None or int(found[1]) != start:
                raise RangeRefusedError(f"{where}: sends another range than the one asked")
            first, total = start, None if found[3] == "*" else int(found[3])
        case 416:
            raise RangeRefusedError(f"{where}: has no such range")
        case _:
            raise _refusal(response)
    etag, last_modified = headers.get("etag"), headers.get("last-modified")
    return RemoteBody(first, total, etag, last_modified, response.iter_raw())


def _refusal(response: httpx.Response) -> RemoteError:
    status, after = response.status_code, response.headers.get("retry-after", "")
    told = f"HTTP {status} {httpx.codes.get_reason_phrase(status)}".rstrip()
    remedy = {
        401: ". Remedy: a token, in the variable that --token-env names",
        403: (
            ". Remedy: a token with access, in the variable that --token-env names; for a gated "
            "model accept its terms on its page first"
        ),
        404: ". Remedy: check the address; a private model needs a token, see --token-env",
    }.get(status, "")
    says_seconds = after.isascii() and after.isdecimal() and len(after) < 10
    return RemoteError(
        f"{printable(response.request.url)}: {told}{remedy}",
        retryable=status in {408, 425, 429, 500, 502, 503, 504},
        retry_after=min(float(after), 60.0) if says_seconds else None,
    )


DISK_RESERVE = 256 * MIB  # stays free
FIRST_LOOK = 32  # bytes after which it shows whether it is a model at all
MOST_FAILURES = 6  # in a row, none of which brought 1 MiB
MOST_TRIES = 200
STALL_SECONDS, STALL_BYTES = 60.0, 64 << 10  # a server that sends less in that time is left


class DigestError(LocalFleetError):
    """The file is not the one whose digest was given; it is removed."""


class _TooLargeError(LocalFleetError):
    pass


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where a file comes from, beside it on the disk. It holds no secret of the address."""

    url: str  # printable
    etag: str | None = None
    last_modified: str | None = None
    total: int | None = None
    sha256: str | None = None  # of the whole file, once it is there

    @property
    def if_range(self) -> str | None:
        """The value of `If-Range`, which takes no weak ETag; None: a part can't be resumed."""
        if self.etag is not None and not self.etag.startswith("W/"):
            return self.etag
        return self.last_modified


@dataclass(frozen=True, slots=True)
class DownloadHooks:
    """What a download asks and tells. Times and pauses are passed in by tests."""

    check_size: Callable[[int], None] = lambda _: None  # raises where so large a file is no use
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
    replace_file(record_path(target), json.dumps(asdict(record), indent=2).encode() + b"\n")


@dataclass(slots=True, eq=False)
class Download:
    """Gets one file into its part and gives it its name, over as many connections as it takes."""

    client: httpx.Client
    url: httpx.URL
    target: Path
    hooks: DownloadHooks
    sha256: str | None = None  # lower-case hexadecimal
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None
    space_beside: int = 0  # bytes on the disk that other files will need
    have: int = 0  # bytes in the part
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    _least: int | None = None  # bytes that the head asks for, once it is there
    _next_look: int = FIRST_LOOK
    _where: str = field(init=False)
    _record: SourceRecord = field(init=False)
    _file: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self._where = printable(self.url)
        self._record = read_record(self.target) or SourceRecord(self._where)

    def run(self) -> str:
        """Download the file; return its SHA-256. Raises LocalFleetError and OSError."""
        part = part_path(self.target)
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        keep = True
        with os.fdopen(descriptor, "r+b", buffering=0) as self._file:
            try:
                self._take_up()
                self._fetch()
                os.fsync(self._file.fileno())
                return self._finish(part)
            except OSError as error:
                raise LocalFleetError(
                    f"{part}: {(error.strerror or str(error)).lower()}; what has arrived is kept"
                ) from error
            except (DigestError, ModelFileError, _TooLargeError):
                keep = False
                raise
            finally:
                if not keep or self.have == 0:
                    part.unlink(missing_ok=True)
                    if not self.target.exists():
                        record_path(self.target).unlink(missing_ok=True)

    def _take_up(self) -> None:
        """Go on with the part of an earlier run where that is safe."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return
        if self._record.if_range is None and self.sha256 is None:
            self._start_over(
                "the server does not tell whether its file has changed (with --sha256 it could be "
                "resumed)"
            )
            return
        self._file.seek(0)
        while block := self._file.read(4 * MIB):
            self._digest.update(block)
            self.have += len(block)
        self.hooks.note(f"Resuming after {format_gib(self.have)}")

    def _fetch(self) -> None:
        """Try until the whole file is there. Raises LocalFleetError and OSError."""
        failures, best = 0, self.have
        for number in range(1, MOST_TRIES + 1):
            try:
                self._try_once()
                break
            except RemoteError as error:
                if not error.retryable:
                    raise
                failures = 1 if self.have - best >= MIB else failures + 1
                best = max(best, self.have)
                if failures >= MOST_FAILURES or number == MOST_TRIES:
                    raise LocalFleetError(
                        f"{error}; given up after several tries. {format_gib(self.have)} are kept: "
                        "the same command goes on from there"
                    ) from error
                pause = max(min(30.0, 2.0 ** (failures - 1)), error.retry_after or 0.0)
                self.hooks.note(f"{error}; next try in {pause:.0f} s")
                self.hooks.sleep(pause)

    def _finish(self, part: Path) -> str:
        """Give the whole file its own name; return its digest. Raises DigestError and OSError."""
        found = self._digest.hexdigest()
        if self.sha256 is not None and found != self.sha256:
            raise DigestError(
                f"{self._where}: the file has the SHA-256 {found}, not {self.sha256}: it is "
                "another file or was damaged, and has been removed. Remedy: compare the digest "
                "with its publisher's; the same command downloads it again"
            )
        part.chmod(0o644)
        part.replace(self.target)
        write_record(self.target, replace(self._record, total=self.have, sha256=found))
        return found

    def _try_once(self) -> None:
        """Read one response into the part. Raises RemoteError."""
        if not self.have or self.have != self._record.total:
            if_range = self._record.if_range
            try:
                with open_remote(
                    self.client, self.url, start=self.have, if_range=if_range, token=self.token
                ) as body:
                    self._accept(body)
                    self._receive(body.chunks)
            except RangeRefusedError as error:
                self._start_over(str(error))
                raise
            except httpx.HTTPError as error:
                raise describe_failure(error) from error
        self._check_end()

    def _accept(self, body: RemoteBody) -> None:
        """Compare a response with what is known, and check that it fits, before it is read."""
        known = self._record
        if body.start == 0:
            if self.have:
                self._start_over("the server sends the file from its start")
            known = SourceRecord(known.url, body.etag, body.last_modified)
        elif any(
            len({old, new} - {None}) > 1
            for old, new in ((known.total, body.total), (known.etag, body.etag))
        ):
            raise RangeRefusedError(f"{self._where}: has changed on the server")
        total = known.total if body.total is None else body.total
        self._record = replace(known, total=total)
        write_record(self.target, self._record)
        if total is not None:
            self.hooks.check_size(total)
        self._check_limits(self.have if total is None else total)

    def _receive(self, chunks: Iterator[bytes]) -> None:
        hooks, total = self.hooks, self._record.total
        self._file.seek(self.have)
        hooks.progress(self.have, total)
        window_began, window_bytes = hooks.clock(), 0
        for chunk in chunks:
            if total is not None and self.have + len(chunk) > total:
                raise _TooLargeError(
                    f"{self._where}: sends more than the {total:,} bytes that it announced; what "
                    "has arrived is removed"
                )
            if total is None:
                self._check_limits(self.have + len(chunk))
            rest = memoryview(chunk)
            while rest:  # an unbuffered file may take a part of it, as where a disk fills
                rest = rest[self._file.write(rest) or 0 :]
            self._digest.update(chunk)
            self.have += len(chunk)
            if self._least is None and self.have >= self._next_look:
                self._look()
            hooks.progress(self.have, total)
            window_bytes += len(chunk)
            if (now := hooks.clock()) - window_began >= STALL_SECONDS:
                if window_bytes < STALL_BYTES:
                    raise self._broken_off(
                        f"sent only {window_bytes:,} bytes in {now - window_began:.0f} s"
                    )
                window_began, window_bytes = now, 0

    def _look(self) -> None:
        """Judge the head if enough of it is there. Raises ModelFileError."""
        self._next_look = 2 * self.have
        self._least = least_size(part_path(self.target))
        total = self._record.total
        if self._least is not None and total is None:
            self.hooks.check_size(self._least)
            self._check_limits(self._least)
        elif (self._least or 0) > (total or 0):
            raise self._cut_short()

    def _check_end(self) -> None:
        """Judge the end of a body. Raises RemoteError where more should have come."""
        have, total = self.have, self._record.total
        if total is not None and have < total:
            raise self._broken_off(f"ended after {have:,} of {total:,} bytes")
        if self._least is None:
            self._least = least_size(part_path(self.target))
        if self._least is None or have < self._least:
            if total is None:  # the end of the connection was the only sign of the end
                raise self._broken_off(f"ended after {have:,} bytes, before the end of the model")
            raise self._cut_short()

    def _check_limits(self, size: int) -> None:
        if self.most_bytes is not None and size > self.most_bytes:
            raise _TooLargeError(
                f"{self._where}: larger than --max-bytes allows ({self.most_bytes:,} bytes); what "
                "has arrived is removed"
            )
        needed, folder = max(0, size - self.have) + self.space_beside, self.target.parent
        free = self.hooks.free_space(folder)
        if free - needed < DISK_RESERVE:
            raise LocalFleetError(
                f"{self._where}: not enough space on the disk: {format_gib(needed)} more are "
                f"needed and {format_gib(DISK_RESERVE)} must stay free, but {folder} has "
                f"{format_gib(free)}. Remedy: llama-gateway cache list shows what it holds; or "
                "another folder, in LLAMA_GATEWAY_CACHE"
            )

    def _start_over(self, why: str) -> None:
        self.hooks.note(f"Starting over: {why}")
        self._file.truncate(0)
        self._digest = hashlib.sha256()
        self.have, self._least, self._next_look = 0, None, FIRST_LOOK
        self._record = SourceRecord(self._where)

    def _broken_off(self, how: str) -> RemoteError:
        return RemoteError(f"{self._where}: {how}")

    def _cut_short(self) -> ModelFileError:
        asked = "" if self._least is None else f", but its head asks for at least {self._least:,}"
        return ModelFileError(
            f"{self._where}: the file on the server is cut short: it has "
            f"{self._record.total or self.have:,} bytes{asked}; what has arrived is removed. "
            "Remedy: another address, or tell its publisher"
        )


FIRST_WAIT = 0.2  # seconds at another process's lock before this one says that it waits
WAIT_ROUND = 30.0
MOST_IDLE_ROUNDS = 20  # in which the other's part may not grow: it checks a digest, or hangs


@dataclass(frozen=True, slots=True)
class ModelWish:
    """A model to be downloaded."""

    url: httpx.URL
    sha256: tuple[str, ...] = ()  # none, or one of each file, in order
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None  # of all files


def fetch_model(
    wish: ModelWish, cache: Path, hooks: DownloadHooks, *, check_fits: Callable[[ModelFile], None]
) -> Path:
    """Return the first file of the model in the cache, downloaded now unless it is there.

    `check_fits` raises where a model of that size is of no use here; it is asked before the first
    byte is read. Raises LocalFleetError and OSError.
    """
    urls = part_urls(wish.url)
    if found := _with_digest(wish, cache):
        return found
    folder = cache / DOWNLOADS / cache_key(urls[0])
    targets = [folder / file_name(url) for url in urls]
    if _complete(wish, targets):
        return targets[0]
    with _only_process(folder, targets, hooks.note), open_client() as client:
        if _complete(wish, targets):
            return targets[0]
        # Sizes count for the model as a whole.
        sizes = [target.stat().st_size if target.exists() else 0 for target in targets]
        missing = [index for index, target in enumerate(targets) if not target.exists()]
        for index in missing if len(urls) > 1 else ():
            with open_remote(client, urls[index], token=wish.token) as body:
                sizes[index] = body.total or 0
        for index in missing:

            def check_size(size: int, index: int = index) -> None:
                sizes[index] = size
                check_fits(ModelFile(targets[0], targets[0].stem, sum(sizes), None))

            later = [other for other in missing if other > index]
            others = sum(sizes) - sizes[index]
            digest = Download(
                client,
                urls[index],
                targets[index],
                replace(hooks, check_size=check_size),
                sha256=wish.sha256[index] if wish.sha256 else None,
                token=wish.token,
                most_bytes=None if wish.most_bytes is None else max(0, wish.most_bytes - others),
                space_beside=sum(max(0, sizes[at] - _part_size(targets[at])) for at in later),
            ).run()
            if not wish.sha256:
                told = f"{targets[index].name} has the SHA-256 {digest}"
                hooks.note(f"{told}; --sha256 checks it next time")
    return targets[0]


def _complete(wish: ModelWish, targets: list[Path]) -> bool:
    """Whether all files are there. Raises DigestError where one is not the file that was asked."""
    if not all(target.is_file() for target in targets):
        return False
    for target, wanted in zip(targets, wish.sha256, strict=False):
        record = read_record(target)
        digest = None if record is None else record.sha256
        if digest is None:
            with target.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
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
    for record in sorted((cache / DOWNLOADS).glob("*/*.gguf.source.json")):
        target = record.with_name(record.name.removesuffix(".source.json"))
        found = read_record(target)
        if found is not None and found.sha256 == wish.sha256[0] and target.is_file():
            return target
    return None


@contextmanager
def _only_process(folder: Path, targets: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a model's downloads; wait while another process makes progress with it."""
    idle, seen, wait = 0, -1, FIRST_WAIT
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(file_lock(folder, timeout=wait))
                break
            except TimeoutError:
                if wait == FIRST_WAIT:
                    note("Another process is downloading this model: waiting for it")
                wait = WAIT_ROUND
                size = sum(_part_size(target) for target in targets)
                idle, seen = (idle + 1, seen) if size == seen else (0, size)
                if idle >= MOST_IDLE_ROUNDS:
                    raise LocalFleetError(
                        f"{folder}.lock: another process holds the lock of this download and has "
                        f"made no progress for {idle * WAIT_ROUND:.0f} s. Remedy: end it"
                    ) from None
        yield


def _part_size(target: Path) -> int:
    with suppress(OSError):
        return part_path(target).stat().st_size
    return 0
