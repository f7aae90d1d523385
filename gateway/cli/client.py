"""How commands reach the gateway: where it is, its answers in words, or its store without it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self, TypeVar
from urllib.parse import quote, urlsplit

from gateway.cli import options
from gateway.cli.terminal import CommandFailed, WrongUsage, failing_by, print_note
from gateway.config.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from gateway.config.listeners import AdminSettings
    from gateway.config.settings import Settings
    from gateway.store.database import StoreLocation
    from gateway.store.store import Store


KEY_VARIABLE = "LLAMA_GATEWAY_KEY"
LONGEST_KEY = 4096  # bytes of a key file that are read
LARGEST_ANSWER = 256 << 20  # bytes; a stream of events may be longer
LONGEST_LINE = 64 << 20  # bytes of an event; that of 10,000 nodes has some 8 million
LARGEST_PAGE = 1000  # objects of one answer of the admin API
# Seconds without a byte of the admin API; longer than a probe of a node that hangs.
ADMIN_SECONDS = 30.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_PEM_END = "-----END CERTIFICATE-----"


class GatewayAway(CommandFailed):
    """The gateway does not answer, or can't at this time: another try may help."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoGateway(GatewayAway):
    """Nothing listens at the gateway's address."""


class GatewayRefused(CommandFailed):
    """The gateway answers with an error that another try does not change."""

    def __init__(self, message: str, code: int, body: Mapping[str, Any]) -> None:
        # What the command's user has written wrongly is wrong usage.
        super().__init__(message, 2 if code == 400 else 1)
        self.code = code  # the HTTP status
        self.body = body


class GatewayClient:
    """A client of one listener of the gateway. Raises CommandFailed, with words for people."""

    URL_FLAG: ClassVar[str]
    CA_FLAG: ClassVar[str]
    LISTENER: ClassVar[str]  # the thing that `URL_FLAG` names
    STRANGER: ClassVar[str]  # a server there that is no gateway; with `{url}` and `{path}`
    # Statuses after which a request is tried again, unless the gateway says otherwise.
    AGAIN: ClassVar[frozenset[int]] = frozenset()

    def __init__(
        self,
        url: str,
        key: str | None,
        tls: ssl.SSLContext | None = None,
        timeout: httpx.Timeout | float = ADMIN_SECONDS,
    ) -> None:
        import httpx  # commands that ask no gateway start without it

        self.url = url
        # Without TLS it trusts nobody, as nobody is asked: to read the authorities takes 30 ms.
        verify = tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            self._client = httpx.Client(
                base_url=url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=timeout,
                # With an explicit transport httpx takes no proxy from the environment: the gateway
                # is on loopback or in a private network, and the key is for nobody else.
                transport=httpx.HTTPTransport(verify=verify),
            )
        except httpx.InvalidURL as error:
            raise WrongUsage(
                f"the address is no valid URL: {error}; an IPv6 address needs brackets"
            ) from None

    def request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the JSON object that the gateway answers; `more` is for httpx."""
        with self._answered(method, path, params=parameters, json=body, **more) as response:
            value = json_object(_read(response))
        if value is None:
            stranger = self.STRANGER.format(url=self.url, path=path)
            raise CommandFailed(f"the server at {stranger}: {self.URL_FLAG} names its address")
        return value

    @contextlib.contextmanager
    def _answered(self, method: str, path: str, **asked: Any) -> Iterator[httpx.Response]:
        """Ask, and yield an answer that is no error, for its content to be read."""
        import httpx

        try:
            with self._client.stream(method, path, **asked) as response:
                if not response.is_success:
                    raise self._refused(response, json_object(_read(response)) or {})
                yield response
        except httpx.DecodingError:
            raise CommandFailed(f"the answer of {self.url}{path} can't be read") from None
        except httpx.HTTPError as error:
            raise self._unanswered(error) from None

    def _refused(self, response: httpx.Response, body: Mapping[str, Any]) -> CommandFailed:
        code, found = response.status_code, body.get("error")
        error = found if isinstance(found, dict) else {"message": found}
        told = f"the gateway at {self.url} answers {code}"
        remedy = self.remedy(code, error.get("code"), response.request.url.path)
        if message := error.get("message"):
            told += f": {str(message).rstrip('.') if remedy else message}"
        if remedy:
            told += f" ({remedy})"
        if code in self.AGAIN and response.headers.get("x-should-retry") != "false":
            return GatewayAway(told, _seconds(response.headers.get("retry-after")))
        return GatewayRefused(told, code, body)

    def remedy(self, code: int, error_code: object, path: str) -> str | None:
        """Return what to do about an answer of this status, if more than its message is known."""
        raise NotImplementedError

    def _unanswered(self, error: httpx.HTTPError) -> CommandFailed:
        """The error for a request without an answer: why, and what to do."""
        import httpx

        why = str(error).partition("] ")[2] or str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return CommandFailed(
                f"the certificate of the gateway at {self.url} is not trusted ({why}): name it, or "
                f"the authority behind it, with {self.CA_FLAG}"
            )
        if isinstance(error, httpx.ConnectError) and "SSL" not in str(error):
            return NoGateway(
                f"no gateway answers at {self.url} ({why}): is it running? "
                f"{self.URL_FLAG} names its {self.LISTENER}"
            )
        other = "http" if self.url.startswith("https:") else "https"
        told = f"the gateway at {self.url} did not answer ({why}); does it speak {other}?"
        is_our_fault = isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError)
        return CommandFailed(told) if is_our_fault else GatewayAway(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()


class AdminClient(GatewayClient):
    """A client of the admin API."""

    URL_FLAG = "--admin-url"
    CA_FLAG = "--admin-ca"
    LISTENER = "admin listener"
    STRANGER = "{url}{path} is no gateway's admin API"

    def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes."""
        return objects(self.request("GET", "/admin/nodes"), "nodes")

    def node(self, name: str) -> dict[str, Any]:
        """Return one node."""
        return self.request("GET", f"/admin/nodes/{quote(name, safe='')}")

    def node_action(self, name: str, action: str, **parameters: float) -> None:
        """Drain, resume or probe a node."""
        path = f"/admin/nodes/{quote(name, safe='')}/{action}"
        self.request("POST", path, {key: f"{value:g}" for key, value in parameters.items()})

    def explanation(self, request_id: str) -> dict[str, Any]:
        """Return why the requests of this id went where they went."""
        return self.request("GET", f"/admin/requests/{quote(request_id, safe='')}/why")

    def text(self, path: str, parameters: Mapping[str, str], *, timeout: float) -> str:
        """Return the text at this path."""
        with self._answered("GET", path, params=parameters, timeout=timeout) as response:
            return _read(response).decode(errors="replace")

    def events(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the data of each event of a stream, until it ends.

        Raises CommandFailed, if it breaks off or is silent for `ADMIN_SECONDS`.
        """
        name = ""
        with self._answered("GET", path) as response:
            for line in _bounded_lines(response.iter_bytes()):
                if line.startswith(b"event: "):
                    name = line[7:].decode("utf-8", "replace")
                elif line.startswith(b"data: "):
                    if (value := json_object(line[6:])) is None:
                        told = f"the stream of {self.url}{path} holds what is no JSON"
                        raise CommandFailed(told)
                    yield name, value

    def remedy(self, code: int, error_code: object, path: str) -> str | None:
        """Name the flag for the key."""
        return "name a file that holds its admin key with --admin-key-file" if code == 401 else None


# The public listener: files and batches.

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
# Seconds without a byte; a large upload is written to the disk before it is answered.
ANSWER_SECONDS = 120.0
LONGEST_RETRY_AFTER = 60.0  # seconds of a pause that the gateway may ask for
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between tries; they double
PAGE = 100  # batches that are asked for at once
# Statuses of a batch that has ended.
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


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
                if failed_at is None and self.seconds > 0:
                    self.note(f"{error}; trying again for up to {self.seconds:.0f} s")
                failed_at = now if failed_at is None else failed_at
                if (left := failed_at + self.seconds - now) <= 0:
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
    AGAIN = frozenset({408, 429, 500, 502, 503, 504})

    def upload(self, file: BinaryIO, name: str) -> dict[str, Any]:
        """Upload a batch's input, streamed."""
        file.seek(0)
        return self.request(
            "POST", "/v1/files", data={"purpose": "batch"},
            files={"file": (name, file, "application/jsonl")}
        )  # fmt: skip

    def find_upload(self, name: str, size: int) -> dict[str, Any] | None:
        """Return the newest earlier upload of this name and size, if there is one."""
        listed = objects(self.request("GET", "/v1/files", {"purpose": "batch"}), "data")
        wanted = (name, size)
        return next((x for x in listed if (x.get("filename"), x.get("bytes")) == wanted), None)

    def create(self, fields: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """Create a batch; with the same key again it is the same batch."""
        headers = {"idempotency-key": idempotency_key}
        return self.request("POST", "/v1/batches", body=fields, headers=headers)

    def batch(self, id_: str) -> dict[str, Any]:
        """Return one batch."""
        return self.request("GET", _path(id_))

    def batches(self, most: int) -> list[dict[str, Any]]:
        """Return the newest batches, at most so many."""
        found, parameters = list[dict[str, Any]](), dict[str, str]()
        while len(found) < most:
            parameters["limit"] = str(min(PAGE, most - len(found)))
            page = self.request("GET", "/v1/batches", parameters)
            found += (listed := objects(page, "data"))
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

    def remedy(self, code: int, error_code: object, path: str) -> str | None:
        """Say how a batch, its key or its place is found."""
        if error_code == "insufficient_quota":
            return "files expire, or DELETE /v1/files/ID removes one"
        no_batch = "'llama-gateway batch list' shows this key's batches"
        no_api = "is it a gateway with batches? --url names its address"
        return {
            401: f"name a file that holds an API key with --key-file, or set {KEY_VARIABLE}",
            404: no_batch if path.startswith("/v1/batches/") else no_api,
            413: "submit it in several batches",
        }.get(code)


class PublicFlags(options.FlagGroup):
    """The flags that name the gateway's public listener, and the key for it."""

    url: str | None = options.URL
    key_file: Path | None = options.KEY_FILE
    ca: Path | None = options.CA

    def connect(self) -> BatchClient:
        """Connect by flags and environment. Raises CommandFailed."""
        url = (self.url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
            raise WrongUsage(f"--url {url}: must be like {DEFAULT_URL}")
        import httpx

        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        tls = tls_context(self.ca) if parts.scheme == "https" else None
        return BatchClient(url, find_key(self.key_file), tls, timeout)


def _path(id_: str) -> str:
    return f"/v1/batches/{quote(id_, safe='')}"


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else None


# Reading answers.


def objects(page: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in an answer."""
    found = page.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _read(response: httpx.Response) -> bytes:
    """Read an answer of up to `LARGEST_ANSWER`. Raises CommandFailed, httpx.HTTPError."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > LARGEST_ANSWER:
            raise CommandFailed(f"the answer of {response.request.url} is too long")
    return bytes(content)


def json_object(content: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object in a text; None: it holds none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _bounded_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream. Raises CommandFailed for one above `LONGEST_LINE`."""
    rest = bytearray()
    for part in parts:
        *lines, tail = part.split(b"\n")
        for line in lines:
            yield bytes(rest) + line
            rest.clear()
        rest += tail
        if len(rest) > LONGEST_LINE:
            raise CommandFailed("an event of the gateway is larger than any of a fleet")


def read_pages(
    ask: Callable[[dict[str, str]], dict[str, Any]], given: Mapping[str, str], name: str, most: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask page by page for up to so many objects of the list `name`; and return the last page."""
    parameters, found = dict(given), list[dict[str, Any]]()
    while True:
        parameters["limit"] = str(min(LARGEST_PAGE, most - len(found)))
        page = ask(parameters)
        found += page[name]
        if len(found) >= most or page["next"] is None:
            return found, page
        parameters["before"] = str(page["next"])


# Keys and certificates.


def find_key(key_file: Path | None) -> str | None:
    """Return the API key by flag or environment. Raises CommandFailed."""
    if key_file:
        return _read_key(key_file, "key file")
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise WrongUsage(f"{KEY_VARIABLE} holds no key")
    return key or None


def _read_key(path: Path, what: str) -> str:
    """Return the key in a file; `what` names the file in errors. Raises CommandFailed."""
    try:
        with path.open("rb") as file:
            key = file.read(LONGEST_KEY).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text"
        raise WrongUsage(f"the {what} {path} can't be read: {why}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise WrongUsage(f"the {what} {path} holds no key")
    return key


def tls_context(ca: Path | None, own: Path | None = None, flag: str = "--ca") -> ssl.SSLContext:
    """Check certificates by the system's authorities, and by `ca`, which `flag` names.

    `own`, without `ca`: exactly the first certificate of that file. Raises CommandFailed.
    """
    path = ca or own
    if path is None:
        return ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    try:
        if ca is None:
            # Exactly this certificate, whatever its names: the command may use another one, such as
            # 127.0.0.1. Authorities in the same file vouch for others, too, and are left out.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            begin, end, _ = path.read_text(encoding="ascii").partition(_PEM_END)
            context.load_verify_locations(cadata=begin + end)
        else:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
            context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no certificate in PEM form"
        raise WrongUsage(
            f"{path} can't be read: {why}; name the gateway's certificate, or the authority behind "
            f"it, with {flag}"
        ) from None
    # A certificate that is no authority's may be trusted, too.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


# Where the admin API is.


class AdminFlags(options.FlagGroup):
    """The flags that name the admin API of the running gateway."""

    admin_url: str | None = options.ADMIN_URL
    admin_key_file: Path | None = options.ADMIN_KEY_FILE
    admin_ca: Path | None = options.ADMIN_CA
    config: Path | None = options.CONFIG

    def connect(self) -> AdminClient:
        """Open the admin API by flag, environment and settings, in this order."""
        url, key_file, ca = self.admin_url, self.admin_key_file, self.admin_ca
        if url is not None and urlsplit(url).scheme not in {"http", "https"}:
            raise WrongUsage(f"--admin-url {url}: must be like http://127.0.0.1:8001")
        env = os.environ.get
        host, port = env("LLAMA_GATEWAY_ADMIN_HOST"), env("LLAMA_GATEWAY_ADMIN_PORT")
        asked = {"host": host or url, "port": port or url, "tls": url, "key_file": key_file}
        needed = [key for key, known in asked.items() if not known]
        admin = _settings(self.config, needed) if needed else None
        own = None
        if url is None:
            own = admin.tls.cert if admin and admin.tls else None
            host = host or (admin.host if admin else "127.0.0.1")
            host = _EVERY_ADDRESS.get(host, host)
            place = f"[{host}]" if ":" in host else host
            scheme = "http" if own is None else "https"
            url = f"{scheme}://{place}:{port or (admin.port if admin else 8001)}"
        key_file = key_file or (admin.key_file if admin else None)
        if ca is None and (named := env("LLAMA_GATEWAY_ADMIN_CA")):
            ca = Path(named)
        is_secure = urlsplit(url).scheme == "https"
        tls = tls_context(ca, own, "--admin-ca") if is_secure else None
        admin_key = _read_key(key_file, "admin key file") if key_file else None
        return AdminClient(url.rstrip("/"), admin_key, tls)


def _settings(config: Path | None, needed: Collection[str]) -> AdminSettings | None:
    """Return the admin listener's settings; of a file with mistakes the keys that are needed."""
    path = options.settings_file(config)
    if path is None:
        return None
    from gateway.config.settings import load_admin, load_settings

    try:
        return load_settings(path).admin
    except ConfigError as error:
        # The running gateway still has older settings, and the operator must be able to reach it.
        problem = replace(error.problems[0], remedy="")
    try:
        admin = load_admin(path, needed)
    except ConfigError as error:
        raise WrongUsage(
            f"{error}\nthis is needed to find the gateway: correct it, or --admin-url and "
            "--admin-key-file name its address and the file of its key"
        ) from None
    print_note(f"warning: {problem}; going on with `admin` of this file")
    return admin


# The store, where no gateway runs.

# The state folder of the systemd unit that the deployment installs.
UNIT_STATE_FOLDER = Path("/var/lib/llama-gateway")
OPEN_SECONDS = 10.0  # seconds to wait for the store


@contextlib.contextmanager
def checked_query() -> Iterator[None]:
    """Tell what is wrong with a question to the store, by the flag that says it."""
    from gateway.callers.reports import InvalidQuery

    try:
        yield
    except InvalidQuery as error:
        flag = error.parameter.replace("_", "-")
        raise WrongUsage(f"--{flag}: {error}") from None


class NoStore(CommandFailed):
    """The settings, or the gateway that runs, have no store."""

    def __init__(self) -> None:
        super().__init__(
            "the settings have no store (store.url: off): write keys and groups into the settings; "
            "'llama-gateway keys create' shows the lines of a key",
            status=2,
        )


class StoreFlags(options.FlagGroup):
    """The flags that name the gateway, or the store that is opened where none runs."""

    config: Path | None = options.CONFIG
    admin_url: str | None = options.ADMIN_URL
    admin_key_file: Path | None = options.ADMIN_KEY_FILE

    @contextlib.contextmanager
    def open(self, *, make: bool = False) -> Iterator[AdminClient | Store]:
        """The admin API of the gateway that runs, else the open store; says on stderr which store.

        A store that does not exist is not made, unless `make`. Raises CommandFailed: the gateway
        uses another store than the settings name, there is none, or it fails; and if no gateway
        answers at an `admin_url` of the user's.
        """
        from gateway.config.stored import STORE_OFF

        with AdminFlags(**vars(self)).connect() as admin:
            try:
                status = admin.request("GET", "/admin/status")
            except NoGateway:
                if self.admin_url is not None:
                    raise
            else:
                check_same_store(admin, status, self.config)
                yield admin
                return
        settings = read_settings(self.config)
        if settings.store.url == STORE_OFF and not make:
            raise WrongUsage("the settings have no store (store.url: off)")
        location = named_store(settings)
        print_note(f"store: {location.shown} (no gateway answers at {admin.url})")
        if not make and location.path is not None and not location.path.is_file():
            raise CommandFailed(
                f"there is no {location.path}: no gateway has used it yet; --config names the "
                "settings"
            )
        with open_alone(location) as store:
            yield store

    def key_names(self, store: Store) -> dict[str, str]:
        """The names of the keys of the store, revoked ones too, and of the settings, by id."""
        from sqlalchemy import select

        from gateway.store.schema import keys

        asked = select(keys.c.id, keys.c.name)
        found = store.run_now(lambda connection: connection.execute(asked).all(), write=False)
        names = {row[0]: row[1] for row in found}
        return names | {one.id: one.name or one.id for one in read_settings(self.config).keys}


def read_settings(config: Path | None) -> Settings:
    """Read the settings file that is named, else the default one. Raises ConfigError."""
    from gateway.config.settings import load_settings

    return load_settings(options.settings_file(config))


def check_same_store(admin: AdminClient, status: dict[str, Any], config: Path | None) -> None:
    """Tell the store of the running gateway.

    Raises CommandFailed if the settings name another one: the command would change keys of a
    gateway that its user does not mean.
    """
    from gateway.config.stored import STORE_OFF

    store = status.get("store") or {}
    state, own = store.get("state"), store.get("url")
    print_note(f"store: {own or STORE_OFF} (of the gateway at {admin.url}, state: {state})")
    try:
        settings = read_settings(config)
    except ConfigError:
        return  # `AdminFlags` has told it; the gateway has its own settings.
    if settings.store.url is None:
        return
    named = None if settings.store.url == STORE_OFF else named_store(settings).shown
    if _real(named) != _real(own):
        raise WrongUsage(
            f"the gateway at {admin.url} has the store {own or STORE_OFF}, but "
            f"{options.settings_file(config)} names {named or STORE_OFF}: name that gateway's "
            "settings with --config, or another gateway with --admin-url"
        )


def _real(url: str | None) -> str | None:
    """Follow links in the path of a SQLite file."""
    scheme, is_file, path = (url or "").partition("sqlite:///")
    return f"{is_file}{os.path.realpath(path)}" if is_file and not scheme else url


def named_store(settings: Settings, unit_folder: Path = UNIT_STATE_FOLDER) -> StoreLocation:
    """Return the store that the settings name; by default the unit's, else the user's."""
    from gateway.app.startup import state_folder
    from gateway.config.stored import STORE_OFF
    from gateway.store.database import FILE_NAME, locate_store

    url = settings.store.url
    if url == STORE_OFF:
        raise NoStore
    folder = state_folder()
    if url is None and "STATE_DIRECTORY" not in os.environ:
        try:
            (unit_folder / FILE_NAME).stat()
            folder = unit_folder
        except FileNotFoundError:
            if os.access(unit_folder, os.W_OK):
                folder = unit_folder  # The store was moved away, or is yet to be made.
        except PermissionError:
            if not (folder / FILE_NAME).exists():
                raise CommandFailed(
                    f"{unit_folder / FILE_NAME}, the store of the installed gateway, can't be "
                    "opened by this user: use sudo, or name another store in the settings "
                    "(store.url)"
                ) from None
    return locate_store(url, folder)


@contextlib.contextmanager
def open_alone(location: StoreLocation) -> Iterator[Store]:
    """Open the store while no gateway runs, and log nothing but errors. Raises CommandFailed."""
    from gateway.store.failures import StoreError
    from gateway.store.store import Store
    from gateway.watch.logs import set_up_logging

    unusable = f"the store {location.shown} can't be used: "
    # What fails is in the command's own error.
    with set_up_logging("error", "console"), failing_by(StoreError, before=unusable):
        store = Store(location)
        store.start()
        try:
            yield store
        finally:
            store.close(OPEN_SECONDS)
