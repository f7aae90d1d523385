from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.scheduling.decision_log import RATIO_BOUNDS, Grant, RatioCounts
from gateway.web.admin.status import MetricsSource
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway


def test_a_ratio_counts_in_the_bucket_of_the_first_bound_that_holds_it() -> None:
    ratios = RatioCounts()
    for ratio in (0.05, 1.0, 1.05, 99.0):
        ratios.count(ratio)
    counted = dict(zip([*RATIO_BOUNDS, "more"], ratios.counts, strict=True))
    assert {bound: n for bound, n in counted.items() if n} == {0.1: 1, 1.0: 1, 1.1: 1, "more": 1}
    assert ratios.sum == pytest.approx(101.1)


@in_virtual_time
async def test_a_steady_node_is_predicted_well_once_its_speed_is_known() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20) as node,
        bare_gateway(a_spec("a", node.url), serving=True) as gateway,
    ):
        prompt = "tell me of the sea " * 60
        for number in range(12):
            answer = await gateway.chat(f"{number} {prompt}", max_tokens=40)
            assert answer.status_code == 200
        gateway.bus.flush()
        before = gateway.scheduler.accuracy
        first_tokens, completions = sum(before.first_token.counts), before.completion.sum
        for number in range(12, 18):
            await gateway.chat(f"{number} {prompt}", max_tokens=40)
        gateway.bus.flush()
        after = gateway.scheduler.accuracy
        assert sum(after.first_token.counts) == first_tokens + 6
        late = (after.completion.sum - completions) / 6
        assert 0.5 < late < 1.5, "the speed is known by now"


@in_virtual_time
async def test_what_was_cut_short_is_no_sample() -> None:
    async with (
        EmulatedNode(slots=1) as node,
        bare_gateway(a_spec("a", node.url), serving=True) as gateway,
    ):
        node.faults.set("status", status=500)
        assert (await gateway.chat()).status_code >= 500
        gateway.bus.flush()
        accuracy = gateway.scheduler.accuracy
        assert not sum(accuracy.completion.counts + accuracy.first_token.counts)


@in_virtual_time
async def test_the_page_of_metrics_has_them() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20) as node,
        bare_gateway(a_spec("a", node.url), serving=True) as gateway,
    ):
        await gateway.chat("hello " * 100, max_tokens=10)
        gateway.bus.flush()
        source = MetricsSource(
            gateway.fleet, gateway.scheduler, gateway.registry, lambda: None, lambda: 1
        )
        assert sum(source().predictions["completion"].counts) == 1
        page = (await gateway.admin.get("/metrics")).text
        assert 'llama_gateway_prediction_ratio_count{of="completion"} 1' in page


@in_virtual_time
async def test_the_page_counts_the_cached_tokens_that_were_expected_and_those_found() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20, cache_ram=1 << 20) as node,
        bare_gateway(a_spec("a", node.url), serving=True) as gateway,
    ):
        prompt = "".join(f"word {number} " for number in range(400))
        first = await gateway.chat(prompt, max_tokens=10)
        nothing = await figures(gateway)
        again = await gateway.chat(prompt, max_tokens=10)
        page = await figures(gateway)
    assert (first.status_code, again.status_code) == (200, 200)
    cached = gateway.ended[-1].cached_tokens
    assert cached > 50, "else the node had nothing cached"
    family = "llama_gateway_predicted_cached_tokens_total"
    assert nothing[family, "expected"] == nothing[family, "found"] == 0
    assert page[family, "found"] == cached
    assert page[family, "expected"] == pytest.approx(cached, rel=0.1)


@in_virtual_time
async def test_the_page_has_the_time_to_the_first_token_by_the_expected_one() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20) as node,
        bare_gateway(a_spec("a", node.url), serving=True) as gateway,
    ):
        for number in range(4):
            await gateway.chat(f"{number} " + "hello " * 100, max_tokens=10)
        before = await figures(gateway)
        await gateway.chat("5 " + "hello " * 100, max_tokens=10)
        after = await figures(gateway)
        id_ = gateway.ended[-1].request_id
        (remembered,) = gateway.scheduler.decision_log.find([id_]).values()
        (grant,) = [one for one in remembered.decisions if isinstance(one, Grant)]
    family = "llama_gateway_prediction_ratio"
    assert after[f"{family}_count", "first_token"] == before[f"{family}_count", "first_token"] + 1
    ratio = after[f"{family}_sum", "first_token"] - before[f"{family}_sum", "first_token"]
    assert grant.first_content_at is not None
    assert ratio == pytest.approx((grant.first_content_at - grant.at) / grant.expected_ttft)
    assert 0.5 < ratio < 2.0, "the node's speed is known by now"


async def figures(gateway: BareGateway) -> dict[tuple[str, str], float]:
    """The values of /metrics that tell of predictions, by name and `of`."""
    gateway.bus.flush()
    page = (await gateway.admin.get("/metrics")).text
    return {
        (sample.name, sample.labels["of"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "of" in sample.labels and not sample.name.endswith("_bucket")
    }
