from __future__ import annotations

from pathlib import Path

from gateway.local.server import last_lines, open_log, truncate_log


def test_the_log_of_the_previous_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "local-0.log"
    for run in range(3):
        with open_log(path) as log:
            log.write(f"run {run}\n".encode())
    assert last_lines(path) == ["run 2"]
    assert last_lines(path.with_name("local-0.log.1")) == ["run 1"]
    assert len(list(path.parent.iterdir())) == 2


def test_a_log_that_grows_past_its_limit_is_cut_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with open_log(path) as log:
        log.write(b"a" * 100 + b"\n")
        assert not truncate_log(path, limit=101)
        log.write(b"b\n")
        assert truncate_log(path, limit=101)
        log.write(b"c\n")
    assert path.read_bytes() == b"c\n"
    assert path.with_name("x.log.1").read_bytes().endswith(b"b\n")


def test_the_last_lines_of_any_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"\n".join(str(n).encode() for n in range(100)) + b"\nbad \xff\n")
    assert last_lines(path, 2) == ["99", "bad \ufffd"]
    assert last_lines(tmp_path / "none.log") == []
    path.write_bytes(b"x" * 1_000_000)
    assert len(last_lines(path)[0]) < 100_000
