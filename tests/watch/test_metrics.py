from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.status import MOST_SAMPLES, MetricsSource, add_node_metrics, read_node_metrics
from gateway.events import AttemptEnded, EventBus, ModelLoadChanged, NodeChanged, RequestRecord
from gateway.nodes.router import UNLOAD_CAUSES
from gateway.terms import Priority
from gateway.watch.metrics import (
    MOST_INSTANCES,
    MOST_KEYS,
    MOST_LABEL_SETS,
    MOST_MODELS,
    MOST_REFUSED,
    NODE_STATES,
    Histogram,
    Metrics,
    MetricsPage,
    NodeSample,
)
from tests.watch.metric_source import a_source

P = "llama_gateway_"


def finished(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "x_request_id": "r1", "path": "/v1/chat/completions", "model": "mistral-7b",
        "priority": Priority.NORMAL, "caller": "team", "status": 200, "reason": None,
        "stream": True, "node": "a", "tier": "cpu", "attempts": 1, "queue_seconds": 0.0,
        "ttft": 0.4, "duration_seconds": 2.0, "overhead_seconds": 0.0003,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


class Scraped:
    """A page as Prometheus parses it."""

    def __init__(self, page: bytes) -> None:
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(page.decode()):
            assert family.name not in self.families, "a family may be there once"
            self.families[family.name] = family
        self.values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, /, **wanted: str) -> float | None:
        return self.values.get((P + name, tuple(sorted(wanted.items()))))

    def count(self, name: str) -> int:
        return sum(1 for sample, _ in self.values if sample == P + name)


class Gateway:
    """A bus, its metrics, and the nodes and the state of a scrape."""

    def __init__(self, source: MetricsSource | None = None) -> None:
        self.bus = EventBus()
        self.samples: Sequence[NodeSample] = ()
        self.metrics = Metrics(
            self.bus,
            lambda: self.samples,
            (source or a_source()).add_to,
            lambda key: f'Team "{key}"\n' if key.startswith("k") else None,
        )

    def publish(self, *events: object) -> None:
        for event in events:
            self.bus.publish(event)

    def nodes(self, *names: str) -> None:
        self.samples = [NodeSample(name, "ready", 2, 0) for name in names]

    def scrape(self) -> Scraped:
        return Scraped(b"".join(self.metrics.steps()))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_names_units_and_help_are_as_promtool_wants_them(gateway: Gateway) -> None:
    gateway.samples = [NodeSample("a", "ready", 2, 1, 1.0, 1.0)]
    gateway.publish(finished(), AttemptEnded("r1", "a", "ok", 1.0))
    for family in gateway.scrape().families.values():
        assert family.documentation, f"{family.name} has no help"
        assert not any(unit in family.name for unit in ("milliseconds", "minutes", "_ms", "_kb"))
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")
            elif sample.name != P + "node_slots_total":  # a gauge that the contract names so
                assert not sample.name.endswith("_total")
            assert all(len(label) > 1 for label in sample.labels)


def test_tokens_and_cost_add_up(gateway: Gateway) -> None:
    once = finished(prompt_tokens=100, cached_tokens=60, completion_tokens=7, cost=0.25)
    gateway.publish(once, once, finished(tier="gpu", cost=1.5), finished(tier=None, status=429))
    page = gateway.scrape()
    assert page.value("tokens_total", model="mistral-7b", kind="prompt") == 200
    assert page.value("tokens_total", model="mistral-7b", kind="cached") == 120
    assert page.value("tokens_total", model="mistral-7b", kind="completion") == 14
    gateway.publish(once)
    page = gateway.scrape()
    assert page.value("cost_total", tier="cpu") == 0.75
    assert page.value("cost_total", tier="gpu") == 1.5
    assert page.count("cost_total") == 2


def test_a_node_is_in_one_state_and_every_other_reads_zero(gateway: Gateway) -> None:
    gateway.samples = [NodeSample("a", "ready", 2, 1, 16.5, 250.0), NodeSample("b", "down", 4, 0)]
    page = gateway.scrape()
    for state in NODE_STATES:
        assert page.value("node_state", node="a", state=state) == int(state == "ready")
        assert page.value("node_state", node="b", state=state) == int(state == "down")
    assert page.value("node_slots_total", node="b") == 4
    assert page.value("node_slots_busy", node="a") == 1
    assert page.value("node_decode_tokens_per_second", node="a") == 16.5
    assert page.value("node_prefill_tokens_per_second", node="a") == 250.0
    assert page.value("node_decode_tokens_per_second", node="b") is None


def test_depth_and_age_of_the_queue_have_every_class() -> None:
    page = Gateway(a_source({Priority.BATCH: 3}, {Priority.BATCH: 61.5})).scrape()
    assert page.value("queue_oldest_seconds", **{"class": "batch"}) == 61.5
    assert page.value("queue_oldest_seconds", **{"class": "urgent"}) == 0
    assert page.count("queue_oldest_seconds") == 4
    assert page.value("queue_depth", **{"class": "batch"}) == 3
    assert page.value("queue_depth", **{"class": "urgent"}) == 0
    assert page.count("queue_depth") == 4
    assert page.value("in_flight") == 5
    assert page.value("inventory_error") == 1
    assert page.value("retry_budget") == 9


def test_refusals_are_told_by_caller_within_a_bound(gateway: Gateway) -> None:
    for number in range(MOST_REFUSED + 5):
        gateway.publish(finished(caller=f"key-{number}", status=429, reason="queue_full"))
    gateway.publish(finished(caller="key-0", status=429, reason="queue_full"), finished(status=503))
    page = gateway.scrape()
    refused = "refused_requests_total"
    assert page.value(refused, caller="key-0", reason="queue_full") == 2
    assert page.value(refused, caller="other", reason="queue_full") == 5
    assert page.count(refused) == MOST_REFUSED + 1


def test_names_of_keys_are_told_beside_their_ids_within_a_bound(gateway: Gateway) -> None:
    gateway.publish(finished(caller="anonymous:10.0.0.1"), finished(caller="unknown"))
    for number in range(MOST_KEYS + 5):
        gateway.publish(finished(caller=f"k{number}"))
    page = gateway.scrape()
    assert page.value("key_info", key="k7", name='Team "k7"\n') == 1
    assert page.count("key_info") == MOST_KEYS - 1  # the caller that was not identified
    assert "key_info" not in b"".join(gateway.metrics.steps(key_names=False)).decode()
    labels = {"of": "key", "id": "k1", "limit": "budget", "period": "month", "state": "near"}
    assert page.value("quota_used_ratio", **labels) == 0.83


def test_events_between_the_steps_of_a_page_leave_it_readable(gateway: Gateway) -> None:
    gateway.nodes(*(f"node-{n}" for n in range(400)))
    gateway.publish(finished(), AttemptEnded("r", "node-1", "ok", 1.0))
    text = bytearray()
    steps = 0
    for step in gateway.metrics.steps():
        text += step
        steps += 1
        gateway.publish(finished(model=f"m{steps}", tier=f"t{steps}"))
        gateway.publish(AttemptEnded("r", f"node-{steps}", f"o{steps}", 1.0))
        gateway.publish(NodeChanged(f"node-{steps}", "ready", None, "removed"))
    assert steps > 5
    page = Scraped(bytes(text))
    assert page.value("node_slots_total", node="node-399") == 2
    count = page.value("request_duration_seconds_count")
    assert page.value("request_duration_seconds_bucket", le="+Inf") == count


def test_models_beyond_the_cap_are_counted_as_other(gateway: Gateway) -> None:
    gateway.publish(*(finished(model=f"m{n}", prompt_tokens=1) for n in range(MOST_MODELS + 50)))
    page = gateway.scrape()
    assert page.count("requests_total") == MOST_MODELS + 1
    assert page.count("tokens_total") == 3 * (MOST_MODELS + 1)
    assert page.value("requests_total", **{"class": "normal"}, model="other", code="200") == 50
    assert page.value("tokens_total", model="other", kind="prompt") == 50
    assert len(gateway.metrics._requests) == MOST_MODELS + 1


# Times of requests by their labels.


def test_times_are_told_by_model_class_tier_and_outcome() -> None:
    gateway = Gateway()
    gateway.publish(
        finished(duration_seconds=2.0, queue_seconds=3.0),
        finished(duration_seconds=5000.0, ttft=None, tier="gpu", priority=Priority.URGENT,
                 status=502),
        finished(duration_seconds=0.1, ttft=None, tier=None, attempts=0, overhead_seconds=None,
                 status=429),
    )  # fmt: skip
    page = gateway.scrape()
    normal = {"model": "mistral-7b", "class": "normal", "tier": "cpu"}
    urgent = {**normal, "class": "urgent", "tier": "gpu"}
    assert page.value("response_seconds_sum", **normal, outcome="ok") == 2.0
    assert page.value("response_seconds_count", **urgent, outcome="failed") == 1
    refused = {**normal, "tier": "none", "outcome": "rejected"}
    assert page.value("response_seconds_count", **refused) == 1
    assert page.value("first_token_seconds_sum", **normal) == 0.4
    assert page.value("first_token_seconds_count", **urgent) is None
    assert page.value("slot_wait_seconds_sum", **normal) == 3.0
    assert page.value("slot_wait_seconds_count", **urgent) == 1, "it has not waited"
    assert page.value("slot_wait_seconds_count", **{**normal, "tier": "none"}) is None
    assert page.value("request_duration_seconds_bucket", le="3600.0") == 2
    assert page.value("request_duration_seconds_bucket", le="+Inf") == 3
    assert page.value("time_to_first_token_seconds_count") == 1
    assert page.value("overhead_seconds_count") == page.value("queue_seconds_count") == 2


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

    def value(name: str, **named: str) -> float | None:
        return values.get((f"gen_ai_{name}", tuple(sorted({**chat, **named}.items()))))

    assert value("server_request_duration_seconds_sum", error_type="") == 2.5
    assert value("server_time_to_first_token_seconds_sum") == 0.5
    assert value("server_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value("client_token_usage_sum", gen_ai_token_type="input") == 40
    assert value("client_token_usage_sum", gen_ai_token_type="output") == 11
    failed = {"gen_ai_operation_name": "embeddings", "error_type": "503"}
    assert value("server_request_duration_seconds_count", **failed) == 1
    durations = [key for key in values if key[0] == "gen_ai_server_request_duration_seconds_count"]
    assert len(durations) == 2, "what generates nothing is left out"


# The text.


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=50))
def test_a_histograms_buckets_hold_values_up_to_their_bound(values: list[float]) -> None:
    histogram = Histogram([0.1, 1, 10])
    for value in values:
        histogram.observe(value)
    page = MetricsPage("")
    page.histograms("h", [({}, histogram)], help_text="meaning")
    (family,) = text_string_to_metric_families("".join(page.steps()))
    read = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for bound in (0.1, 1.0, 10.0, math.inf):
        name = "+Inf" if bound == math.inf else repr(bound)
        assert read[name] == sum(value <= bound for value in values)
    assert read["h_count"] == len(values)
    assert read["h_sum"] == pytest.approx(sum(values))


def an_instance(model: str, state: str, router: str = "r1") -> NodeSample:
    return NodeSample(f"{router}/{model}", state, 2, 1, 9.0, router=router, model=model)


def test_a_router_counts_once_and_its_models_by_their_state(gateway: Gateway) -> None:
    gateway.samples = [
        NodeSample("r1", "ready", 2, 1, left_alone=0),
        an_instance("m", "ready"),
        an_instance("cut", "failed"),
        NodeSample("a", "ready", 4, 1),
    ]
    page = gateway.scrape()
    assert page.count("node_slots_total") == page.count("node_slots_busy") == 2
    assert page.count("node_state") == 2 * len(NODE_STATES)
    assert page.value("model_instances", model="m", node="r1", state="ready") == 1
    assert page.value("model_instances", model="cut", node="r1", state="failed") == 1
    assert page.count("model_instances") == 2
    assert page.value("node_decode_tokens_per_second", node="r1/m") == 9.0
    assert page.value("router_left_alone", node="r1") == 0
    assert page.count("router_left_alone") == 1


def changed(change: str, seconds: float | None = None, cause: str = "") -> ModelLoadChanged:
    return ModelLoadChanged("r1", "m", change, seconds, "why", by_others=False, cause=cause)


def test_loads_and_unloads_are_counted_until_their_node_is_removed(gateway: Gateway) -> None:
    gateway.nodes("r1", "a")
    gateway.publish(
        *(changed("loading"), changed("loaded", 12.0), changed("failed")),
        changed("loaded"),  # as it was found
        *(changed("unloaded", cause=cause) for cause in UNLOAD_CAUSES),
    )
    page = gateway.scrape()
    assert page.value("model_loads_total", node="r1", model="m", result="ok") == 1
    assert page.value("model_loads_total", node="r1", model="m", result="failed") == 1
    assert page.value("model_load_seconds_sum", model="m") == 12.0
    assert page.count("model_unloads_total") == len(UNLOAD_CAUSES)
    assert page.value("model_unloads_total", node="r1", model="m", reason="memory") == 1
    gateway.publish(AttemptEnded("r", "a", "ok", 1.0), AttemptEnded("r", "r1", "reset", 1.0))
    gateway.nodes("a")
    gateway.publish(NodeChanged("r1", "ready", None, "removed from the inventory"))
    gateway.publish(AttemptEnded("r", "r1", "ok", 1.0))  # it ends after its node has left
    page = gateway.scrape()
    assert page.count("model_loads_total") == 0
    assert page.value("attempts_total", node="a", outcome="ok") == 1
    assert not [key for key in page.values if ("node", "r1") in key[1]]


def test_models_of_routers_are_bounded_series(gateway: Gateway) -> None:
    most = MOST_INSTANCES + 50
    gateway.samples = [an_instance(f"m{number}", "unloaded") for number in range(most)]
    for number in range(most):
        gateway.publish(ModelLoadChanged("r1", f"m{number}", "loaded", 1.0, "", by_others=False))
    page = gateway.scrape()
    assert page.count("model_instances") == MOST_INSTANCES + 1
    assert page.value("model_instances", model="other", node="other", state="unloaded") == 50
    assert page.count("model_load_seconds_count") == MOST_LABEL_SETS + 1


PAGE = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1200
# HELP llamacpp:predicted_tokens_seconds Average generation throughput in tokens/s.
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds 17.25
"""


def shown(**pages: bytes) -> list[tuple[str, dict[str, str], float]]:
    """The samples of a page, as Prometheus parses it, of nodes with these texts."""
    read = {name: families for name, text in pages.items() if (families := read_node_metrics(text))}
    page = MetricsPage("")
    add_node_metrics(page, read)
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families("".join(page.steps()))
        for sample in family.samples
    ]


def test_each_sample_gets_the_name_of_its_node_and_each_family_is_there_once() -> None:
    assert shown(a=PAGE, b=PAGE.replace(b"1200", b"7")) == [
        ("llamacpp:prompt_tokens_total", {"node": "a"}, 1200.0),
        ("llamacpp:prompt_tokens_total", {"node": "b"}, 7.0),
        ("llamacpp:predicted_tokens_seconds", {"node": "a"}, 17.25),
        ("llamacpp:predicted_tokens_seconds", {"node": "b"}, 17.25),
    ]


def test_only_llama_cpps_own_families_pass_and_without_labels_of_their_own() -> None:
    text = b'python_info{secret="x"} 1\nllamacpp:kv{prompt="secret",node="b"} 2\nup 0\n'
    assert shown(a=text) == [("llamacpp:kv", {"node": "a"}, 2.0)]


def test_a_node_cannot_add_lines_or_endless_samples() -> None:
    text = b"".join(b"llamacpp:n%d 1\n" % number for number in range(5 * MOST_SAMPLES))
    assert len(shown(a=text)) == MOST_SAMPLES
    hostile = b"# HELP llamacpp:x a\\n# TYPE y\xff \x1b[31m red\nllamacpp:x 1 # {a=\nllamacpp:x 2\n"
    assert shown(a=hostile) == [("llamacpp:x", {"node": "a"}, 2.0)]


@given(st.binary(max_size=400), st.binary(max_size=40))
def test_whatever_a_node_says_the_page_stays_readable(noise: bytes, name: bytes) -> None:
    text = b"llamacpp:" + name + b" 1\n" + noise + b"\nllamacpp:kept 3\n" + noise
    assert ("llamacpp:kept", {"node": "a"}, 3.0) in shown(a=text) or b"llamacpp:kept" in noise
