"""What a decision about models costs: `python -m tests.bench.model_placement_cost`.

1,000 routers with memory for two to six models each, 50 models, of which 40 are loaded, all waited
for at once; then one model at a time. CPU milliseconds of a call of `decide`.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from gateway.nodes.router import LoadPhase
from gateway.schedule.core.model_placement import (
    Instance,
    InstanceUsage,
    LoadAction,
    ModelDemand,
    ModelPlacementPolicy,
    RouterNode,
)

GIB = 1 << 30
ROUTERS, MODELS, LOADED = 1000, [f"m{number}" for number in range(50)], 40
PHASES = {
    "load": LoadPhase.LOADING,
    "retire": LoadPhase.RETIRING,
    "keep": LoadPhase.READY,
    "unload": LoadPhase.UNLOADING,
}
ENDED = {LoadPhase.LOADING: LoadPhase.READY, LoadPhase.UNLOADING: LoadPhase.UNLOADED}


class LargeFleet:
    """A policy that knows a large fleet, half of whose loaded models work."""

    def __init__(self, rng: random.Random) -> None:
        self.policy, self.rng, self.now = ModelPlacementPolicy(), rng, 1000.0
        self.instances: dict[tuple[str, str], Instance] = {}
        self.changing: set[tuple[str, str]] = set()
        for number in range(ROUTERS):
            name, free = f"r{number}", rng.choice((24, 48, 96)) * GIB
            self.policy.fleet.put_node(RouterNode(name, name, free))
            for place in rng.sample(range(len(MODELS)), len(MODELS)):
                memory = (2 + place * 28 // len(MODELS)) * GIB
                loaded = memory <= free and place < LOADED and rng.random() < 0.9
                free -= memory * loaded
                phase = LoadPhase.READY if loaded else LoadPhase.UNLOADED
                self.put(Instance(name, MODELS[place], phase, memory, memory / GIB, 2, since=0.0))
        for place in range(20_000):
            self.policy.rates.note(rng.choice(MODELS), self.now - 900 + place * 0.045)

    def put(self, instance: Instance) -> None:
        self.instances[instance.key] = instance
        self.policy.fleet.put(instance)

    def look(self, models: list[str]) -> float:
        """Decide, carry it out, and return the milliseconds that the decision took."""
        rng = self.rng
        self.now += 0.5
        demands = [
            ModelDemand(one, rng.randrange(1, 30), rng.uniform(0, 200), 30.0) for one in models
        ]
        began = time.process_time()
        actions = self.policy.decide(demands, self._usage, self.now)
        took = time.process_time() - began
        self.follow(actions)
        return took * 1000

    def follow(self, actions: list[LoadAction]) -> None:
        """Begin what was decided, and end what began ten seconds ago."""
        for key in list(self.changing):
            one = self.instances[key]
            if self.now - one.since >= 10.0 and one.phase in ENDED:
                self.changing.discard(key)
                self.put(replace(one, phase=ENDED[one.phase], since=self.now))
        for action in actions:
            one = self.instances[action.node, action.model]
            self.changing.add(one.key)
            self.put(replace(one, phase=PHASES[action.verb], since=self.now))

    def _usage(self, instance: Instance) -> InstanceUsage:
        leases = self.rng.randrange(2)
        return InstanceUsage(leases, 5.0 * leases, self.now - 10.0)


def main() -> None:
    began = time.process_time()
    fleet = LargeFleet(random.Random(1))
    told = time.process_time() - began
    print(f"told of {len(fleet.instances):,} instances in {told:.2f} s")
    for name, waiting in (("all models wait", len(MODELS)), ("one model waits", 1)):
        before = fleet.policy.evaluations
        took = sorted(fleet.look(fleet.rng.sample(MODELS, waiting)) for _ in range(400))
        compared = (fleet.policy.evaluations - before) / len(took)
        print(
            f"{name}: p50 {took[200]:.2f} ms, p99 {took[396]:.2f} ms, most {took[-1]:.2f} ms, "
            f"{compared:.0f} nodes compared a look"
        )


if __name__ == "__main__":
    main()
