"""docs/reference/http.md documents every path, field and metric, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from gateway import errors
from gateway.events import (
    AttemptEnded,
    EventBus,
    HookEnded,
    LimitReached,
    ModelLoadChanged,
    RequestRecord,
    WebhookAttempted,
)
from gateway.openapi import ERROR_HEADERS, ERRORS, REQUEST_HEADERS, RESPONSE_HEADERS
from gateway.watch.metrics import Metrics, NodeSample
from tests.house.reference import PAGES, renewed, tables
from tests.watch.metric_source import a_source

PAGE = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()
PREFIX = "llama_gateway_"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that follows a heading, without its first two lines."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    lines = re.split(r"^#+ ", section, flags=re.MULTILINE)[0].splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def metrics_told() -> dict[str, tuple[str, set[str]]]:
    result = {}
    for name, kind, labels in rows("Metrics"):
        outside = re.sub(r"\(.*?\)", "", labels)
        for metric in words(name):
            result[metric.removeprefix(PREFIX)] = (kind.split(":")[0].split(",")[0], words(outside))
    return {name: (kind, set(labels)) for name, (kind, labels) in result.items()}


def metrics_made() -> dict[str, tuple[str, set[str]]]:
    """Each family of a page on which every family has a sample."""
    bus = EventBus()
    node = NodeSample("a", "ready", 2, 1, decode_tps=10.0, prefill_tps=100.0)
    model = NodeSample("r/m", "ready", 2, 1, router="r", model="m", load_failures=1)
    nodes = [node, NodeSample("r", "ready", 2, 1, left_alone=0), model]
    metrics = Metrics(bus, lambda: nodes, a_source().add_to, lambda _: "alice")
    bus.publish(RequestRecord("r1", "/v1/completions", tier="cpu", ttft=0.1, attempts=1))
    bus.publish(RequestRecord("r2", "/v1/completions", status=429, reason="queue_full"))
    bus.publish(AttemptEnded("r1", "a", "ok", 1.0))
    bus.publish(LimitReached("rpm", "key"))
    bus.publish(HookEnded("a", "start", "ok", 1.0, ""))
    bus.publish(WebhookAttempted("delivered"))
    bus.publish(ModelLoadChanged("r", "m", "loaded", 1.0, "", by_others=False))
    bus.publish(ModelLoadChanged("r", "m", "unloaded", None, "", by_others=False, cause="idle"))
    page = b"".join(metrics.steps()).decode()
    kinds = dict(re.findall(rf"^# TYPE {PREFIX}(\w+) (\w+)$", page, re.MULTILINE))
    made = {}
    for name, kind in kinds.items():
        sample = re.search(rf"^{PREFIX}{name}(?:_count)?(?:{{(.*)}})? \S+$", page, re.MULTILINE)
        assert sample is not None, f"no sample of {name}: give this test an event that makes one"
        made[name] = (kind, set(re.findall(r'(\w+)="', sample[1] or "")))
    return made


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    assert metrics_told() == metrics_made()


def test_the_names_of_opentelemetry_are_documented_with_their_labels() -> None:
    bus = EventBus()
    metrics = Metrics(bus, lambda: ())
    metrics.configure(gen_ai=True)
    done = RequestRecord("r1", "/v1/completions", ttft=0.1, prompt_tokens=9, completion_tokens=9)
    bus.publish(done)
    made: dict[str, set[str]] = {}
    for name, labels in re.findall(
        r"^(gen_ai_\w+)_count\{(.*)\} ", b"".join(metrics.steps()).decode(), re.MULTILINE
    ):
        made[name] = set(re.findall(r'(\w+)="', labels))
    shared = {"gen_ai_request_model", "gen_ai_operation_name", "gen_ai_provider_name"}
    told = {
        words(name)[0]: shared | set(words(re.sub(r"\(.*?\)", "", labels)))
        for name, _, labels in rows("OpenTelemetry's names")
    }
    assert told == made


def test_the_tables_on_the_pages_are_up_to_date() -> None:
    root = Path(__file__).parents[2]
    pages = [(root / one).read_text() for one in PAGES]
    assert [renewed(page) for page in pages] == pages, "python -m tests.house.reference renews them"
    assert all(f"house.reference: {name} -->" in "".join(pages) for name in tables())


def test_every_header_of_the_document_is_on_the_page() -> None:
    for name in {**REQUEST_HEADERS, **RESPONSE_HEADERS, **ERROR_HEADERS}:
        assert f"`{name}" in PAGE, name


def test_every_error_that_the_code_names_is_on_the_page() -> None:
    source = (Path(errors.__file__)).read_text()
    made = set(re.findall(r"GatewayError\(\s*(\d+),\s*\"(\w+)\"", source))
    told = {(str(row.status), row.code) for row in ERRORS}
    assert made - told == set()
