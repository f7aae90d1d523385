"""Chaos on a network that loses packets, and is cut in two: needs root, ip and nft."""

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

from tests.chaos.house import GatewayProcess
from tests.chaos.nodes import Emulator
from tests.chaos.run import CHECKS, EMULATORS, FEW, Kit, run_seed

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


class Network:
    """A network namespace, one cable away; `name` is its own, `host` its address."""

    def __init__(self, number: int) -> None:
        self.name = f"chaos{number}"
        # Of the block for trials of networks (RFC 2544), which nothing else uses.
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
        """Drop so many packets in both directions; 100 is a partition, 0 none."""
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
def network() -> Iterator[Network]:
    network = Network(os.getpid())
    network.make()
    try:
        yield network
    finally:
        network.remove()


@asynccontextmanager
async def a_far_kit(network: Network) -> AsyncIterator[Kit]:
    """All nodes at the other end of the cable."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayProcess())
        emulators = []
        for number in range(EMULATORS):
            within = ("ip", "netns", "exec", network.name)
            emulator = await Emulator.start(f"words-{number}", network.host, within)
            stack.callback(emulator.close)
            emulators.append(emulator)
        yield Kit(gateway, emulators, [], [])


async def weather(network: Network, rng: random.Random, seconds: float) -> None:
    """Loss and partitions, one after the other; fair at the end."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            network.lose(rng.choice((0, 2, 10, 30, 100)))
            await asyncio.sleep(rng.uniform(0.2, 1.5))
    finally:
        network.lose(0)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_loss_and_partition_break_no_promise(
    tmp_path: Path, network: Network, seed: int
) -> None:
    async with a_far_kit(network) as kit, asyncio.TaskGroup() as group:
        group.create_task(weather(network, random.Random(seed), SECONDS))
        outcome = await run_seed(kit, seed, SECONDS, machine=True, keep=tmp_path)
        assert outcome.violations == []
        # More than are asked when the network is mended: how many depends on the machine.
        assert outcome.outcomes["whole"] > FEW + CHECKS
