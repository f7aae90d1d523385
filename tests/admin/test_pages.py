from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from gateway.admin.app import FILES_PATH, INDEX_PAGE, PAGE, PAGE_SUFFIXES, STATIC_FOLDER, page_files
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway

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
    # That of callers is another page: tests/web/test_caller_page.py.
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
