"""Which URLs and which addresses events may be sent to."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from openai import InvalidWebhookSignatureError, OpenAI

from gateway.config.stored import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.errors import GatewayError
from gateway.stored.webhooks import (
    MOST_READ,
    PostResult,
    WebhookEvent,
    WebhookPoster,
    WebhookTargets,
    address_problem,
)
from gateway.transport.resolver import Resolver
from tests.each_case import each_case
from tests.gateways import until
from tests.stored.receivers import (
    LIMIT,
    OTHER_SECRET,
    SECRET,
    Answer,
    Receiver,
    never,
    receiving,
    status,
    target,
)
from tests.virtual import in_virtual_time, now


def targets(*given: dict[str, Any]) -> WebhookTargets:
    settings = WebhookSettings(targets=tuple(target(**one) for one in given))
    return WebhookTargets(lambda: settings)


@pytest.mark.parametrize(
    ("owner", "url", "code"),
    [
        ("ci", "https://h.example/other", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooksy", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooks%2fx", "invalid_request"),
        ("ci", "https://h.example/", "webhook_url_not_allowed"),
        ("ci", "https://h.example.evil/hooks", "webhook_url_not_allowed"),
        ("bob", "https://h.example/hooks", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooks/../other", "invalid_request"),
        ("ci", "https://x@h.example/hooks", "invalid_request"),
        ("ci", 7, "invalid_request"),
        ("ci", "", "invalid_request"),
    ],
)
def test_a_url_below_a_target_of_the_key_is_taken_and_no_refusal_tells_of_others(
    owner: str, url: object, code: str
) -> None:
    known = targets({"url": "https://h.example/hooks", "keys": ("ci",)})
    assert known.check("ci", None, "https://H.example:443/hooks/a") == "https://h.example/hooks/a"
    with pytest.raises(GatewayError) as caught:
        known.check(owner, None, url)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, "webhook_url")
    assert "/hooks" not in error.message
    assert not error.retryable


def test_an_event_goes_to_the_targets_of_its_key_and_to_the_url_of_its_request() -> None:
    known = targets(
        {"url": "https://all.example"},
        {"url": "https://ci.example", "keys": ("ci",)},
        {"url": "https://night.example", "groups": ("night",), "events": ("batch.failed",)},
        {"url": "https://named.example/a", "named_only": True},
    )

    def sent(owner: str, group: str | None, event: str, named: str | None = None) -> list[str]:
        return [url.host for url in known.receivers(owner, group, event, named)]

    assert sent("bob", None, "batch.completed") == ["all.example"]
    assert sent("ci", None, "batch.completed") == ["all.example", "ci.example"]
    assert sent("bob", "night", "batch.completed") == ["all.example"]
    assert sent("bob", "night", "batch.failed") == ["all.example", "night.example"]
    named = "https://named.example/a/7"
    assert sent("bob", None, "batch.failed", named) == ["all.example", "named.example"]
    # The target is gone, or is not this key's any more.
    assert sent("bob", None, "batch.failed", "https://ci.example/x") == ["all.example"]
    assert sent("bob", None, "batch.failed", "what was never checked") == ["all.example"]
    # No URL gets an event twice.
    assert sent("bob", None, "batch.failed", "https://all.example/") == ["all.example"]


PUBLIC = [
    "1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",
]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "fec0::1", "100.64.0.1", "100.127.255.255", "198.18.0.1", "::1", "fd00::1", "fc00::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "::10.0.0.1",
    "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "2002:a00:1::1",
    # Of nobody: nothing answers there.
    "0.1.2.3", "192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "2001::1",
]  # fmt: skip
NEVER = [
    "0.0.0.0", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255", "::", "fe80::1", "fe80::1%lo", "ff02::1",
    "100::1", "64:ff9b:1::1",
    "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::", "4000::1",
    "::ffff:0.0.0.0", "::ffff:224.0.0.1", "not an address", "",
]  # fmt: skip


@each_case("address", PUBLIC)
def test_public_addresses_are_taken_by_http_only_where_it_is_allowed(address: str) -> None:
    assert address_problem(address, target("https://h", allow_private=False), "https") is None
    assert address_problem(address, target("https://h"), "https") is None
    assert address_problem(address, target("http://h"), "http") is not None
    assert address_problem(address, target("http://h", allow_http=True), "http") is None


@each_case("address", PRIVATE)
def test_private_addresses_are_taken_where_the_target_allows_them(address: str) -> None:
    problem = address_problem(address, target("https://h", allow_private=False), "https")
    assert problem == "is private or loopback"
    assert address_problem(address, target("https://h"), "https") is None
    assert address_problem(address, target("http://h"), "http") is None


@each_case("address", NEVER)
def test_other_addresses_are_never_taken(address: str) -> None:
    assert address_problem(address, target("https://h", allow_http=True), "https") is not None


@given(st.ip_addresses())
def test_no_address_that_python_calls_not_global_is_taken(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    taken = address_problem(str(address), target("https://h", allow_private=False), "https") is None
    if taken and isinstance(address, ipaddress.IPv4Address):
        assert address.is_global
        assert not address.is_multicast
    if taken:
        mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
        public = target("https://h", allow_private=False)
        assert address_problem(str(mapped), public, "https") is None


BODY = '{"object":"event","id":"evt_1","type":"batch.completed","created_at":1,"data":{"id":"b"}}'


def poster(*answers: list[str]) -> WebhookPoster:
    """A poster whose names have these addresses, one answer after the other; else the system's."""
    left = list(answers)

    def look_up(_: str) -> list[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    resolver = Resolver(look_up, refresh_after=0.0) if answers else Resolver()
    return WebhookPoster(resolver, time.time)


async def post(
    url: str, poster_: WebhookPoster | None = None, timeout: float = 10.0, **more: Any
) -> PostResult:
    secrets = more.pop("secrets", (SECRET,))
    given: WebhookTarget = target(url, *secrets, **more)
    return await (poster_ or poster()).post(given, WebhookUrl.parse(url), "wh_1", BODY, timeout)


def local(receiver: Receiver, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{receiver.port}/hooks/a%C3%A9?b=c"


async def test_an_event_is_posted_as_standard_webhooks_says_and_openais_client_verifies() -> None:
    async with receiving() as receiver:
        assert await post(local(receiver), secrets=(OTHER_SECRET, SECRET)) == PostResult(204)
    (request,) = receiver.requests
    assert request.line == "POST /hooks/a%C3%A9?b=c HTTP/1.1"
    assert request.body == BODY.encode()
    headers = request.headers
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("llama-gateway/")
    assert "authorization" not in headers
    client = OpenAI(api_key="x", webhook_secret=SECRET)
    for secret in (SECRET, OTHER_SECRET):
        event: Any = client.webhooks.unwrap(request.body, headers, secret=secret)
        assert (event.type, event.data.id) == ("batch.completed", "b")
    for body, id_ in ((request.body + b" ", "wh_1"), (request.body, "wh_2")):
        with pytest.raises(InvalidWebhookSignatureError):
            client.webhooks.unwrap(body, {**headers, "webhook-id": id_})


@each_case("code", [200, 204, 299, 302, 307, 400, 410, 429, 503])
async def test_only_a_success_will_do_and_no_redirect_is_followed(code: int) -> None:
    async with receiving() as other:
        answer = status(code, "retry-after: 7", f"location: http://127.0.0.1:{other.port}/")
        async with receiving(answer) as receiver:
            result = await post(local(receiver))
    assert (result.status, result.error is None) == (code, code < 300)
    assert result.retry_after == (None if code < 300 else 7.0)
    assert other.connections == 0


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(1000):
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("answer", [never, drip])
@in_virtual_time
async def test_a_receiver_that_answers_nothing_or_byte_by_byte_is_cut_by_the_timeout(
    answer: Answer,
) -> None:
    async with receiving(answer) as receiver:
        begin = now()
        result = await post(local(receiver), timeout=0.3)
        assert now() - begin < 0.5
    assert result == PostResult(None, "no answer within 0.3 s")


async def test_what_is_no_answer_is_a_failure_whose_words_tell_no_secret() -> None:
    async def nonsense(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SECRET nonsense\r\n\r\n")

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    def look_up(_: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with receiving(nonsense, close) as receiver:
        url = local(receiver)
        results = [(await post(url), "no valid answer") for _ in range(2)]
    results.append((await post(url), "no connection to 127.0.0.1"))
    unknown = WebhookPoster(Resolver(look_up), time.time)
    results.append((await post("https://nowhere.example/hooks", unknown), "can't be resolved"))
    for result, words in results:
        assert result.status is None
        assert words in (result.error or "")
        assert "SECRET" not in (result.error or "")
        assert "hooks" not in (result.error or "")


async def test_no_more_than_a_little_of_an_endless_answer_is_read() -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            await writer.drain()
            sent += 0x1000

    async with receiving(endless) as receiver:
        assert await post(local(receiver)) == PostResult(200)
    assert sent < 16 << 20  # what sockets hold
    assert MOST_READ <= 4096


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as proxy, receiving() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await post(local(receiver))).status == 204
    assert proxy.connections == 0


async def test_a_name_that_leads_to_loopback_is_refused_unless_allowed() -> None:
    async with receiving() as receiver:
        url = local(receiver, "hooks.example.org")
        refused = await post(url, poster(["127.0.0.1"]), allow_private=False, allow_http=True)
        assert receiver.connections == 0
        assert await post(url, poster(["127.0.0.1"])) == PostResult(204)
    assert refused.error == "its address 127.0.0.1 is private or loopback"
    assert receiver.requests[0].headers["host"] == f"hooks.example.org:{receiver.port}"


@pytest.mark.parametrize("bad", ["10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1"])
async def test_one_address_that_is_not_allowed_refuses_the_name(bad: str) -> None:
    for addresses in (["8.8.8.8", bad], [bad, "8.8.8.8"]):
        result = await post(
            "https://hooks.example.org/", poster(addresses), allow_private=False, timeout=2
        )
        assert result.error is not None
        assert result.error.startswith(f"its address {bad} ")


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """DNS rebinding: whatever the name has next, nobody asks for it between check and connect."""
    asked = 0
    async with receiving() as good, receiving(host="127.0.0.2") as bad:

        def look_up(_: str) -> list[str]:
            nonlocal asked
            asked += 1
            return ["127.0.0.1"] if asked == 1 else ["127.0.0.2"]

        sender = WebhookPoster(Resolver(look_up), time.time)
        assert (await post(local(good, "rebinding.example"), sender)).status == 204
    assert (asked, good.connections, bad.connections) == (1, 1, 0)


async def test_the_next_address_is_tried_where_nobody_listens_at_the_first() -> None:
    async with receiving(host="127.0.0.3") as receiver:
        url = local(receiver, "two.example")
        assert (await post(url, poster(["127.0.0.2", "127.0.0.3"]))).status == 204


async def test_a_resolver_that_hangs_is_cut_by_the_timeout() -> None:
    over = threading.Event()

    def look_up(_: str) -> list[str]:
        over.wait(120)
        return []

    sender = WebhookPoster(Resolver(look_up), time.time)
    begin = time.monotonic()
    assert (await post("https://slow.example/", sender, timeout=0.2)).status is None
    assert time.monotonic() - begin < 60
    over.set()


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    return made


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def test_the_certificate_is_checked_for_the_name_not_for_the_address(
    authority: trustme.CA, tmp_path: Path
) -> None:
    tls = server_context(authority, "hooks.example.org")
    async with receiving(tls=tls) as receiver:
        sender = poster(["127.0.0.1"])
        ca = tmp_path / "ca.pem"
        named = f"https://hooks.example.org:{receiver.port}/x"
        assert await post(named, sender, ca=ca) == PostResult(204)
        assert receiver.server_names == ["hooks.example.org"]
        # Another name at the same address; the address itself; and an authority that is not known.
        other = await post(f"https://other.example.org:{receiver.port}/x", sender, ca=ca)
        bare = await post(f"https://127.0.0.1:{receiver.port}/x", sender, ca=ca)
        unknown = await post(named, sender)
    assert len(receiver.requests) == 1
    for result in (other, bare, unknown):
        assert result.status is None
        assert "certificate" in (result.error or "")


PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


async def test_the_receiver_of_the_page_takes_what_is_signed_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("OPENAI_WEBHOOK_SECRET", SECRET)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    server = uvicorn.Server(
        uvicorn.Config(names["app"], port=0, log_config=None, lifespan="off", ws="none")
    )
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(server, "capture_signals", contextlib.nullcontext)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started, LIMIT)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = WebhookUrl.parse(f"http://127.0.0.1:{port}/hooks")
        body = WebhookEvent("batch.completed", "batch_1", "alice", None, time.time()).body()
        poster = WebhookPoster(Resolver(), time.time)
        results = [
            await poster.post(target(str(url), *secrets), url, "wh_1", body, 10.0)
            for secrets in ((SECRET,), (OTHER_SECRET, SECRET), (OTHER_SECRET,))
        ]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, LIMIT)
    assert [result.status for result in results] == [204, 204, 400]
    # The second was the same event again.
    assert capsys.readouterr().out == "batch.completed batch_1\n"
