from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.cli.running import Ran, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/nodes.yaml").write_text("nodes: [{name: a, url: http://127.0.0.1:1}]\n")
    return tmp_path


def test_valid_files_are_reported_as_valid(folder: Path) -> None:
    ran = run("check")
    assert ran == Ran(
        0,
        "config/nodes.yaml: valid, 1 node\n"
        "config/gateway.yaml: not there, every setting has its default\n",
        "",
    )
    (folder / "config/gateway.yaml").write_text("queue: {max: 5}\n")
    assert "config/gateway.yaml: valid" in run("check").out


def test_every_problem_of_both_files_is_reported_with_its_line(folder: Path) -> None:
    (folder / "config/nodes.yaml").write_text(
        "nodes:\n  - name: a\n    url: http://127.0.0.1:1/v1\n    sluts: 2\n"
    )
    (folder / "config/gateway.yaml").write_text("queue:\n  max: many\n")
    ran = run("check")
    assert (ran.status, ran.out) == (2, "")
    assert "config/nodes.yaml:3" in ran.err
    assert "config/nodes.yaml:4" in ran.err
    assert "config/gateway.yaml:2" in ran.err
    assert all(line.startswith("error: config/") for line in ran.err.splitlines())

    ran = run("check", "--json")
    answer = json.loads(ran.out)
    assert (ran.status, answer["valid"]) == (2, False)
    places = {(problem["file"], problem["line"]) for problem in answer["problems"]}
    assert ("config/nodes.yaml", 4) in places
    assert ("config/gateway.yaml", 2) in places
    assert all(problem["message"] and problem["key"] for problem in answer["problems"])


BEHIND_PROXY = "listen: {trusted_proxies: [10.0.0.1]}\n"


@pytest.mark.parametrize("command", [("check",), ("check", "--json"), ("serve",)])
def test_a_listener_behind_a_proxy_without_keys_is_refused(
    folder: Path, command: tuple[str, ...]
) -> None:
    (folder / "config/gateway.yaml").write_text(BEHIND_PROXY)
    ran = run(*command)
    assert ran.status == 2
    output = ran.out + ran.err
    assert "listen.trusted_proxies" in output
    assert "keys create" in output
    assert "--allow-anonymous" in output


def test_a_listener_behind_a_proxy_with_a_key_or_allow_anonymous_is_fine(folder: Path) -> None:
    (folder / "config/gateway.yaml").write_text(BEHIND_PROXY)
    assert run("check", "--allow-anonymous").status == 0
    (folder / "config/gateway.yaml").write_text(BEHIND_PROXY + "allow_anonymous: true\n")
    assert run("check").status == 0
    key = f"keys: [{{id: a, sha256: {'0' * 64}}}]\n"
    (folder / "config/gateway.yaml").write_text(BEHIND_PROXY + key)
    assert run("check").status == 0


@pytest.mark.parametrize("text", ["", " \n\n", "\ufeff"])
def test_a_blank_settings_file_is_refused(folder: Path, text: str) -> None:
    (folder / "config/gateway.yaml").write_text(text)
    for command in ("check", "serve"):
        ran = run(command)
        assert ran.status == 2
        assert "config/gateway.yaml: the file is empty" in ran.err
        assert "{} stands for the defaults" in ran.err


@pytest.mark.parametrize("text", ["# all defaults\n", "{}\n", "listen:\n", "null\n"])
def test_empty_settings_on_purpose_are_fine(folder: Path, text: str) -> None:
    (folder / "config/gateway.yaml").write_text(text)
    assert run("check").status == 0
    assert run("check", "--config", "/dev/null").status == 0


def test_the_files_can_be_named_by_flag_and_by_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.yaml").write_text("nodes: []\n")
    monkeypatch.setenv("LLAMA_GATEWAY_NODES", "other.yaml")
    assert "other.yaml: valid, 0 nodes" in run("check").out
    assert "config/nodes.yaml: valid" in run("check", "--nodes", "config/nodes.yaml").out


@pytest.mark.parametrize("flag", ["--nodes", "--config"])
def test_a_named_file_that_is_not_there_is_an_error(folder: Path, flag: str) -> None:
    ran = run("check", flag, "missing.yaml")
    assert ran.status == 2
    assert "missing.yaml" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_missing_inventory_is_reported_with_the_remedy(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(command)
    assert ran.status == 2
    assert "config/nodes.yaml: there is no such file" in ran.err
    assert "--nodes" in ran.err
    assert "llama-gateway up" in ran.err


REFUSED = {
    ("--host", "0.0.0.0"): "--allow-anonymous",
    ("--admin-host", "::"): "--admin-key-file",
    ("--port", "8001"): "both listeners would use port 8001",
    ("--admin-key-file", "missing"): "missing: the admin key can't be read",
    ("--admin-key-file", "binary"): "it is not a text",
    ("--host", "a/b", "--allow-anonymous"): "listen.host",
    ("--nodes", "tls.yaml"): "the TLS files of the node 'secure' can't be used",
    ("--config", "tls-settings.yaml"): "listen.tls: ",
}


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_a_configuration_that_serve_refuses_is_invalid(
    folder: Path, flags: tuple[str, ...]
) -> None:
    (folder / "binary").write_bytes(b"\xff")
    (folder / "junk.pem").write_text("junk")
    (folder / "tls.yaml").write_text(
        "nodes: [{name: secure, url: 'https://127.0.0.1:1', tls: {ca: junk.pem}}]\n"
    )
    (folder / "tls-settings.yaml").write_text("listen: {tls: {cert: junk.pem, key: junk.pem}}\n")
    checked, served = run("check", *flags), run("serve", *flags)
    assert (checked.status, checked.out) == (2, "")
    assert REFUSED[flags] in checked.err
    assert (served.status, served.err) == (2, checked.err)
    (problem,) = json.loads(run("check", "--json", *flags).out)["problems"]
    assert problem["key"]
    assert REFUSED[flags] in problem["message"]


def test_a_flag_with_which_serve_starts_makes_the_files_valid(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config/gateway.yaml").write_text("listen: {host: 0.0.0.0}\n")
    assert run("check").status == 2
    assert run("check", "--allow-anonymous").status == 0
    assert run("check", "--host", "127.0.0.1").status == 0
    monkeypatch.setenv("LLAMA_GATEWAY_HOST", "127.0.0.1")
    assert run("check").status == 0


def test_serve_reports_the_problems_of_both_files_and_of_the_listeners(folder: Path) -> None:
    (folder / "config/nodes.yaml").write_text("nodes: 3\n")
    (folder / "config/gateway.yaml").write_text("queue: {max: many}\n")
    for command in ("serve", "check"):
        ran = run(command)
        assert ran.status == 2
        assert "config/nodes.yaml:1: nodes" in ran.err
        assert "config/gateway.yaml:1: queue.max" in ran.err
    (folder / "config/gateway.yaml").write_text("listen: {host: 0.0.0.0}\n")
    for command in ("serve", "check"):
        ran = run(command)
        assert "config/nodes.yaml:1: nodes" in ran.err
        assert "--allow-anonymous" in ran.err


def test_two_nodes_of_one_server_are_a_warning(folder: Path) -> None:
    nodes = (
        "nodes:\n"
        "  - {name: off, url: 'http://127.0.0.1:1', enabled: false}\n"
        "  - {name: a, url: 'http://127.0.0.1:1'}\n"
        "  - name: b\n"
        "    url: http://127.0.0.1:1/\n"
        "  - {name: m1, url: 'http://127.0.0.1:2', kind: openai, model: m1}\n"
        "  - {name: m2, url: 'http://127.0.0.1:2', kind: openai, model: m2}\n"
    )
    (folder / "config/nodes.yaml").write_text(nodes)
    ran = run("check")
    assert ran.status == 0
    (warning,) = ran.err.splitlines()
    assert warning.startswith("warning: config/nodes.yaml:5: nodes[2].url: the nodes a and b are")
    assert json.loads(run("check", "--json").out)["warnings"] == [warning.removeprefix("warning: ")]
