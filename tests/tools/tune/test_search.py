from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import astuple
from itertools import product

import pytest

from gateway.tools.tune.search import REPEATS, Search
from gateway.tools.tune.setting import BATCH_SIZES, MICRO_BATCH_SIZES, SearchSpace, Setting

SPACE = SearchSpace(
    threads=(8, 12, 15, 16),
    batch=BATCH_SIZES,
    micro_batch=MICRO_BATCH_SIZES,
    slots=(1, 2, 3, 4, 6, 8),
    pinning=("free", "cores"),
)
START = Setting(16, 512, 256, 2, "free")
MOST = 75
"""Measurements that a search may take; the full grid has 2,000 settings."""

Surface = Callable[[Setting], float]


def towards(best: Setting, steep: float = 0.15) -> Surface:
    """A surface that gets worse by a share with each step away from the best value of a knob."""

    def seconds(setting: Setting) -> float:
        away = (
            abs(SPACE.threads.index(setting.threads) - SPACE.threads.index(best.threads))
            + abs(math.log2(setting.batch / best.batch))
            + abs(math.log2(setting.micro_batch / best.micro_batch))
            + abs(SPACE.slots.index(setting.slots) - SPACE.slots.index(best.slots))
            + (setting.pinning != best.pinning)
        )
        return float(30 * (1 + steep) ** away)

    return seconds


def run(
    surface: Surface, *, noise: float = 0.0, seed: int = 1, space: SearchSpace = SPACE
) -> tuple[Search, int]:
    rng = random.Random(seed)
    search = Search(space, START)
    measured = 0
    for setting in search.settings_to_measure():
        measured += 1
        assert measured <= 10 * MOST, "it does not end"
        search.history.add(setting, surface(setting) * math.exp(rng.gauss(0, noise)))
    return search, measured


@pytest.mark.parametrize(
    "best",
    [
        START,
        Setting(12, 512, 256, 2, "free"),
        Setting(15, 1024, 512, 4, "cores"),
        Setting(8, 128, 64, 1, "free"),
        Setting(16, 2048, 1024, 8, "cores"),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_best_of_a_surface_is_found(best: Setting, noise: float) -> None:
    search, measured = run(towards(best), noise=noise)
    assert search.best == best
    assert measured <= MOST
    assert search.unsearched_knobs() == []


def test_noise_rarely_hides_the_best_or_makes_the_result_worse_than_the_start() -> None:
    best = Setting(12, 512, 512, 4, "free")
    surface = towards(best, steep=0.25)
    ends = [run(surface, noise=0.04, seed=seed) for seed in range(40)]
    assert sum(search.best == best for search, _ in ends) >= 34
    assert all(surface(search.best) < surface(START) for search, _ in ends)
    assert max(measured for _, measured in ends) <= MOST


def test_on_a_flat_surface_the_rule_of_thumb_stays() -> None:
    unchanged = sum(
        run(lambda _: 30.0, noise=0.03, seed=seed)[0].best == START for seed in range(60)
    )
    assert unchanged >= 54


def test_without_any_difference_nothing_is_changed_and_little_is_measured() -> None:
    search, measured = run(lambda _: 30.0)
    assert search.best == START
    rivals = sum(len(SPACE.values(knob)) - 1 for knob in SPACE.__slots__)
    again = len(SPACE.__slots__) - 1  # the first setting, before each further knob
    assert measured == REPEATS + rivals + again


def test_a_machine_that_gets_slower_does_not_hide_the_best() -> None:
    best = Setting(16, 512, 256, 4, "cores")
    surface, search, rng = towards(best, steep=0.4), Search(SPACE, START), random.Random(3)
    for number, setting in enumerate(search.settings_to_measure()):
        slower = 1 + 0.003 * number  # 10 % within the search
        search.history.add(setting, surface(setting) * slower * math.exp(rng.gauss(0, 0.01)))
    assert search.best == best


def test_knobs_that_depend_on_each_other_are_turned_again() -> None:
    def surface(setting: Setting) -> float:
        # Fewer threads are better, but only once there are many slots.
        right = 12 if setting.slots >= 4 else 16
        return 30 * (1 + 0.05 * abs(setting.threads - right)) / math.sqrt(setting.slots)

    search, measured = run(surface, noise=0.01)
    assert (search.best.threads, search.best.slots) == (12, 8)
    assert search.searched_knobs.count("threads") == 2
    assert measured <= 1.5 * MOST


def test_a_direction_that_gets_clearly_worse_is_left() -> None:
    search, _ = run(towards(Setting(16, 512, 256, 1, "free"), steep=1.0), noise=0.01)
    assert {setting.slots for setting in search.history.scores} == {1, 2, 3}


def test_a_setting_that_does_not_run_ends_its_direction_only() -> None:
    search = Search(SPACE, START)
    surface = towards(Setting(16, 512, 256, 8, "free"))
    for setting in search.settings_to_measure():
        search.history.add(setting, None if setting.slots > 3 else surface(setting))
    assert search.best.slots == 3
    assert {setting.slots for setting in search.history.failed} == {4}


def test_a_first_setting_that_does_not_run_ends_the_search() -> None:
    search = Search(SPACE, START)
    measured = []
    for setting in search.settings_to_measure():
        measured.append(setting)
        search.history.add(setting, None)
    assert measured == [START]


def test_a_stopped_search_knows_its_unsearched_knobs() -> None:
    search = Search(SPACE, START)
    for number, setting in enumerate(search.settings_to_measure()):
        if number == 4:
            break
        search.history.add(setting, 30.0)
    assert search.best == START
    assert search.unsearched_knobs() == ["threads", "micro_batch", "slots", "batch", "pinning"]


def test_the_same_scores_give_the_same_search() -> None:
    first, _ = run(towards(Setting(12, 256, 128, 4, "cores")), noise=0.03)
    second, _ = run(towards(Setting(12, 256, 128, 4, "cores")), noise=0.03)
    assert list(first.history.scores) == list(second.history.scores)


def test_no_setting_has_a_micro_batch_larger_than_its_batch() -> None:
    for best in (Setting(16, 128, 128, 2, "free"), Setting(16, 1024, 1024, 2, "free")):
        search, _ = run(towards(best))
        assert all(one.micro_batch <= one.batch for one in search.history.scores)
        assert search.best == best


def test_the_size_of_the_grid_counts_settings_that_are_possible() -> None:
    possible = [one for one in product(*astuple(SPACE)) if one[2] <= one[1]]
    assert SPACE.size == len(possible)
