from __future__ import annotations

from pathlib import Path

from tests.config.conftest import LoadSettings, Problems

HASH = "0123456789abcdef" * 4


def test_keys_are_read_and_their_hashes_are_not_shown(load_gateway: LoadSettings) -> None:
    (key,) = load_gateway(f"keys: [{{id: a, sha256: {HASH.upper()}, models: m}}]").keys
    assert (key.id, key.sha256, key.name, key.models) == ("a", HASH, "", ("m",))
    assert HASH not in repr(key)


def test_files_start_in_the_folder_of_the_settings(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    for name in ("cert.pem", "key.pem", "admin.key"):
        (tmp_path / name).write_text("x")
    settings = load_gateway(
        "listen: {tls: {cert: cert.pem, key: key.pem}}\n"
        "admin: {key_file: admin.key, tls: {cert: cert.pem, key: key.pem}}"
    )
    for tls in (settings.listen.tls, settings.admin.tls):
        assert tls is not None
        assert (tls.cert, tls.key) == (tmp_path / "cert.pem", tmp_path / "key.pem")
    assert settings.admin.key_file == tmp_path / "admin.key"


def test_a_duplicate_id_is_reported_with_both_lines(gateway_problems: Problems) -> None:
    text = f"keys:\n  - id: a\n    sha256: {HASH}\n  - id: a\n    sha256: short\n"
    problems = gateway_problems(text)
    assert [(p.line, p.key) for p in problems] == [(4, "keys[1].id"), (5, "keys[1].sha256")]
    assert "line 2" in problems[0].message
