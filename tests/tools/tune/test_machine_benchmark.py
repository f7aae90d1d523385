from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tools.local.energy import open_meter
from gateway.tools.local.plan import LocalFleetPlan, plan_local_fleet
from gateway.tools.local.topology import read_topology
from gateway.tools.tune.machine_benchmark import (
    MachineBenchmark,
    SettingFailedError,
    measurement_subject,
)
from gateway.tools.tune.measurements import BenchmarkRequest
from gateway.tools.tune.setting import Setting, rule_of_thumb
from tests.servers import server_path
from tests.tools.local.machine import make_machine
from tests.tools.local.powercap import PowercapTree

REQUEST = BenchmarkRequest(prompt=400, answer=24)


CONTEXT = 2048


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFleetPlan:
    monkeypatch.setenv("PATH", server_path())
    return plan_local_fleet(cache=tmp_path)


@pytest.mark.real
@pytest.mark.slow
async def test_servers_are_started_with_the_setting_measured_and_ended(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    machine = MachineBenchmark(plan, REQUEST, context=CONTEXT)
    # One thread: two of them wait for each other while other tests use the CPUs.
    start = rule_of_thumb(read_topology()).with_knob("threads", 1)
    two = await machine.measure(start, 200)
    assert two.figures.decode_joules is None
    tree = PowercapTree(tmp_path)
    tree.add("intel-rapl:0", "package-0", 0)
    with tree.drawing("intel-rapl:0", 50.0):
        meter = open_meter(tree.root)
        metered = MachineBenchmark(plan, REQUEST, context=CONTEXT, meter=meter)
        one = await metered.measure(start.with_knob("slots", 1), 200)
    # The demo model's tokens take less time than a step of the counter, so not more than this.
    assert one.figures.decode_joules is not None
    assert one.figures.prefill_joules is not None
    assert (meter.joules() or 0.0) > 0
    assert two.figures.stall is not None
    assert one.figures.stall is None
    for measured in (one, two):
        assert measured.figures.prefill > 0
        assert (measured.figures.memory or 0) > 3 << 20
        assert measured.other_work is not None


@pytest.mark.real
@pytest.mark.slow
async def test_the_servers_of_a_machine_are_measured_at_the_same_time(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    several = plan_local_fleet(servers=2, cache=tmp_path)
    start = rule_of_thumb(read_topology()).with_knob("threads", 1)
    alone = await MachineBenchmark(plan, REQUEST, context=CONTEXT).measure(start, 200)
    both = await MachineBenchmark(several, REQUEST, context=CONTEXT).measure(start, 200)
    assert alone.figures.memory is not None
    assert both.figures.memory is not None
    assert both.figures.memory > 1.5 * alone.figures.memory


@pytest.mark.real
async def test_a_setting_that_takes_too_long_is_given_up_and_its_server_ended(
    plan: LocalFleetPlan,
) -> None:
    machine = MachineBenchmark(plan, REQUEST, context=CONTEXT)
    with pytest.raises(TimeoutError):
        await machine.measure(rule_of_thumb(read_topology()), 0.2)


@pytest.mark.real
async def test_a_server_that_does_not_start_is_no_crash(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(plan.model.path.read_bytes()[:200_000])
    broken = LocalFleetPlan(
        plan.model,  # `up` and `tune` refuse what is cut short; this one breaks after they looked
        False,
        tuple(replace(spec, model=model) for spec in plan.specs),
        None,
        plan.log_folder,
    )
    machine = MachineBenchmark(broken, REQUEST, context=CONTEXT)
    with pytest.raises(SettingFailedError, match="before it was ready"):
        await machine.measure(rule_of_thumb(read_topology()), 60)


async def test_a_setting_with_too_much_memory_is_not_started(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    machine = read_topology(make_machine(tmp_path / "machine", [[[0], [1]]], memory_gib=16))
    start = Setting(1, 512, 256, 2, "free")
    measured = MachineBenchmark(
        plan, REQUEST, context=CONTEXT, known_memory=(start, 3 << 30), read_machine=lambda: machine
    )
    # 12 GiB are free: 3 GiB with two slots may become 12 with eight.
    with pytest.raises(
        SettingFailedError, match=r"may take 12\.0 GiB, and 2\.0 GiB must stay free"
    ):
        await measured.measure(start.with_knob("slots", 8), 60)
    assert not plan.log_folder.exists()


def test_figures_depend_on_model_server_machine_and_request(plan: LocalFleetPlan) -> None:
    topology = read_topology()
    about = measurement_subject(plan, topology, REQUEST, CONTEXT)
    assert about["model_bytes"] == plan.model.size
    assert "xllamacpp" in about["server"]
    assert about != measurement_subject(plan, topology, BenchmarkRequest(500, 24), CONTEXT)
