from __future__ import annotations

from typer.testing import CliRunner

from gateway.config.webhooks import MOST_SECRET_BYTES, secret_bytes
from gateway.tools.cli import app


def test_each_secret_is_a_new_one_that_the_settings_take() -> None:
    printed = [CliRunner().invoke(app, ["webhooks", "secret"]) for _ in range(2)]
    assert [one.exit_code for one in printed] == [0, 0]
    first, second = (one.stdout.strip() for one in printed)
    assert first != second
    assert 24 <= len(secret_bytes(first)) <= MOST_SECRET_BYTES
    # Nothing else is written where a file is made of it.
    assert printed[0].stdout == f"{first}\n"


def test_help_tells_how_to_keep_it() -> None:
    shown = CliRunner().invoke(app, ["webhooks", "secret", "--help"])
    assert shown.exit_code == 0
    assert "secret_file" in shown.stdout
