from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.observe.metrics import Histogram, MetricsPage, labels


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=50))
def test_a_histograms_buckets_hold_values_up_to_their_bound(values: list[float]) -> None:
    histogram = Histogram([0.1, 1, 10])
    for value in values:
        histogram.observe(value)
    page = MetricsPage("")
    page.add_histogram("h", "meaning", [({}, histogram)])
    (family,) = text_string_to_metric_families(page.render())
    read = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for bound in (0.1, 1.0, 10.0, math.inf):
        name = "+Inf" if bound == math.inf else repr(bound)
        assert read[name] == sum(value <= bound for value in values)
    assert read["h_count"] == len(values)
    assert read["h_sum"] == pytest.approx(sum(values))


def test_values_that_are_not_finite_are_written_as_prometheus_reads_them() -> None:
    def written(values: Iterable[float]) -> list[float]:
        page = MetricsPage("")
        page.add_family("g", "gauge", "m", [(labels(n=str(n)), v) for n, v in enumerate(values)])
        (family,) = text_string_to_metric_families(page.render())
        return [sample.value for sample in family.samples]

    assert written([math.inf, -math.inf, 1e-7, 3]) == [math.inf, -math.inf, 1e-7, 3]
    assert math.isnan(written([math.nan])[0])
