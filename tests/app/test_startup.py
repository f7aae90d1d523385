from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from gateway.app.startup import (
    Options,
    StartError,
    check_startup,
    cluster_warnings,
    count_edges,
    keys_file,
    load_checked,
    read_admin_key,
    share_memory,
    state_file,
)
from gateway.config.errors import Problem
from gateway.config.listeners import AdminSettings, LimitSettings, ListenSettings
from gateway.config.settings import Settings
from tests.cluster.certificates import Authority
from tests.each_case import each_case

INVENTORY = "nodes: [{name: a, url: 'http://127.0.0.1:9'}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nodes.yaml").write_text(INVENTORY)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "key.txt").write_text("an admin key")
    return tmp_path


def options(folder: Path, settings: str | None = None, **more: object) -> Options:
    file = None
    if settings is not None:
        file = folder / "gateway.yaml"
        file.write_text(settings)
    return Options(folder / "nodes.yaml", file, **more)  # type: ignore[arg-type]


def test_an_option_beats_the_settings_and_a_missing_one_leaves_them() -> None:
    settings = Settings(
        listen=ListenSettings(host="10.0.0.1", port=9000),
        admin=AdminSettings(host="10.0.0.2", port=9001),
    )
    for one in (settings, Settings(allow_anonymous=True)):
        assert Options(Path("nodes.yaml")).apply_to(one) == one
    chosen = Options(Path("nodes.yaml"), port=0, admin_host="::1", allow_anonymous=True)
    applied = chosen.apply_to(settings)
    assert (applied.listen.host, applied.listen.port) == ("10.0.0.1", 0)
    assert (applied.admin.host, applied.admin.port) == ("::1", 9001)
    assert applied.allow_anonymous


def test_problems_of_both_files_are_reported_together(folder: Path) -> None:
    settings, inventory = load_checked(options(folder, "queue: {max: 7}"))
    assert (settings.queue.max, [spec.name for spec in inventory.nodes]) == (7, ["a"])
    (folder / "nodes.yaml").write_text("nodes: [{name: a}]")
    with pytest.raises(StartError) as caught:
        load_checked(options(folder, "queue: {max: -1}"))
    assert caught.value.status == 2
    assert "queue.max" in str(caught.value)
    assert "nodes[0].url" in str(caught.value)
    # An empty file of settings is a problem for a successor.
    (folder / "nodes.yaml").write_text("nodes: [{name: a, url: 'https://h', tls: {ca: empty.txt}}]")
    check = check_startup(options(folder, "# as usual\n"), allow_empty=False)
    assert [problem.file.name for problem in check.problems] == ["gateway.yaml"]
    (problem,) = check_startup(options(folder)).start_problems
    assert problem.key == "nodes[0].tls"


PORTS = "listen: {port: 9000}\nadmin: {port: 9000"
ADMIN_KEY = f"{{id: a, sha256: {'0' * 64}, role: viewer}}"


@each_case(
    ("settings", "keys"),
    [
        ("listen: {host: 0.0.0.0}", ["listen.host"]),
        ("listen: {trusted_proxies: [127.0.0.1]}", ["listen.trusted_proxies"]),
        ("admin: {host: 0.0.0.0}", ["admin.host"]),
        (f"admin: {{host: 0.0.0.0, keys: [{ADMIN_KEY}]}}", []),
        (f"{PORTS}}}", ["listen.port"]),
        (f"{PORTS}, host: localhost}}", []),
        (f"{PORTS}, host: '::', key_file: key.txt}}", ["listen.port"]),
        ("listen: {port: 0}\nadmin: {port: 0}", []),
        ("listen: {host: 0.0.0.0, trusted_proxies: [127.0.0.1]}\nallow_anonymous: true", []),
        ("admin: {key_file: empty.txt}", ["admin.key_file"]),
        ("listen: {tls: {cert: empty.txt, key: empty.txt}}", ["listen.tls"]),
        ("admin: {tls: {cert: empty.txt, key: empty.txt}}", ["admin.tls"]),
        ("listen: {host: 0.0.0.0}\nadmin: {host: 0.0.0.0}", ["listen.host", "admin.host"]),
    ],
)
def test_what_keeps_listeners_from_starting_is_named(
    folder: Path, settings: str, keys: list[str]
) -> None:
    check = check_startup(options(folder, settings))
    assert [problem.key for problem in check.start_problems] == keys
    assert check.settings is not None, "the file itself is valid"


MEMBER = """
store: {{url: {url}}}
listen: {{port: 8000{listen}}}
cluster:
  member: {member}
  listen: "127.0.0.1:{port}"
  tls: {{cert: {cert}, key: {key}, ca: {ca}}}
"""


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, []),
        ({"url": "off"}, ["store.url"]),
        ({"url": "null"}, ["store.url"]),
        ({"listen": ", edges: 0"}, ["listen.edges"]),
        ({"listen": ", edges: 2"}, []),
        ({"port": "8001"}, ["cluster.listen"]),
        ({"member": "gw-b"}, ["cluster.tls"]),
        ({"cert": "empty.txt"}, ["cluster.tls"]),
    ],
)
def test_what_keeps_a_member_of_a_cluster_from_starting_is_named_by_its_key(
    folder: Path, given: dict[str, str], keys: list[str]
) -> None:
    tls = Authority(folder).files("gw-a").model_dump()
    values = {"url": "postgresql://h/d", "listen": "", "member": "gw-a", "port": "8090", **tls}
    check = check_startup(options(folder, MEMBER.format_map({**values, **given})))
    assert [problem.key for problem in check.start_problems] == keys


def test_a_member_of_a_cluster_has_edges_unless_it_says_how_many(folder: Path) -> None:
    values = {**Authority(folder).files("gw-a").model_dump(), "member": "gw-a", "port": "8090"}
    text = MEMBER.format_map({**values, "url": "sqlite:///gateway.db", "listen": ""})
    settings = check_startup(options(folder, text)).settings
    assert settings is not None
    assert count_edges(settings) > 0
    (warning,) = cluster_warnings(settings)
    assert "on this machine" in warning
    none = replace(options(folder, text), edges=0)
    assert [problem.key for problem in check_startup(none).start_problems] == ["listen.edges"]


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_an_admin_key_that_cannot_be_used_is_an_error_with_the_file_and_the_remedy(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert read_admin_key(file) == "secret"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(StartError, match=r"key: .*(make the file|write one)") as caught:
        read_admin_key(file)
    assert caught.value.status == 2


def test_state_files_are_in_the_folder_that_was_named_else_systemds_else_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    unnamed = Options(tmp_path / "nodes.yaml")
    assert state_file(unnamed, "drains").parent == tmp_path / "home/.local/state/llama-gateway"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_file(unnamed, "drains").parent == tmp_path / "xdg/llama-gateway"
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}/systemd:{tmp_path}/second")
    assert state_file(unnamed, "drains").parent == tmp_path / "systemd"
    named = Options(tmp_path / "nodes.yaml", state_dir=tmp_path / "named")
    files = {state_file(named, "drains"), state_file(named, "seen")}
    files.add(state_file(replace(named, inventory_file=tmp_path / "other.yaml"), "drains"))
    assert {file.parent for file in files} == {tmp_path / "named"}
    assert len(files) == 3, "each inventory has its own"
    # Hashes of keys outlive temporary state files like their store.
    assert keys_file(named).parent == tmp_path / "named"
    assert keys_file(replace(named, store_dir=tmp_path / "own")).parent == tmp_path / "own"


@pytest.mark.parametrize(
    ("edges", "cores", "started"), [(0, 8, 0), (3, 1, 3), ("auto", 8, 7), ("auto", 1, 1)]
)
def test_auto_starts_an_edge_for_each_core_but_one(
    edges: int | Literal["auto"], cores: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert count_edges(Options(Path("nodes.yaml"), edges=edges).apply_to(Settings())) == started


def test_each_process_has_its_share_of_the_memory_for_bodies_but_one_body_at_least() -> None:
    limits = LimitSettings(buffered_bytes=1 << 30, body_bytes=100 << 20)
    assert share_memory(limits, 3).buffered_bytes == 256 << 20
    assert share_memory(limits, 63).buffered_bytes == 100 << 20


Check = Callable[[str, str], tuple[Problem, ...]]

FLEET = """\
defaults:
  memory: 64GiB
nodes:
  - {name: a0, url: http://a:1, preload: small}
  - {name: a1, url: http://a:2}
  - {name: b, url: http://b, memory: 16GiB, model: [small, big]}
  - {name: swap, url: http://c, kind: openai, models_on_demand: true}
  - {name: cloud, url: http://d, kind: openai}
  - {name: own, url: http://e, models_on_demand: false}
  - {name: off, url: http://f, enabled: false}
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def problems(nodes: str, settings: str) -> tuple[Problem, ...]:
        (tmp_path / "nodes.yaml").write_text(textwrap.dedent(nodes))
        (tmp_path / "gateway.yaml").write_text(textwrap.dedent(settings))
        options = Options(
            inventory_file=tmp_path / "nodes.yaml", settings_file=tmp_path / "gateway.yaml"
        )
        return check_startup(options).problems

    return problems


def test_what_fits_is_no_problem(check: Check) -> None:
    assert check(FLEET, "{}") == ()
    fitting = """
    models:
      big: {replicas: {min: 1, max: 2}, pin: [a0, swap, ], memory: 60GiB}
      small: {replicas: {min: 5, max: 7}, memory: 1GiB}
      night: {pin: off, memory: 64GiB}
      qwen-14b: {replicas: {min: 0, max: 2}, pin: [b], idle_unload: 30m}
    """
    assert check(FLEET.replace("model: [small, big]", "calibrate: false"), fitting) == ()
    assert check("nodes: []", "models: {a: {pin: [x], replicas: {min: 3}, memory: 1TiB}}") == ()
    nodes = "\n".join(
        f"  - {{name: n{number}, url: 'http://h{number // 2}:{8000 + number}', memory: 64GiB}}"
        for number in range(1000)
    )
    models = "\n".join(
        f"  m{number}: {{memory: 9GiB, pin: [n{number}], replicas: {{min: 2}}}}"
        for number in range(100)
    )
    began = time.thread_time()
    assert check(f"nodes:\n{nodes}\n", f"models:\n{models}\n") == ()
    assert time.thread_time() - began < 20  # Reading takes most of it.


@each_case(
    ("rule", "key", "words", "remedy"),
    [
        ("pin: [a0, swab]", "pin[1]", "of the inventory is named swab", "did you mean swap?"),
        ("pin: c", "pin", "no node of the inventory is named c", "own"),
        ("pin: [b]", "pin[0]", "the node b has no huge", "small, big"),
        ("pin: [cloud]", "pin[0]", "the node cloud is told to load nothing", "models_on_demand"),
        ("pin: [own]", "pin[0]", "the node own is told to load nothing", "models_on_demand"),
        ("replicas: {min: 5}", "replicas.min", "is 5, but 4 nodes can hold huge", "lower it"),
        ("memory: 65GiB", "memory", "is 65GiB, and no host that may hold huge has more", ""),
        (
            *("memory: 33GiB, replicas: {min: 4}", "replicas.min"),
            *("is 4, but 3 nodes can hold huge", "and have the memory"),
        ),
    ],
)
def test_what_can_not_be_is_reported_with_line_and_remedy(
    check: Check, rule: str, key: str, words: str, remedy: str
) -> None:
    text = f"# two\nmodels:\n  small: {{}}\n  huge: {{{rule}}}\n"
    (problem,) = check(FLEET, text)
    assert problem.file.name == "gateway.yaml"
    assert (problem.line, problem.key) == (4, f"models.huge.{key}")
    assert words in problem.message
    assert remedy in problem.remedy


def test_preloads_and_pins_beyond_the_most_replicas_are_refused(check: Check) -> None:
    (problem,) = check(FLEET, "models:\n  small: {replicas: {max: 1}, pin: [a1]}\n")
    assert problem.key == "models.small.replicas.max"
    assert "is 1, but 2 nodes always hold small" in problem.message


def test_a_host_is_refused_that_can_not_hold_what_must_always_be_there(check: Check) -> None:
    settings = """
    models:
      small: {memory: 8GiB}
      big: {memory: 30GiB, pin: [a0, a1]}
    """
    (problem,) = check(FLEET, settings)
    assert (problem.file.name, problem.line, problem.key) == ("nodes.yaml", 4, "nodes[0]")
    assert problem.message == (
        "a has 64GiB, and always to be loaded there are big (60GiB), small (8GiB): 68GiB in all"
    )
    assert check(FLEET, settings.replace("8GiB", "4GiB")) == ()
    # What is not known counts nothing.
    assert check(FLEET, settings.replace("{memory: 8GiB}", "{}")) == ()


def test_two_memories_of_one_host_are_reported(check: Check) -> None:
    nodes = """\
    defaults:
      memory: 64GiB
    nodes:
      - {name: a0, url: http://a:1}
      - name: a1
        url: http://10.0.0.1
        host: a
        memory: 32GiB
      - {name: b, url: http://b, memory: 32GiB}
      - {name: c, url: "http://a:2", memory: 65536MiB}
    """
    (problem,) = check(nodes, "{}")
    assert (problem.line, problem.key) == (8, "nodes[1].memory")
    assert problem.message == "another node of the host a says 64GiB"
    assert "share its memory" in problem.remedy
