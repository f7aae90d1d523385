"""The door of the admin listener, and the files of the page behind it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Scope

from gateway.admin.app import (
    FILES_PATH,
    INDEX_PAGE,
    KEYLESS_PATHS,
    PAGE,
    PAGE_SUFFIXES,
    STATIC_FOLDER,
    is_keyless,
    page_files,
)
from gateway.admin.guard import AdminGuard
from gateway.callers.keys import AdminKeys
from gateway.web.asgi import X_REQUEST_ID_KEY
from tests.each_case import each_case
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway

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


# The page and its files.


VENDOR = STATIC_FOLDER / "vendor"
AXE = Path(__file__).parent / "axe"
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NODE = a_spec("a", "http://127.0.0.1:9")


@pytest.mark.parametrize("folder", [VENDOR, AXE], ids=["page", "axe-core"])
def test_vendored_files_are_as_they_were_published_and_have_their_licence(folder: Path) -> None:
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in {"SHA256SUMS", "README.md"}
    }
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    assert found == {path: digest for digest, path in (line.split("  ") for line in lines)}
    for top in {Path(path).parts[0] for path in found if "/" in path} or {"."}:
        assert (folder / top / "LICENSE").read_text().strip(), top


def test_nothing_of_the_page_is_loaded_from_elsewhere() -> None:
    for path in STATIC_FOLDER.rglob("*"):
        if path.suffix in {".js", ".css", ".html"} and VENDOR not in path.parents:
            text = path.read_text()
            assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == [], path
            # Which notices are hidden, and nothing else.
            assert ("localStorage" in text) == (path.name == "problems.js"), path
            assert "sessionStorage" not in text, path
            assert "cookie" not in text, path


def test_every_file_that_the_page_names_is_served() -> None:
    files = page_files()
    page = (STATIC_FOLDER / PAGE).read_text()
    for name in re.findall(rf'(?:href|src)="{FILES_PATH[1:]}([^"]+)"', page):
        assert name in files, name
    # That of callers is another page: tests/web/test_site.py.
    for path in set(STATIC_FOLDER.glob("*.js")) - {STATIC_FOLDER / "me.js"}:
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert name in files, f"{path.name}: {name}"
            # Without this a browser learns of it only when it has read the file that imports it.
            assert f"{FILES_PATH[1:]}{name}" in page, name


def test_no_markup_of_the_page_has_script_or_style_of_its_own() -> None:
    for path in (STATIC_FOLDER / PAGE, *STATIC_FOLDER.glob("*.js")):
        text = path.read_text()
        assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:|<script>", text) == [], path
        assert re.findall(r"innerHTML|unsafe|eval\(|document\.write", text) == [], path


@in_virtual_time
async def test_a_browser_gets_the_page_and_a_program_the_list_of_paths() -> None:
    async with bare_gateway(NODE) as gateway:
        page = await gateway.admin.get("/", headers=BROWSER)
        texts = [
            await gateway.admin.get("/", headers=headers)
            for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"})
        ]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (STATIC_FOLDER / PAGE).read_bytes()
    assert page.headers["vary"] == "Accept"
    for text in texts:
        assert text.text == INDEX_PAGE
        assert text.headers["content-type"] == "text/plain; charset=utf-8"


@in_virtual_time
async def test_page_and_files_need_no_key_and_may_run_nothing_but_their_own_scripts() -> None:
    async with bare_gateway(NODE, admin_key="the-key") as gateway:
        for path in ("/", f"{FILES_PATH}app.js", f"{FILES_PATH}vendor/uplot/uPlot.min.css"):
            response = await gateway.admin.get(path, headers=BROWSER)
            assert response.status_code == 200, path
            policy = directives(response)
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in response.headers
        assert (await gateway.admin.get("/admin/live", headers=BROWSER)).status_code == 401


def directives(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


@in_virtual_time
async def test_a_file_that_has_not_changed_is_not_sent_again_and_nothing_else_is_served() -> None:
    async with bare_gateway(NODE) as gateway:
        path = f"{FILES_PATH}style.css"
        first = await gateway.admin.get(path)
        again = await gateway.admin.get(path, headers={"if-none-match": first.headers["etag"]})
        for name in (
            "nothing.js", "../pages.py", "..%2fpages.py", "vendor", "vendor/SHA256SUMS", "",
            "app.js/",
        ):  # fmt: skip
            assert (await gateway.admin.get(FILES_PATH + name)).status_code == 404, name
    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content) == (304, b"")
    assert {Path(name).suffix for name in page_files()} == PAGE_SUFFIXES
