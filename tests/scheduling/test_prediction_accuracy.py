from __future__ import annotations

import pytest

from gateway.scheduling.prediction_accuracy import RATIO_BOUNDS, RatioCounts
from gateway.web.admin.status import MetricsSource
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway


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
