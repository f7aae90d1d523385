"""From what a person asks of `llama-gateway up` to servers that can be started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from gateway.local.cache import cache_folder, logs_folder
from gateway.local.demo_model import MODEL_NAME, ensure_demo_model
from gateway.local.errors import MissingExtraError
from gateway.local.gguf_file import Model, read_model
from gateway.local.locking import check_lock, lock_limit
from gateway.local.memory import check_memory
from gateway.local.openmp import carried_openmp, system_has_openmp
from gateway.local.plan import SLOTS, ServerSpec, plan_servers
from gateway.local.server_command import Binary, find_binary
from gateway.local.topology import Topology, read_topology


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What `LocalFleet(plan.specs, plan.log_folder, binary=plan.binary)` will start."""

    model: Model
    is_demo: bool  # its words mean nothing: say so
    specs: tuple[ServerSpec, ...]
    binary: Binary | None  # None: the embedded server
    log_folder: Path


def prepare(
    model: Path | None = None,
    *,
    servers: int | None = None,
    slots: int = SLOTS,
    server_bin: Path | None = None,
    force_memory: bool = False,
    embedding: bool = False,
    mlock: bool = False,
    cache: Path | None = None,
    topology: Topology | None = None,
) -> LocalPlan:
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
    chosen = read_model(model) if model else read_model(ensure_demo_model(cache), MODEL_NAME)
    specs = plan_servers(
        topology, chosen, servers=servers, slots=slots, embedding=embedding, mlock=mlock
    )
    check_memory(topology, chosen, [spec.memory_node for spec in specs], force=force_memory)
    if mlock:
        check_lock(chosen, lock_limit())
    return LocalPlan(chosen, model is None, specs, binary, logs_folder(cache))


def _check_embedded() -> None:
    remedy = "pip install 'llama-gateway[local]', or name a llama-server with --server-bin FILE"
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the package 'xllamacpp', which is not installed: "
            + remedy
        )
    if not system_has_openmp() and carried_openmp() is None:
        raise MissingExtraError(
            "the embedded llama.cpp server needs the OpenMP runtime, which neither this system nor "
            f"an installed package has: {remedy}, or apt-get install libgomp1"
        )
