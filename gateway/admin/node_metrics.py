"""`/metrics/nodes`: the metrics of all llama.cpp servers on one page, each with its node's name.

A node is not trusted: its text may be anything. Only samples of llama.cpp's own families pass, with
a number and without labels of their own; `llamacpp:prompt_tokens_total 12` becomes
`llamacpp:prompt_tokens_total{node="a"} 12`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import fetch
from gateway.nodes.lifecycle import ProbeResult
from gateway.nodes.node import Node
from gateway.watch.metrics import CONTENT_TYPE, METRIC_PREFIX, MetricsPage, labels

# Nodes that are asked at the same time, but for those that are late. To read the answers of more in
# one turn of the event loop would hold up requests.
AT_ONCE = 8
# A node that has not answered for so long keeps no place from others: it may read a prompt.
LATE_SECONDS = 0.03
# Time for all nodes; Prometheus waits 10 seconds for a page unless told otherwise.
WHOLE_SECONDS = 6.0
FRESH_SECONDS = 5.0  # for so long a page is shown again instead of asking the nodes anew
LARGEST_PAGE = 64 << 10  # bytes of a node's page; llama.cpp's has 4,000


@dataclass(slots=True)
class NodeMetricsEndpoint:
    """Asks all nodes, at most once in `FRESH_SECONDS`, whoever reads the page."""

    fleet: Fleet
    settings: Callable[[], Settings]
    clock: Callable[[], float]
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _text: bytes = b""
    _made_at: float = -math.inf

    async def show(self, _: Request) -> Response:
        """The page. Raises: GatewayError if the settings have switched it off."""
        if not self.settings().telemetry.node_metrics:
            raise GatewayError(
                404, "not_found", "Metrics of nodes are off: set telemetry.node_metrics to true."
            )
        async with self._asking:
            if self.clock() - self._made_at >= FRESH_SECONDS:
                self._text = await self._page()
                self._made_at = self.clock()
        return Response(self._text, headers={"content-type": CONTENT_TYPE})

    async def _page(self) -> bytes:
        nodes = [node for node in self.fleet.nodes.values() if node.spec.kind == "llama.cpp"]
        found = await self._ask(nodes)
        page = MetricsPage("")
        page.family(
            f"{METRIC_PREFIX}node_metrics_up",
            ((labels(node=node.name), int(node.name in found)) for node in nodes),
            help_text="1 for nodes that have shown their metrics.",
        )
        add_node_metrics(page, found)
        text = bytearray()
        for step in page.steps():
            text += step.encode()
            await asyncio.sleep(0)
        return bytes(text)

    async def _ask(self, nodes: list[Node]) -> dict[str, NodeFamilies]:
        """What the nodes say, in their order; those that do not answer in time are missing."""
        gate = asyncio.Semaphore(AT_ONCE)
        tasks: dict[str, asyncio.Task[NodeFamilies | None]] = {}
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                for node in nodes:
                    if node.in_service and node.probe_history.up and not node.probe_history.silent:
                        await gate.acquire()
                        tasks[node.name] = asyncio.create_task(
                            _read(node, gate), name=f"metrics of {node.name}"
                        )
                if tasks:
                    await asyncio.wait(tasks.values())
        except TimeoutError:
            pass
        finally:
            for task in tasks.values():
                task.cancel()
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {
            name: result
            for name, result in zip(tasks, results, strict=True)
            if isinstance(result, NodeFamilies)
        }


async def _read(node: Node, gate: asyncio.Semaphore) -> NodeFamilies | None:
    """What the node says; its place in the gate is taken already."""
    with contextlib.ExitStack() as place:
        place.callback(gate.release)
        late = asyncio.get_running_loop().call_later(LATE_SECONDS, place.close)
        place.callback(late.cancel)
        reply = await fetch(node, "/metrics", largest=LARGEST_PAGE)
    if isinstance(reply, ProbeResult) or reply.status != 200:
        return None
    return read_node_metrics(reply.body)


MOST_SAMPLES = 100  # most samples of one node; llama.cpp has some twenty
MOST_FAMILIES = 200  # most families of all nodes together: builds differ in theirs
LONGEST_HELP = 200  # characters of a family's description

_LINE = re.compile(
    rb"^(?:# (?P<kind>HELP|TYPE) (?P<named>llamacpp:[a-z0-9_]{1,80}) (?P<text>[^\n]*)"
    rb"|(?P<name>llamacpp:[a-z0-9_]{1,80})(?:\{[^}\n]*\})? "
    rb"(?P<value>[+-]?(?:\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?|Inf|NaN|inf|nan)))\s*$",
    re.MULTILINE,
)
_TYPES = frozenset({"counter", "gauge"})


@dataclass(slots=True)
class NodeFamilies:
    """The samples of one node: a value by family, with the families' types and descriptions."""

    values: dict[str, float] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)


def read_node_metrics(text: bytes) -> NodeFamilies | None:
    """What may be shown of a node's page; None: it is no page of llama.cpp's metrics."""
    families = NodeFamilies()
    for line in _LINE.finditer(text):
        if line["name"] is not None:
            families.values.setdefault(line["name"].decode(), float(line["value"]))
            if len(families.values) >= MOST_SAMPLES:
                break
            continue
        name, words = line["named"].decode(), line["text"].decode("utf-8", "replace").strip()
        if line["kind"] == b"HELP":
            families.helps[name] = re.sub(r"[^ -~]|\\", " ", words)[:LONGEST_HELP]
        elif words in _TYPES:
            families.types[name] = words
    return families if families.values else None


def add_node_metrics(page: MetricsPage, nodes: Mapping[str, NodeFamilies]) -> None:
    """Add the families of all nodes to a page, each family once."""
    names: dict[str, tuple[str, str]] = {}
    for families in nodes.values():
        for name in families.values:
            if name not in names and len(names) < MOST_FAMILIES:
                kind = families.types.get(name, "untyped")
                names[name] = kind, families.helps.get(name) or "Of llama.cpp's server."
    for name, (kind, text) in names.items():
        page.family(name, _samples(name, nodes.items()), kind, text)


def _samples(name: str, nodes: Iterable[tuple[str, NodeFamilies]]) -> Iterator[tuple[str, float]]:
    for node, families in nodes:
        value = families.values.get(name)
        if value is not None:
            yield labels(node=node), value
