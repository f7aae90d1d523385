from __future__ import annotations

from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case


def test_spill_over_is_for_normal_alone_unless_batch_is_named(load_gateway: LoadSettings) -> None:
    spill = load_gateway("hybrid: {spill: {share: 0.1}}").hybrid.spill
    assert spill is not None
    assert (spill.classes, spill.after, spill.window) == (("normal",), 10.0, 3600.0)
    named = load_gateway(
        "hybrid: {spill: {money_per_hour: 2, classes: [normal, batch], window: 30m}}"
    ).hybrid.spill
    assert named is not None
    assert (named.classes, named.money_per_hour, named.window) == (("normal", "batch"), 2.0, 1800.0)


def test_one_class_stands_without_a_list(load_gateway: LoadSettings) -> None:
    assert load_gateway("hybrid: {gpu_first: urgent}").hybrid.gpu_first == ("urgent",)
    assert load_gateway("hybrid: {gpu_first: []}").hybrid.gpu_first == ()


@each_case(
    ("text", "key", "message"),
    [
        ("hybrid: {spill: {}}", "hybrid.spill.share", "the spill-over has no budget"),
        ("hybrid: {spill: {after: 5s}}", "hybrid.spill.share", "the spill-over has no budget"),
        ("hybrid: {spill: {share: 1, window: 0}}", "hybrid.spill.window", "must be greater than 0"),
        (
            "hybrid: {spill: {share: 1, classes: [premium]}}",
            "hybrid.spill",
            "premium can't spill over, since it goes to the GPU first",
        ),
        ("hybrid: {wait: soon}", "hybrid.wait", "must be a duration"),
        ("hybrid: {gpu: all}", "hybrid.gpu", "unknown key"),
    ],
)
def test_a_wrong_rule_is_reported_with_its_key(
    gateway_problems: Problems, text: str, key: str, message: str
) -> None:
    (problem,) = gateway_problems(text)
    assert (problem.line, problem.key, problem.message) == (1, key, message)
