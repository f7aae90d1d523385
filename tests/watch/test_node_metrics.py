from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.status import MOST_SAMPLES, add_node_metrics, read_node_metrics
from gateway.watch.metrics import MetricsPage

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
