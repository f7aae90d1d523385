from __future__ import annotations

import ssl
from collections.abc import Iterator

import httpx
import pytest
import trustme

from gateway.local.download import (
    MOST_REDIRECTS,
    ModelUrlError,
    RangeRefusedError,
    RemoteError,
    SourceRecord,
    open_client,
    open_remote,
)
from tests.each_case import each_case
from tests.local.file_server import Fault, FileServer

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer(CONTENT).serving() as server:
        yield server


@pytest.fixture
def other() -> Iterator[FileServer]:
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


def test_a_file_is_read_from_any_byte_on(client: httpx.Client, server: FileServer) -> None:
    assert read(client, f"{server.origin}/m") == (0, len(CONTENT), CONTENT)
    assert read(client, f"{server.origin}/m", 1000) == (1000, len(CONTENT), CONTENT[1000:])


def test_a_file_that_has_changed_begins_at_its_start(
    client: httpx.Client, server: FileServer
) -> None:
    assert read(client, f"{server.origin}/m", 1000, '"v1"')[0] == 1000
    assert read(client, f"{server.origin}/m", 1000, '"v0"')[0] == 0


def test_a_weak_etag_cannot_prove_that_a_part_is_of_the_same_file() -> None:
    assert SourceRecord("m", 'W/"1"', None).if_range is None
    assert SourceRecord("m", 'W/"1"', "Mon, 01 Jan").if_range == "Mon, 01 Jan"
    assert SourceRecord("m", '"1"', "Mon, 01 Jan").if_range == '"1"'


class TestRedirects:
    def test_a_token_goes_to_the_first_host_alone(
        self, client: httpx.Client, server: FileServer, other: FileServer
    ) -> None:
        server.faults.append(Fault(302, {"Location": f"{other.origin}/cdn"}))
        assert read(client, f"{server.origin}/m", token="hf_secret")[2] == CONTENT
        assert server.requests[0][1]["authorization"] == "Bearer hf_secret"
        assert "authorization" not in other.requests[0][1]
        assert other.requests[0][0] == "/cdn"

    def test_a_token_goes_along_on_the_same_host(
        self, client: httpx.Client, server: FileServer
    ) -> None:
        server.faults.append(Fault(307, {"Location": "/elsewhere"}))
        read(client, f"{server.origin}/m", token="hf_secret")
        assert [headers.get("authorization") for _, headers in server.requests] == [
            "Bearer hf_secret"
        ] * 2

    def test_the_addresss_password_goes_to_its_host_alone(
        self, client: httpx.Client, server: FileServer, other: FileServer
    ) -> None:
        server.faults.append(Fault(302, {"Location": f"{other.origin}/cdn"}))
        read(client, server.origin.replace("//", "//me:hunter2@") + "/m")
        assert server.requests[0][1]["authorization"].startswith("Basic ")
        assert "authorization" not in other.requests[0][1]

    def test_the_range_goes_along(
        self, client: httpx.Client, server: FileServer, other: FileServer
    ) -> None:
        server.faults.append(Fault(302, {"Location": f"{other.origin}/cdn"}))
        assert read(client, f"{server.origin}/m", 5000)[0] == 5000

    def test_they_are_bounded(self, client: httpx.Client, server: FileServer) -> None:
        server.always = Fault(301, {"Location": "/again"})
        with pytest.raises(RemoteError, match="more than 8 redirects") as refused:
            read(client, f"{server.origin}/m")
        assert not refused.value.retryable
        assert len(server.requests) == MOST_REDIRECTS + 1

    @pytest.mark.parametrize("headers", [{}, {"Location": "ftp://x/y"}])
    def test_one_to_nowhere_is_an_error(
        self, client: httpx.Client, server: FileServer, headers: dict[str, str]
    ) -> None:
        server.faults.append(Fault(302, headers))
        with pytest.raises(ModelUrlError, match="redirects"):
            read(client, f"{server.origin}/m")


class TestRefusals:
    @each_case(
        ("status", "retryable", "text"),
        [
            (401, False, "--token-env"), (403, False, "accept its terms"),
            (404, False, "check the address"), (418, False, "HTTP 418"), (429, True, "HTTP 429"),
            (503, True, "Service Unavailable"), (599, False, "HTTP 599"),
        ],
    )  # fmt: skip
    def test_a_status_names_the_remedy_and_whether_a_later_try_may_help(
        self, client: httpx.Client, server: FileServer, status: int, retryable: bool, text: str
    ) -> None:
        server.always = Fault(status, {"Retry-After": "7200"})
        with pytest.raises(RemoteError, match=text) as refused:
            read(client, f"{server.origin}/m?sig=hunter2")
        assert refused.value.retryable is retryable
        assert refused.value.retry_after == 60
        assert "hunter2" not in str(refused.value)

    def test_a_range_beyond_the_end_tells_the_size(
        self, client: httpx.Client, server: FileServer
    ) -> None:
        with pytest.raises(RangeRefusedError) as refused:
            read(client, f"{server.origin}/m", len(CONTENT))
        assert refused.value.total == len(CONTENT)

    @each_case(
        "content_range", ["bytes 0-9/10", "bytes 5-9", "pages 1-2/3", "", "bytes " + "9" * 40]
    )
    def test_another_range_than_the_one_asked_is_not_taken(
        self, client: httpx.Client, server: FileServer, content_range: str
    ) -> None:
        server.faults.append(Fault(headers={"Content-Range": content_range}))
        with pytest.raises(RangeRefusedError):
            read(client, f"{server.origin}/m", 1000)

    def test_a_packed_body_is_not_taken_for_the_file(
        self, client: httpx.Client, server: FileServer
    ) -> None:
        server.faults.append(Fault(headers={"Content-Encoding": "gzip"}))
        with pytest.raises(RemoteError, match="sends the file as gzip"):
            read(client, f"{server.origin}/m")

    def test_an_absurd_length_is_refused(self, client: httpx.Client, server: FileServer) -> None:
        server.faults.append(Fault(announce=10**19))
        with pytest.raises(RemoteError, match="announces a length"):
            read(client, f"{server.origin}/m")

    def test_a_server_that_is_away_may_come_back(self, client: httpx.Client) -> None:
        with FileServer(b"").serving() as gone:
            origin = gone.origin
        with pytest.raises(RemoteError, match=r"127\.0\.0\.1: ") as refused:
            read(client, f"{origin}/m")
        assert refused.value.retryable


class TestTls:
    @pytest.fixture
    def authority(self) -> trustme.CA:
        return trustme.CA()

    @pytest.fixture
    def secure(self, authority: trustme.CA) -> Iterator[FileServer]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with FileServer(CONTENT, context).serving() as server:
            yield server

    def test_a_trusted_server_is_read(self, secure: FileServer, authority: trustme.CA) -> None:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with open_client(context) as client:
            assert read(client, f"{secure.origin}/m")[2] == CONTENT

    def test_an_untrusted_one_is_refused_with_the_remedy(
        self, secure: FileServer, client: httpx.Client
    ) -> None:
        with pytest.raises(RemoteError, match="SSL_CERT_FILE") as refused:
            read(client, f"{secure.origin}/m")
        assert not refused.value.retryable

    def test_a_redirect_from_https_to_http_is_refused(
        self, secure: FileServer, authority: trustme.CA
    ) -> None:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        secure.faults.append(Fault(302, {"Location": "http://cdn.example/m"}))
        with open_client(context) as client, pytest.raises(ModelUrlError, match="not https"):
            read(client, f"{secure.origin}/m")
