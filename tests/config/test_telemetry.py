"""The settings of traces: where they go, and the header that goes with them."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.config.settings import TracesSettings, changed_restart_keys, masked_settings
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HEADER = "Authorization: Bearer s3cret"


@each_case(
    ("written", "meant"),
    [
        ("http://Collector:4318", "http://collector:4318/v1/traces"),
        ("https://otlp.example.org/", "https://otlp.example.org/v1/traces"),
        ("https://otlp.example.org/otlp/v1/traces", "https://otlp.example.org/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_has_the_usual_one(
    written: str, meant: str, load_gateway: LoadSettings
) -> None:
    settings = load_gateway(f"telemetry: {{traces: {{endpoint: '{written}'}}}}")
    assert settings.telemetry.traces.endpoint == meant


@each_case(
    ("traces", "problem"),
    [
        ("endpoint: 'collector:4318'", "must be an http or https URL"),
        ("endpoint: 'http://me:s3cret@c/'", "no user and no password"),
        ("endpoint: 'http://c/?key=s3cret'", "must have no query"),
        ("share: 2", "share"),
        ("beyond_share: -1", "beyond_share"),
        ("timeout: 2h", "timeout"),
        ("header: 'Authorization: s3cret'", "must not stand in this file"),
        ("header_env: ABSENT", "ABSENT is not set"),
        ("header_env: WRONG", "holds no header"),
        ("header_file: wrong.txt", "holds no header"),
        ("{header_env: HEADER, header_file: wrong.txt}", "can't stand beside header_env"),
    ],
)
def test_what_is_wrong_is_told_without_its_secret(
    traces: str, problem: str, gateway_problems: Problems, tmp_path: Path
) -> None:
    (tmp_path / "wrong.txt").write_text("s3cret")
    inner = traces if traces.startswith("{") else f"{{{traces}}}"
    found = gateway_problems(f"telemetry: {{traces: {inner}}}", HEADER=HEADER, WRONG="s3cret")
    text = "\n".join(str(one) for one in found)
    assert problem in text
    assert "s3cret" not in text


def test_a_header_comes_from_a_variable_or_a_file(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    (tmp_path / "header").write_text("X-Api-Key:  s3cret\n")
    one = load_gateway("telemetry: {traces: {header_env: OTLP}}", OTLP=HEADER).telemetry.traces
    assert one.header_fields() == {"Authorization": "Bearer s3cret"}
    settings = load_gateway("telemetry: {traces: {header_file: header}}")
    assert settings.telemetry.traces.header_fields() == {"X-Api-Key": "s3cret"}
    assert "s3cret" not in json.dumps(masked_settings(settings))
    assert "s3cret" not in repr(settings)
    assert settings.telemetry.traces != TracesSettings()
    assert TracesSettings().header_fields() == {}


def test_a_new_header_is_a_change_that_needs_no_restart(load_gateway: LoadSettings) -> None:
    text = "telemetry: {traces: {header_env: OTLP}}"
    before, after = load_gateway(text, OTLP=HEADER), load_gateway(text, OTLP=HEADER + "2")
    assert before != after
    assert changed_restart_keys(before, after) == ()
