"""The tables of errors, and the codes that the gateway sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.web.openapi_errors import ADMIN_ERRORS, ERRORS, ErrorRow, error_schemas

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rows", [ERRORS, ADMIN_ERRORS], ids=["public", "admin"])
def test_each_error_is_there_once(rows: tuple[ErrorRow, ...]) -> None:
    pairs = [(row.status, row.code) for row in rows]
    assert len(pairs) == len(set(pairs))


def test_every_code_of_batches_is_in_the_table() -> None:
    known = {row.code for row in ERRORS}
    for name in ("batches/batch_registry.py", "web/batches.py", "web/message_batches.py"):
        text = (ROOT / "gateway" / name).read_text()
        sent = set(re.findall(r'GatewayError\(\s*\d+,\s*"(\w+)"', text))
        assert sent
        assert sent - known == set(), name


def test_each_api_has_a_schema_of_its_errors() -> None:
    assert set(error_schemas()) == {"Error", "AnthropicError", "OllamaError"}
