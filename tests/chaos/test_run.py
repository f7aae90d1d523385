"""A short, seeded piece of chaos, and chaos over a network that loses packets or is partitioned.

The long one is `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.chaos.gateway_worker import GatewayProcess
from tests.chaos.nodes import EmulatorProcess
from tests.chaos.run import CHECKS, EMULATORS, PROBES, ChaosTestbed, run_seed, running_testbed

SEEDS = (14, 18)
"""Seeds with many kinds of faults in a short time, kills of the real server and of emulated nodes
among them; the second run shows leaks of the first."""
SECONDS = 1.5
SECONDS_OF_LOSS = 6.0


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_whatever_happens_each_request_has_one_honest_end_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    async with running_testbed(prompts=3) as testbed:
        for seed in SEEDS:
            report = await run_seed(
                testbed, seed, SECONDS, process_faults=False, keep=tmp_path, min_whole=21
            )
            assert report.violations == []
            assert report.outcomes["whole"] > 20
            assert report.faults.total() > 10


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


class Namespace:
    """A network namespace behind a veth pair; `host` is its address."""

    def __init__(self, number: int) -> None:
        self.name = f"chaos{number}"
        # Of the block for benchmarks of networks (RFC 2544), which nothing else uses.
        block, first = f"198.18.{number >> 6 & 0xFF}", (number & 0x3F) << 2
        self.gate, self.host = (f"{block}.{first | last}" for last in (1, 2))

    def make(self) -> None:
        near, far = f"{self.name}a", f"{self.name}b"
        for command in (
            f"ip netns add {self.name}",
            f"ip link add {near} type veth peer name {far} netns {self.name}",
            f"ip addr add {self.gate}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {self.name} addr add {self.host}/30 dev {far}",
            f"ip -n {self.name} link set {far} up",
            f"ip -n {self.name} link set lo up",
        ):
            run(command)

    def lose(self, percent: int) -> None:
        """Drop `percent` of the packets in both directions; 100 is a partition, 0 ends the loss."""
        chance = f"numgen random mod 100 < {percent}" if percent < 100 else ""
        rules = "add table inet chaos; flush table inet chaos"
        for hook in ("input", "output"):
            rules += f"; add chain inet chaos {hook} {{ type filter hook {hook} priority 0; }}"
            rules += f"; add rule inet chaos {hook} {chance} drop" if percent else ""
        run(f"ip netns exec {self.name} nft {rules}")


@pytest.fixture
def network() -> Iterator[Namespace]:
    network = Namespace(os.getpid())
    network.make()
    try:
        yield network
    finally:
        run(f"ip link del {network.name}a")
        run(f"ip netns del {network.name}")


async def vary_packet_loss(network: Namespace, rng: random.Random) -> None:
    """Change the packet loss at random, partitions included; no loss at the end."""
    until = time.monotonic() + SECONDS_OF_LOSS
    try:
        while time.monotonic() < until:
            network.lose(rng.choice((0, 2, 10, 30, 100)))
            await asyncio.sleep(rng.uniform(0.2, 1.5))
    finally:
        network.lose(0)


@pytest.mark.net
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"),
    reason="needs root, ip (iproute2) and nft (nftables)",
)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_packet_loss_and_partitions_violate_no_invariant(
    tmp_path: Path, network: Namespace, seed: int
) -> None:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayProcess())
        prefix = ("ip", "netns", "exec", network.name)
        nodes = [EmulatorProcess(f"words-{n}", network.host, prefix) for n in range(EMULATORS)]
        for node in nodes:
            await stack.enter_async_context(node)
        testbed = ChaosTestbed(gateway, nodes)
        async with asyncio.TaskGroup() as group:
            group.create_task(vary_packet_loss(network, random.Random(seed)))
            report = await run_seed(
                testbed, seed, SECONDS_OF_LOSS, process_faults=True, keep=tmp_path
            )
        assert report.violations == []
        # More than are sent after the recovery; how many depends on the machine.
        assert report.outcomes["whole"] > PROBES + CHECKS
