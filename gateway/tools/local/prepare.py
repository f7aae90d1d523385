"""From what a person asks of `llama-gateway up` to servers that can be started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.local.cache import cache_folder, logs_folder
from gateway.tools.local.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from gateway.tools.local.embedded import packaged_openmp, system_has_openmp
from gateway.tools.local.errors import MissingExtraError
from gateway.tools.local.gguf_file import ModelFile, read_model
from gateway.tools.local.memory import check_memlock, check_memory, memlock_limit
from gateway.tools.local.plan import DEFAULT_SLOTS, ServerSpec, plan_servers
from gateway.tools.local.server_command import ServerBinary, find_binary
from gateway.tools.local.topology import Topology, read_topology


@dataclass(frozen=True, slots=True)
class LocalFleetPlan:
    """What `LocalFleet(plan.specs, plan.log_folder, binary=plan.binary)` will start."""

    model: ModelFile
    is_demo: bool  # its words mean nothing: say so
    specs: tuple[ServerSpec, ...]
    binary: ServerBinary | None  # None: the embedded server
    log_folder: Path


def plan_local_fleet(
    model: Path | None = None,
    *,
    servers: int | None = None,
    slots: int = DEFAULT_SLOTS,
    server_bin: Path | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
    cache: Path | None = None,
    topology: Topology | None = None,
) -> LocalFleetPlan:
    """Plan the servers of this machine, for `model` or else the demo model.

    Raises a LocalFleetError that names the remedy: a missing extra, a file that is no model, too
    little memory or none that may be locked, a binary that can't be run; OSError when the cache
    folder can't be written.
    """
    cache = cache or cache_folder()
    topology = topology or read_topology()
    binary = find_binary(server_bin)
    if binary is None:
        _check_embedded()
    chosen = read_model(model) if model else read_model(ensure_demo_model(cache), DEMO_MODEL_NAME)
    specs = plan_servers(
        topology, chosen, servers=servers, slots=slots, embedding=embedding, mlock=mlock
    )
    check_memory(topology, chosen, [spec.memory_node for spec in specs], force=force_memory)
    if mlock:
        check_memlock(chosen, memlock_limit())
    return LocalFleetPlan(chosen, model is None, specs, binary, logs_folder(cache))


def _check_embedded() -> None:
    remedy = "pip install 'llama-gateway[local]', or name a llama-server with --server-bin FILE"
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the package 'xllamacpp', which is not installed: "
            + remedy
        )
    if not system_has_openmp() and packaged_openmp() is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the OpenMP runtime, which neither this system nor "
            f"an installed package has: {remedy}, or apt-get install libgomp1"
        )
