"""What a router has of one model: its file, its server, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.emulator import info_endpoints

if TYPE_CHECKING:
    import asyncio

    from tests.emulator.connection import Connection
    from tests.emulator.node import EmulatedNode

ModelState = Literal["unloaded", "loading", "loaded"]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    size: int = info_endpoints.MODEL_SIZE  # bytes
    memory: int | None = None  # bytes that its server takes; None: its size
    load_seconds: float | None = None  # None: as the router says
    readable: bool = True  # the file is a model
    options: Mapping[str, Any] = field(default_factory=dict)  # of its node


class HostMemory:
    """The memory of a host, in bytes, which the routers on it share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peak = 0
        self._taken: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(self._taken.values())

    def take(self, holder: object, amount: int) -> int:
        """Take an amount, or all that is free. Return how much that is."""
        taken = min(amount, self.size - self.used)
        self._taken[id(holder)] = taken
        self.peak = max(self.peak, self.used)
        return taken

    def free(self, holder: object) -> None:
        self._taken.pop(id(holder), None)


@dataclass(slots=True, eq=False)
class RoutedModel:
    file: ModelFile
    node: EmulatedNode = field(repr=False)
    load_seconds: float = 0.0
    state: ModelState = "unloaded"
    failed: bool = False  # it did not load, or its server was killed
    ending: bool = False  # its server was told to end, and takes no more requests
    listening: bool = False  # its server does, while it loads
    failing_loads: int = 0  # so many of the next loads fail half way
    loads: int = 0  # begun
    used: int = 0  # the number of its last request among the router's
    running: set[Connection] = field(default_factory=set)
    loading: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None  # over its sleep

    @property
    def name(self) -> str:
        return self.node.model

    @property
    def requests(self) -> int:
        return len(self.running)

    @property
    def ready(self) -> bool:
        return self.state == "loaded" and not self.ending

    @property
    def memory(self) -> int:
        return self.file.size if self.file.memory is None else self.file.memory

    @property
    def args(self) -> list[str]:
        node, name = self.node, self.name
        slots = len(node.slots.slots)
        args = ["llama-server", *(["--embeddings"] if node.embeddings else [])]
        args += ["--host", "127.0.0.1", "--metrics"]
        args += ["--pooling", "mean"] if node.embeddings else []
        args += ["--port", "0", *(["--reranking"] if node.rerank else [])]
        if node.sleep_idle_seconds < float("inf"):
            args += ["--sleep-idle-seconds", str(node.sleep_idle_seconds)]
        if node.slot_files is not None:
            args += ["--slot-save-path", "/saves/"]
        context = node.context if node.unified else slots * node.context
        args += ["--alias", name, "--ctx-size", str(context)]
        args += ["--kv-unified"] if node.unified else []
        return [*args, "--model", f"/models/{name}.gguf", "--parallel", str(slots)]

    def as_json(self) -> dict[str, Any]:
        node = self.node
        status: dict[str, Any] = {
            "value": "sleeping" if self.state == "loaded" and node.sleeping else self.state,
            "args": self.args,
            "preset": f"[{self.name}]\nmodel = /models/{self.name}.gguf\n\n",
        }
        if self.failed:
            status |= {"exit_code": 1, "failed": True}
        value = {
            "id": self.name,
            "aliases": node.aliases,
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "created": node.started,
            "status": status,
            "architecture": info_endpoints.architecture(node),
            "source": "models_dir",
            "can_remove": False,
        }
        if self.file.readable:
            value["context_length"] = node.context_train
        if self.state == "loaded":
            value["meta"] = info_endpoints.meta(node)
        return value
