from __future__ import annotations

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Scope

from gateway.admin.app import KEYLESS_PATHS, is_keyless
from gateway.admin.guard import AdminGuard
from gateway.callers.keys import AdminKeys
from gateway.web.asgi import X_REQUEST_ID_KEY
from tests.each_case import each_case

KEY = "a-long-admin-key"
WITH_KEY = ("authorization", f"Bearer {KEY}")
LOOPBACK_HOSTS = (
    "127.0.0.1:8001", "127.0.0.1", "localhost:8001", "LocalHost", "[::1]:8001", "127.1.2.3",
)  # fmt: skip
OWN_HOSTS = ("10.0.0.5:8001", "Gateway.Example:1", "gateway.example.", "[2001:DB8:0::1]:8001")
REFUSED_HOSTS = (
    *("evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("127.0.0.1@evil.example", "127.0.0.1, evil.example", "10.0.0.6:8001", "0.0.0.0:8001"),
    *("[::]:8001", "[::1", ""),
)


PASSED = (200, "inside")


async def ask(
    path: str = "/admin/status",
    *sent: tuple[str, str],
    key: str | None = None,
    names: tuple[str, ...] = ("127.0.0.1",),
    server: tuple[str, int] | None = ("127.0.0.1", 8001),
    method: str = "GET",
) -> tuple[int, str]:
    """What the guard does with a request: its status, and the code of its error or what is inside.

    `Host` is a loopback one unless the headers have one.
    """
    inside = PlainTextResponse("inside")
    guard = AdminGuard(inside, keys=AdminKeys((), key), names=names, is_keyless=is_keyless)

    async def app(scope: Scope, receive: object, send: object) -> None:
        await guard({**scope, X_REQUEST_ID_KEY: "an-id", "server": server}, receive, send)  # type: ignore[arg-type]

    headers = [(name.encode(), value.encode("latin-1")) for name, value in sent]
    if all(name != b"host" for name, _ in headers):
        headers.append((b"host", b"127.0.0.1:8001"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        answer = await client.request(method, f"http://127.0.0.1:8001{path}", headers=headers)
    assert KEY not in answer.text
    told = answer.headers.get("www-authenticate", "")
    assert told.startswith("Bearer ") == (answer.status_code == 401)
    if answer.status_code == 200:
        return 200, answer.text
    return answer.status_code, answer.json()["error"]["code"]


@each_case(
    ("host", "names", "origin"),
    [
        *((host, ("127.0.0.1",), None) for host in LOOPBACK_HOSTS),
        *((host, ("10.0.0.5", "gateway.example", "2001:db8::1"), None) for host in OWN_HOSTS),
        ("127.0.0.1:8001", (), "http://127.0.0.1:8001"),
        ("localhost:8001", (), "http://LOCALHOST:8001"),
        ("[::1]:8001", (), "http://[::1]:8001"),
        ("gateway.example", ("gateway.example",), "https://gateway.example"),
        ("gateway.example:443", ("gateway.example",), "https://gateway.example"),
        ("gateway.example", ("gateway.example",), "http://gateway.example:80"),
    ],
)
async def test_loopback_hosts_and_the_listeners_own_names_are_allowed_and_so_are_their_pages(
    host: str, names: tuple[str, ...], origin: str | None
) -> None:
    headers = [("host", host)] if origin is None else [("host", host), ("origin", origin)]
    assert await ask("/admin/status", *headers, names=names, method="POST") == PASSED


async def test_the_address_that_was_connected_to_is_allowed() -> None:
    path, asked = "/admin/status", ("host", "10.0.0.5:8001")
    assert await ask(path, asked, names=("0.0.0.0",), server=("10.0.0.5", 8001)) == PASSED
    assert await ask(path, asked, names=("::",), server=("::ffff:10.0.0.5", 8001)) == PASSED
    assert await ask(path, asked, names=("0.0.0.0",), server=None) != PASSED


@each_case("host", REFUSED_HOSTS)
async def test_any_other_host_is_refused_also_beside_a_good_one_and_with_the_key(host: str) -> None:
    refused = (403, "host_not_allowed")
    for others in ([], [("host", "127.0.0.1:8001")], [WITH_KEY]):
        for path in ("/admin/status", "/metrics", "/", *sorted(KEYLESS_PATHS)):
            headers = [*others, ("host", host)]
            found = await ask(path, *headers, key=KEY, names=("127.0.0.1", "0.0.0.0"))
            assert found == refused, path
    # It is not allowed because the scope repeats it.
    assert await ask("/admin/status", ("host", host), server=(host, 80)) == refused


@each_case(
    "origin",
    [
        *("https://evil.example", "http://127.0.0.1:8000", "http://localhost:8001", "file://"),
        *("https://127.0.0.1", "null", "", "http://127.0.0.1:8001.evil.example"),
        *("http://127.0.0.1:8001@evil.example", "http://[::1", "\xe9://x"),
    ],
)
async def test_a_page_of_another_origin_is_refused_also_with_one_of_its_own_and_the_key(
    origin: str,
) -> None:
    for others in ([], [("origin", "http://127.0.0.1:8001")], [WITH_KEY]):
        for method in ("GET", "POST", "DELETE"):
            found = await ask("/admin/status", *others, ("origin", origin), key=KEY, method=method)
            assert found == (403, "origin_not_allowed"), method


async def test_the_right_key_is_accepted_and_some_paths_need_none() -> None:
    for scheme in ("Bearer", "bearer"):
        found = await ask("/admin/status", ("authorization", f"{scheme} {KEY}"), key=KEY)
        assert found == PASSED
    for path in KEYLESS_PATHS:
        assert await ask(path, key=KEY) == PASSED, path
    # Without a configured key none is needed.
    assert await ask("/admin/status", ("authorization", "Bearer whatever")) == PASSED


@each_case(
    "value", [None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer"]
)
async def test_without_the_key_nothing_is_revealed(value: str | None) -> None:
    headers = [] if value is None else [("authorization", value)]
    for path in ("/metrics", "/admin/status", "/openapi.json", "/nothing", "/ready/"):
        assert await ask(path, *headers, key=KEY) == (401, "invalid_api_key"), path
