"""Chaos runs over a network that loses packets or is partitioned: needs root, ip and nft."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.gateway_worker import GatewayProcess
from tests.chaos.nodes import EmulatorProcess
from tests.chaos.run import CHECKS, EMULATORS, PROBES, ChaosTestbed, run_seed

pytestmark = [
    pytest.mark.net,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"),
        reason="needs root, ip (iproute2) and nft (nftables)",
    ),
]
SECONDS = 6.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Namespace:
    """A network namespace behind a veth pair; `host` is its address."""

    def __init__(self, number: int) -> None:
        self.name = f"chaos{number}"
        # Of the block for benchmarks of networks (RFC 2544), which nothing else uses.
        block = f"198.18.{number >> 6 & 0xFF}"
        self._gate = f"{block}.{(number & 0x3F) << 2 | 1}"
        self.host = f"{block}.{(number & 0x3F) << 2 | 2}"

    def make(self) -> None:
        near, far = f"{self.name}a", f"{self.name}b"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        run("ip", "addr", "add", f"{self._gate}/30", "dev", near)
        run("ip", "link", "set", near, "up")
        run("ip", "-n", self.name, "addr", "add", f"{self.host}/30", "dev", far)
        run("ip", "-n", self.name, "link", "set", far, "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        self._nft("add", "table", "inet", "chaos")
        for hook in ("input", "output"):
            chain = f"{{ type filter hook {hook} priority 0; }}"
            self._nft("add", "chain", "inet", "chaos", hook, chain)

    def lose(self, percent: int) -> None:
        """Drop `percent` of the packets in both directions; 100 is a partition, 0 ends the loss."""
        self._nft("flush", "table", "inet", "chaos")
        chance = ("numgen", "random", "mod", "100", "<", str(percent)) if percent < 100 else ()
        for hook in ("input", "output") if percent else ():
            self._nft("add", "rule", "inet", "chaos", hook, *chance, "drop")

    def remove(self) -> None:
        run("ip", "link", "del", f"{self.name}a")
        run("ip", "netns", "del", self.name)

    def _nft(self, *words: str) -> None:
        run("ip", "netns", "exec", self.name, "nft", *words)


@pytest.fixture
def network() -> Iterator[Namespace]:
    network = Namespace(os.getpid())
    network.make()
    try:
        yield network
    finally:
        network.remove()


@asynccontextmanager
async def distant_testbed(network: Namespace) -> AsyncIterator[ChaosTestbed]:
    """A testbed whose nodes all run in the namespace."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayProcess())
        prefix = ("ip", "netns", "exec", network.name)
        nodes = [EmulatorProcess(f"words-{n}", network.host, prefix) for n in range(EMULATORS)]
        for node in nodes:
            await stack.enter_async_context(node)
        yield ChaosTestbed(gateway, nodes)


async def vary_packet_loss(network: Namespace, rng: random.Random, seconds: float) -> None:
    """Change the packet loss at random, partitions included; no loss at the end."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            network.lose(rng.choice((0, 2, 10, 30, 100)))
            await asyncio.sleep(rng.uniform(0.2, 1.5))
    finally:
        network.lose(0)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_packet_loss_and_partitions_violate_no_invariant(
    tmp_path: Path, network: Namespace, seed: int
) -> None:
    async with distant_testbed(network) as testbed, asyncio.TaskGroup() as group:
        group.create_task(vary_packet_loss(network, random.Random(seed), SECONDS))
        report = await run_seed(testbed, seed, SECONDS, process_faults=True, keep=tmp_path)
        assert report.violations == []
        # More than are sent after the recovery; how many depends on the machine.
        assert report.outcomes["whole"] > PROBES + CHECKS
