from __future__ import annotations

from collections.abc import Sequence

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Scope

from gateway.admin.app import KEYLESS_PATHS, is_keyless
from gateway.admin.guard import AdminGuard
from gateway.callers.keys import AdminKeys
from gateway.web.asgi import X_REQUEST_ID_KEY
from tests.each_case import each_case

KEY = "a-long-admin-key"
LOOPBACK_HOSTS = (
    "127.0.0.1:8001", "127.0.0.1", "localhost:8001", "LocalHost", "[::1]:8001", "127.1.2.3",
)  # fmt: skip
OWN_HOSTS = ("10.0.0.5:8001", "Gateway.Example:1", "gateway.example.", "[2001:DB8:0::1]:8001")
REFUSED_HOSTS = (
    *("evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("127.0.0.1@evil.example", "127.0.0.1, evil.example", "10.0.0.6:8001", "0.0.0.0:8001"),
    *("[::]:8001", "[::1", ""),
)


async def ask(
    path: str = "/admin/status",
    *,
    key: str | None = None,
    names: tuple[str, ...] = ("127.0.0.1",),
    server: tuple[str, int] | None = ("127.0.0.1", 8001),
    method: str = "GET",
    headers: Sequence[tuple[str, str]] = (),
) -> httpx.Response:
    """A request through the guard; `Host` is a loopback one unless the headers have one."""
    guard = AdminGuard(
        PlainTextResponse("inside"), keys=AdminKeys((), key), names=names, is_keyless=is_keyless
    )

    async def app(scope: Scope, receive: object, send: object) -> None:
        await guard({**scope, X_REQUEST_ID_KEY: "an-id", "server": server}, receive, send)  # type: ignore[arg-type]

    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    if all(name != b"host" for name, _ in sent):
        sent.append((b"host", b"127.0.0.1:8001"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.request(method, f"http://127.0.0.1:8001{path}", headers=sent)


def passed(response: httpx.Response) -> bool:
    return (response.status_code, response.text) == (200, "inside")


def refused(response: httpx.Response, status: int, code: str) -> bool:
    error = response.json()["error"]
    return (response.status_code, error["code"]) == (status, code)


@each_case(
    ("host", "names"),
    [
        *((host, ("127.0.0.1",)) for host in LOOPBACK_HOSTS),
        *((host, ("10.0.0.5", "gateway.example", "2001:db8::1")) for host in OWN_HOSTS),
    ],
)
async def test_loopback_hosts_and_the_listeners_own_names_are_allowed_with_any_port(
    host: str, names: tuple[str, ...]
) -> None:
    assert passed(await ask(names=names, headers=[("host", host)]))


async def test_the_address_that_was_connected_to_is_allowed() -> None:
    asked = [("host", "10.0.0.5:8001")]
    assert passed(await ask(names=("0.0.0.0",), server=("10.0.0.5", 8001), headers=asked))
    assert passed(await ask(names=("::",), server=("::ffff:10.0.0.5", 8001), headers=asked))
    assert not passed(await ask(names=("0.0.0.0",), server=None, headers=asked))


@each_case("host", REFUSED_HOSTS)
async def test_any_other_host_is_refused_also_beside_a_good_one(host: str) -> None:
    both = [("host", "127.0.0.1:8001"), ("host", host)]
    for headers in ([("host", host)], both):
        for path in ("/admin/status", "/metrics", "/", *sorted(KEYLESS_PATHS)):
            response = await ask(path, names=("127.0.0.1", "0.0.0.0"), headers=headers)
            assert refused(response, 403, "host_not_allowed"), path
    # It is not allowed because the scope repeats it.
    response = await ask(server=(host, 80), headers=[("host", host)])
    assert refused(response, 403, "host_not_allowed")


@each_case(
    ("host", "origin"),
    [
        ("127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("localhost:8001", "http://LOCALHOST:8001"),
        ("[::1]:8001", "http://[::1]:8001"),
        ("gateway.example", "https://gateway.example"),
        ("gateway.example:443", "https://gateway.example"),
        ("gateway.example", "http://gateway.example:80"),
    ],
)
async def test_a_page_of_the_listener_itself_is_allowed(host: str, origin: str) -> None:
    response = await ask(
        names=("gateway.example",), method="POST", headers=[("host", host), ("origin", origin)]
    )
    assert passed(response)


@each_case(
    "origin",
    [
        *("https://evil.example", "http://127.0.0.1:8000", "http://localhost:8001", "file://"),
        *("https://127.0.0.1", "null", "", "http://127.0.0.1:8001.evil.example"),
        *("http://127.0.0.1:8001@evil.example", "http://[::1", "\xe9://x"),
    ],
)
async def test_a_page_of_another_origin_is_refused_also_with_one_of_its_own(origin: str) -> None:
    both = [("origin", "http://127.0.0.1:8001"), ("origin", origin)]
    assert refused(await ask(headers=both), 403, "origin_not_allowed")
    for method in ("GET", "POST", "DELETE"):
        response = await ask(method=method, headers=[("origin", origin)])
        assert refused(response, 403, "origin_not_allowed"), method


async def test_the_right_key_is_accepted_and_some_paths_need_none() -> None:
    for scheme in ("Bearer", "bearer"):
        assert passed(await ask(key=KEY, headers=[("authorization", f"{scheme} {KEY}")]))
    for path in KEYLESS_PATHS:
        assert passed(await ask(path, key=KEY)), path
    # Without a configured key none is needed.
    assert passed(await ask(headers=[("authorization", "Bearer whatever")]))


@each_case(
    "value", [None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer"]
)
async def test_without_the_key_nothing_is_revealed(value: str | None) -> None:
    headers = [] if value is None else [("authorization", value)]
    for path in ("/metrics", "/admin/status", "/openapi.json", "/nothing", "/ready/"):
        response = await ask(path, key=KEY, headers=headers)
        assert refused(response, 401, "invalid_api_key"), path
        assert response.headers["www-authenticate"].startswith("Bearer ")
        assert KEY not in response.text


async def test_the_key_does_not_make_up_for_a_foreign_host_or_origin() -> None:
    with_key = ("authorization", f"Bearer {KEY}")
    for foreign, code in (
        (("host", "evil.example"), "host_not_allowed"),
        (("origin", "https://evil.example"), "origin_not_allowed"),
    ):
        assert refused(await ask(key=KEY, headers=[with_key, foreign]), 403, code)
