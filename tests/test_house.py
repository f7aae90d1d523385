"""What keeps the house in order and no linter knows; what the pages tell one to type exists."""

from __future__ import annotations

import html
import importlib.util
import re
import shlex
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway import __version__
from tests.command_lines import BLOCK, PROMPT, calls, unknown
from tests.house import picture
from tests.house.source import ROOT, cycles, imports, modules, shared_class_names
from tests.processes import ran

MODULES = sorted((ROOT / "gateway").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PINS = sorted((ROOT / "requirements").glob("*.txt"))
LINES_OF_A_MODULE = 1200
MOST_ENTRIES = 12
"""What a reader takes in at a glance: of the navigation, and of a group that is unfolded."""
PICTURE = ROOT / "docs" / "images" / "first-minute.svg"
BEFORE_THE_PATH = re.compile(r"\.venv/bin/(?!activate)")
NAMES_THAT_HIDE = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
# Written so that this file does not hold what it looks for.
REGISTRY = re.compile(
    r"pypi\.[o]rg|python[h]osted\.org|npmjs\.[c]om|npmjs\.[o]rg|crates\.[i]o"
    r"|^\s*(extra-)?index-[u]rl|\"resolved\": *\"https?:|registry *= *\"?https?:"
)
PLACE_OF_ONE_MACHINE = re.compile(r"(?<![\w.$}>*~/-])/(work|root|home/\w+|Users/\w+)/")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tracked() -> tuple[Path, ...]:
    """Return the text files of the project: what git tracks, or in an unpacked archive all."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        listing = ran(git, "-c", f"safe.directory={ROOT}", "-C", ROOT, "ls-files", "-z")
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        skipped = {".venv", ".git", "node_modules", "__pycache__", "site"}
        paths = [path for path in ROOT.rglob("*") if not skipped & set(path.parts)]
    return tuple(path for path in paths if path.is_file() and b"\0" not in path.read_bytes())


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]
    assert isinstance(table, dict)
    return table


def declared(*extras: str) -> set[str]:
    """Return the names of the dependencies that pyproject.toml asks for."""
    table = project()
    lists = [table["dependencies"]]
    optional = table["optional-dependencies"]
    assert isinstance(optional, dict)
    lists += [optional[extra] for extra in extras]
    return {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}  # type: ignore[attr-defined]


def pinned(path: Path) -> dict[str, str]:
    """Return name -> everything that belongs to the pin: version, markers and hashes."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", path.read_text(), flags=re.MULTILINE)[1:]
    return {canonicalize_name(re.split(r"[=\[ ]", block, maxsplit=1)[0]): block for block in blocks}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_modules_are_short_enough_to_be_read_at_once() -> None:
    lines = {shown(module): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: count for name, count in lines.items() if count > LINES_OF_A_MODULE} == {}


def test_modules_are_named_for_what_they_do() -> None:
    parts = {shown(module): module.relative_to(ROOT).with_suffix("").parts for module in MODULES}
    words = {
        name: {word for one in split for word in one.split("_")} for name, split in parts.items()
    }
    assert [name for name, found in words.items() if found & NAMES_THAT_HIDE] == []


SHARED_CLASS_NAMES = {"Problem", "RequestCounts", "Sender"}
"""It only becomes shorter."""


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert cycles(imports(modules(ROOT))) == []


def test_a_circle_is_found_and_a_path_without_return_is_none() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": ()}
    assert cycles(edges) == [["a", "b", "c"]]


def test_a_class_name_has_one_owner() -> None:
    assert set(shared_class_names(modules(ROOT))) - SHARED_CLASS_NAMES == set()


def test_the_drawing_of_the_packages_is_up_to_date() -> None:
    page = (ROOT / picture.PAGE).read_text()
    assert picture.page(ROOT) == page, "python -m tests.house.picture --write"


def test_no_file_names_a_package_registry_or_a_place_of_one_machine() -> None:
    found = [
        f"{shown(path)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if REGISTRY.search(line) or PLACE_OF_ONE_MACHINE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "https://pypi." + "org/simple",
        "extra-index-" + "url = x",
        "cd /wo" + "rk/main",
        "'/ro" + "ot/x'",
    ],
)
def test_the_search_for_registries_and_places_finds_them(line: str) -> None:
    assert REGISTRY.search(line) or PLACE_OF_ONE_MACHINE.search(line)


@pytest.mark.parametrize("path", PINS, ids=shown)
def test_every_pin_has_a_version_and_hashes_and_no_address(path: Path) -> None:
    assert "http:" not in path.read_text()
    assert "https:" not in path.read_text()
    pins = pinned(path)
    assert pins
    assert [
        name for name, pin in pins.items() if "==" not in pin or "--hash=sha256:" not in pin
    ] == []


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("runtime", ()),
        ("otel", ("otel",)),
        ("local", ("local", "tui", "otel")),
        ("test", ("local", "tui", "otel", "test")),
        ("dev", ("local", "tui", "otel", "test", "dev", "docs")),
    ],
)
def test_every_declared_dependency_is_pinned(name: str, extras: tuple[str, ...]) -> None:
    missing = declared(*extras) - set(pinned(ROOT / "requirements" / f"{name}.txt"))
    assert not missing, "make pins renews the pins"


def test_the_pins_agree_with_each_other() -> None:
    everything = pinned(ROOT / "requirements" / "dev.txt")
    for path in PINS:
        for name, pin in pinned(path).items():
            assert pin.split()[0] == everything[name].split()[0], f"{shown(path)}: {name}"


@pytest.mark.parametrize(
    ("less", "more"),
    [
        *(("runtime", "otel"), ("otel", "local"), ("local", "test"), ("test", "dev")),
        ("build", "dev"),
    ],
)
def test_a_set_of_pins_holds_the_lighter_one(less: str, more: str) -> None:
    held = pinned(ROOT / "requirements" / f"{more}.txt")
    assert set(pinned(ROOT / "requirements" / f"{less}.txt")) - set(held) == set()


def test_every_dependency_of_the_gateway_earns_a_line() -> None:
    rows = re.findall(
        r"^\| `([^`]+)`", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE
    )
    explained = {canonicalize_name(row) for row in rows}
    needed = declared("local", "tui", "otel")
    assert needed - explained == set(), "explain it in docs/dependencies.md"
    used = declared("local", "tui", "otel", "test", "dev", "docs") | {"hatchling"}
    assert explained - used == set(), "no longer used"


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)


# The pages.


MODULES_OF_PAGES = {
    f"/{shown(path)}"
    for part in ("gateway", "setup", "tests", "deploy")
    for path in (ROOT / part).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_flags_targets_and_modules_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    assert [(" ".join(words), wrong) for words in calls(text) if (wrong := unknown(words))] == []
    modules = re.findall(r"python -m ((?:tests|gateway)[\w.]*)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert {
        name for name in files if not any(one.endswith(f"/{name}") for one in MODULES_OF_PAGES)
    } == set()
    targets = re.findall(r"(?:`|^\s*\$ |&& )make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert set(targets) - make_targets() == set()


def test_a_command_that_does_not_exist_is_found() -> None:
    page = "```console\n$ cd x && llama-gateway nodes drain a --slowly  # soon\n```\n"
    page += "`llama-gateway fly`, `journalctl -u llama-gateway -n 5`, `llama-gateway nodes fix a`\n"
    assert [unknown(words) for words in calls(page)] == [["--slowly"], ["fly"], ["fix"]]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_look_the_same_everywhere(page: Path) -> None:
    """In `console` blocks behind a `$`; the program and its peers are on the PATH."""
    for block in BLOCK.finditer(page.read_text()):
        assert block["kind"] not in {"bash", "sh", "shell"}, (
            "write ```console, and `$ ` before commands"
        )
        if block["kind"] == "console":
            assert not BEFORE_THE_PATH.search(block["text"]), (
                "after one `source .venv/bin/activate`"
            )
            assert PROMPT.match(block["text"]), "the first line of a console block is a command"


def test_the_navigation_is_read_at_a_glance() -> None:
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    groups = {name: pages for entry in entries for name, pages in entry.items()}
    assert len(groups) <= MOST_ENTRIES
    assert [
        name
        for name, pages in groups.items()
        if len(pages) > MOST_ENTRIES and isinstance(pages, list)
    ] == []


def test_readme_begins_with_the_picture_and_the_home_page_too() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        first, *_ = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
        assert Path(first).name == "slot-timeline.svg"


def test_the_picture_is_of_this_program_and_of_no_machine() -> None:
    drawn = PICTURE.read_text()
    assert "url(http" not in drawn, "nothing is loaded from elsewhere"
    texts = map(html.unescape, re.findall(r"<text[^>]*>([^<]+)</text>", drawn))
    words = [" ".join(text.split()) for text in texts if text.strip()]
    typed = [line for line in words if line.startswith("llama-gateway ")]
    assert len(typed) >= 2
    assert [wrong for line in typed if (wrong := unknown(shlex.split(line)[1:]))] == []
    assert "logs are in ~/" in " ".join(words)


def test_make_help_tells_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    told = set(re.findall(r"^([a-z][a-z-]*):.*## \S", text, re.MULTILINE))
    assert told == make_targets()


def test_every_link_of_the_pages_leads_somewhere() -> None:
    astray = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\(([^)\s]+)\)", text)
        local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
        astray += [
            f"{shown(page)}: {target}" for target in local if not (page.parent / target).exists()
        ]
    assert astray == []
