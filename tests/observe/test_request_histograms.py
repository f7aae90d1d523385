from __future__ import annotations

import pytest

from gateway.observe.metrics import MOST_LABEL_SETS, outcome_of
from gateway.request import Priority
from tests.each_case import each_case
from tests.observe.test_metrics import Gateway, finished


@each_case(
    ("status", "outcome"),
    [(200, "ok"), (400, "rejected"), (429, "rejected"), (499, "client_closed"), (502, "failed")],
)
def test_an_outcome_says_whose_fault_it_was(status: int, outcome: str) -> None:
    assert outcome_of(status) == outcome


def test_times_are_told_by_model_class_tier_and_outcome() -> None:
    gateway = Gateway()
    gateway.publish(
        finished(duration_seconds=2.0, ttft=0.4, queue_seconds=3.0),
        finished(duration_seconds=9.0, ttft=None, tier="gpu", priority=Priority.URGENT, status=502),
        finished(duration_seconds=0.1, ttft=None, tier=None, attempts=0, status=429),
    )
    page = gateway.scrape()
    normal = {"model": "mistral-7b", "class": "normal", "tier": "cpu"}
    urgent = {**normal, "class": "urgent", "tier": "gpu"}
    assert page.value("response_seconds_sum", **normal, outcome="ok") == 2.0
    assert page.value("response_seconds_bucket", **normal, outcome="ok", le="2.5") == 1
    assert page.value("response_seconds_count", **urgent, outcome="failed") == 1
    refused = {**normal, "tier": "none", "outcome": "rejected"}
    assert page.value("response_seconds_count", **refused) == 1
    assert page.value("first_token_seconds_sum", **normal) == 0.4
    assert page.value("first_token_seconds_count", **urgent) is None
    assert page.value("slot_wait_seconds_sum", **normal) == 3.0
    assert page.value("slot_wait_seconds_count", **{**normal, "tier": "none"}) is None


def test_models_beyond_the_bound_are_counted_together() -> None:
    gateway = Gateway()
    gateway.publish(*(finished(model=f"m{n}") for n in range(MOST_LABEL_SETS + 50)))
    page = gateway.scrape()
    assert page.count("first_token_seconds_count") == MOST_LABEL_SETS + 1
    other = {"model": "other", "class": "normal", "tier": "cpu"}
    assert page.value("first_token_seconds_count", **other) == 50


def test_open_telemetrys_names_are_there_only_if_they_are_asked_for() -> None:
    gateway = Gateway()
    once = finished(prompt_tokens=40, completion_tokens=11, ttft=0.5, duration_seconds=2.5)
    gateway.publish(once)
    assert "gen_ai_server_request_duration_seconds" not in gateway.scrape().families
    gateway.metrics.configure(gen_ai=True)
    gateway.publish(
        once, finished(path="/v1/embeddings", ttft=None, status=503), finished(path="/tokenize")
    )
    values = gateway.scrape().values
    chat = {
        "gen_ai_request_model": "mistral-7b",
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "llama.cpp",
    }

    def value(name: str, **labels: str) -> float | None:
        return values.get((name, tuple(sorted(labels.items()))))

    assert value("gen_ai_server_request_duration_seconds_sum", **chat, error_type="") == 2.5
    assert value("gen_ai_server_time_to_first_token_seconds_sum", **chat) == 0.5
    per_token = value("gen_ai_server_time_per_output_token_seconds_sum", **chat)
    assert per_token == pytest.approx(0.2)
    assert value("gen_ai_client_token_usage_sum", **chat, gen_ai_token_type="input") == 40
    assert value("gen_ai_client_token_usage_sum", **chat, gen_ai_token_type="output") == 11
    failed = {**chat, "gen_ai_operation_name": "embeddings", "error_type": "503"}
    assert value("gen_ai_server_request_duration_seconds_count", **failed) == 1
    durations = [key for key in values if key[0] == "gen_ai_server_request_duration_seconds_count"]
    assert len(durations) == 2, "what generates nothing is left out"
