from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from gateway.tools.tune.measurements import (
    Figures,
    Measurement,
    MeasurementLog,
    ScoreHistory,
    combine_servers,
    median_figures,
)
from gateway.tools.tune.setting import Setting
from tests.tools.tune.fake_machine import SUBJECT


class TestRecords:
    ONE = Measurement(
        Setting(4, 512, 256, 2, "free"), Figures(1.0, 2.0, 3.0, None, None), None, 9.5, 1e9, 0.1
    )
    FAILED = Measurement(Setting(4, 512, 256, 8, "free"), None, "no memory", 1.0, 1e9)

    def test_measurements_are_read_back(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "new" / "t.jsonl", SUBJECT)
        assert records.read() == ([], 0)
        records.append(self.ONE)
        records.append(self.FAILED)
        assert records.read() == ([self.ONE, self.FAILED], 0)

    def test_other_models_and_machines_are_left_alone(self, tmp_path: Path) -> None:
        ours, other = (
            MeasurementLog(tmp_path / "t.jsonl", SUBJECT | {"model": name}) for name in ("a", "b")
        )
        ours.append(self.ONE)
        assert other.read() == ([], 0)
        other.append(self.FAILED)
        assert ours.read() == ([self.ONE], 0)

    def test_a_line_that_a_kill_cut_short_costs_itself_only(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "t.jsonl", SUBJECT)
        records.append(self.ONE)
        with records.path.open("a") as file:
            file.write('{"subject": {"mod')
        records.append(self.FAILED)
        assert records.read() == ([self.ONE, self.FAILED], 1)

    def test_a_new_log_keeps_the_old_one(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "t.jsonl", SUBJECT)
        records.rotate()
        records.append(self.ONE)
        records.rotate()
        assert records.read() == ([], 0)
        assert len((tmp_path / "t.jsonl.1").read_text().splitlines()) == 1


def test_figures_without_energy_do_not_hide_those_with_it() -> None:
    """Measurements of an earlier run, from before the counters could be read, have none."""
    old = Figures(1.0, 2.0, 3.0, None, None)
    new = [Figures(1.0, 2.0, 3.0, None, None, 0.2, joules) for joules in (4.0, 6.0)]
    assert median_figures([old, *new]).decode_joules == 5.0
    assert combine_servers(new).prefill_joules == pytest.approx(0.2)
    assert median_figures([old]).decode_joules is None


START = Setting(16, 512, 256, 2, "free")


class TestHistory:
    def test_noise_is_found_from_repeats(self) -> None:
        rng = random.Random(2)
        history = ScoreHistory()
        for slots in range(1, 41):
            setting = START.with_knob("slots", slots)
            for _ in range(3):
                history.add(setting, slots * math.exp(rng.gauss(0, 0.05)))
        assert history.noise() == pytest.approx(0.05, rel=0.15)

    def test_two_equal_repeats_do_not_mean_no_noise(self) -> None:
        history = ScoreHistory()
        for _ in range(2):
            history.add(START, 30.0)
        assert history.noise() > 0.01

    def test_one_outlier_does_not_move_a_setting(self) -> None:
        history = ScoreHistory()
        for score in (30.0, 90.0, 30.3):
            history.add(START, score)
        assert history.median_score(START) == 30.3

    def test_fewer_seconds_are_better(self) -> None:
        history, other = ScoreHistory(), START.with_knob("threads", 12)
        for _ in range(3):
            history.add(START, 30.0)
            history.add(other, 20.0)
        assert history.clearly_better(other, START)
        assert not history.clearly_better(START, other)
        assert history.gain(other, START) == pytest.approx(1 / 3)
