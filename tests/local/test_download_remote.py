from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gateway.local.download import (
    MOST_REDIRECTS,
    ModelUrlError,
    RangeRefusedError,
    RemoteError,
    cache_key,
    file_name,
    is_url,
    open_remote,
    parse_model_url,
    part_urls,
    printable,
    same_origin,
)
from tests.each_case import each_case
from tests.local.file_server import Fault, FileServer

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer(CONTENT).serving() as server:
        yield server


def read(
    client: httpx.Client,
    url: str,
    start: int = 0,
    if_range: str | None = None,
    token: str | None = None,
) -> tuple[int, int | None, bytes]:
    address = httpx.URL(url)
    with open_remote(client, address, start=start, if_range=if_range, token=token) as body:
        return body.start, body.total, b"".join(body.chunks)


def refused(client: httpx.Client, server: FileServer, start: int = 0) -> RemoteError:
    """Why a file can't be read; the reason holds no secret of its address."""
    with pytest.raises(RemoteError) as error:
        read(client, f"{server.origin}/m?sig=hunter2", start)
    assert "hunter2" not in str(error.value)
    return error.value


# Redirects.


@pytest.mark.parametrize(
    ("user", "token", "sent"), [("", "secret", "Bearer secret"), ("me:hunter2@", None, "Basic ")]
)
def test_a_secret_stays_with_its_host_and_the_range_goes_along(
    client: httpx.Client, server: FileServer, user: str, token: str | None, sent: str
) -> None:
    with FileServer(CONTENT).serving() as other:
        server.faults.append(Fault(307, {"Location": "/elsewhere"}))
        server.faults.append(Fault(302, {"Location": f"{other.origin}/cdn"}))
        url = server.origin.replace("//", f"//{user}") + "/m"
        assert read(client, url, 5000, token=token)[0] == 5000
    assert len(server.requests) == 2
    assert all(headers["authorization"].startswith(sent) for _, headers in server.requests)
    ((target, headers),) = other.requests
    assert (target, "authorization" in headers) == ("/cdn", False)


def test_redirects_are_bounded(client: httpx.Client, server: FileServer) -> None:
    server.always = Fault(301, {"Location": "/again"})
    error = refused(client, server)
    assert "more than 8 redirects" in str(error)
    assert not error.retryable
    assert len(server.requests) == MOST_REDIRECTS + 1
    server.always = Fault(302, {"Location": "ftp://x/y"})
    with pytest.raises(ModelUrlError, match="redirects"):
        read(client, f"{server.origin}/m")


# Refusals.


@each_case("sent", ["bytes 0-9/10", "bytes 5-9", "pages 1-2/3", "", "bytes " + "9" * 40])
def test_another_range_than_the_one_asked_is_not_taken(
    client: httpx.Client, server: FileServer, sent: str
) -> None:
    server.faults.append(Fault(headers={"Content-Range": sent}))
    assert isinstance(refused(client, server, 1000), RangeRefusedError)
    assert isinstance(refused(client, server, len(CONTENT)), RangeRefusedError)
    server.faults.append(Fault(headers={"Content-Encoding": "gzip"}))
    assert "sends the file as gzip" in str(refused(client, server))


# Addresses.


SECRET = "https://user:hunter2@models.example:8443/a/m.gguf?X-Signature=hunter2#hunter2"


@each_case(
    "text",
    [
        "http://models.example/m.gguf", "http://192.168.1.5/m.gguf", "ftp://models.example/m.gguf",
        "file:///etc/passwd", "https://", "https:///m.gguf", "https://h:0/m.gguf",
        "https://h:99999/m.gguf", "https://h:port/m.gguf", "https://h/m\n.gguf",
        "https://h/" + "x" * 9000,
    ],
)  # fmt: skip
def test_addresses_that_are_not_https_or_not_valid_are_refused(text: str) -> None:
    assert is_url(text)
    assert not is_url(text.replace("://", "/"))
    with pytest.raises(ModelUrlError):
        parse_model_url(text)


def test_what_is_printed_holds_no_secret() -> None:
    url = parse_model_url(SECRET)
    assert printable(url) == "https://models.example:8443/a/m.gguf?..."
    assert "hunter2" not in cache_key(url)
    for text in (SECRET.replace("https", "http"), SECRET.replace(":8443", ":84430")):
        with pytest.raises(ModelUrlError) as refused:
            parse_model_url(text)
        assert "hunter2" not in str(refused.value)


@each_case(
    ("path", "name"),
    [
        ("/a/Model-Q4_K_M.gguf", "Model-Q4_K_M.gguf"),
        ("/a/Model.GGUF?download=true", "Model.gguf"),
        ("/a/..%2F..%2Fetc%2Fpasswd", "passwd.gguf"),
        ("/", "model.gguf"),
        ("/%00%1b[31m.gguf", "31m.gguf"),
        ("/" + "x" * 500 + ".gguf", "x" * 120 + ".gguf"),
    ],
)
def test_the_files_name_is_safe(path: str, name: str) -> None:
    assert file_name(parse_model_url(f"https://h{path}")) == name


HERE, LOOPBACK = "https://models.example/m.gguf?token=hunter2", "http://127.0.0.1:81/m.gguf"


@each_case(
    ("here", "location", "target", "is_same"),
    [
        (HERE, "/cdn/m.gguf", "https://models.example/cdn/m.gguf", True),
        (HERE, "https://models.example:443/m", "https://models.example/m", True),
        (HERE, "https://models.example:444/m", "https://models.example:444/m", False),
        (HERE, "//other.example/m", "https://other.example/m", False),
        (LOOPBACK, "http://[::1]:82/m.gguf", "http://[::1]:82/m.gguf", False),
        (HERE, "http://cdn.example/m?key=hunter2", None, False),
        (HERE, "http://127.0.0.1/m", None, False),
        (HERE, "file:///x", None, False),
        (HERE, "", None, False),
    ],
)
def test_a_redirect_stays_at_https_and_another_host_or_port_is_another_origin(
    here: str, location: str, target: str | None, is_same: bool
) -> None:
    base = httpx.URL(here)
    if target is None:
        with pytest.raises(ModelUrlError) as refused:
            parse_model_url(location, base)
        assert "hunter2" not in str(refused.value)
    else:
        found = parse_model_url(location, base)
        assert (str(found), same_origin(base, found)) == (target, is_same)


def test_two_addresses_share_a_folder_only_where_they_are_one() -> None:
    key = cache_key(parse_model_url("https://h/m.gguf"))
    assert key == cache_key(parse_model_url("https://me:pw@h/m.gguf#x"))
    assert key != cache_key(parse_model_url("https://h/m.gguf?version=2"))
    for parts in ("00000", "99999"):
        with pytest.raises(ModelUrlError, match="files"):
            part_urls(parse_model_url(f"https://h/m-00001-of-{parts}.gguf"))


def test_a_server_that_is_away_may_come_back(client: httpx.Client) -> None:
    with FileServer(b"").serving() as gone:
        pass
    assert refused(client, gone).retryable
