"""Which prompts begin alike: a radix tree over the chained blocks of prompts.

A block's number stands for the prompt up to its end, so that equal numbers at one depth mean equal
beginnings, and one look tells whether a whole run of blocks agrees. A run that no prompt leaves or
ends within is one `Edge`, whatever its length: what a fleet remembers is about one edge for each
conversation and a few for what conversations share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt as far as caches care: how it begins, and how long it is.

    While it runs, the object itself is its identity.
    """

    blocks: tuple[int, ...]
    """Each stands for everything up to its end, never for itself alone; 64 bits, signed."""
    tokens: float
    """An estimate of the whole prompt's tokens."""
    ends: tuple[int, ...] = ()
    """The prompt's size at the end of each block, bytes; empty: blocks of one size."""
    size: int = 0
    """Bytes of the whole prompt; 0: it ends where its last block does."""
    unsure: bool = False
    """The blocks leave out something that the node gets to see, and may ignore or not."""

    def measured(self, block: int) -> float:
        """The share of the prompt that the first `block` blocks are."""
        if not block:
            return 0.0
        if not self.ends:
            return block / len(self.blocks)
        return self.ends[block - 1] / (self.size or self.ends[-1])

    @property
    def whole(self) -> bool:
        """Whether the last block ends where the prompt does."""
        return bool(self.blocks) and self.size in {0, self.ends[-1] if self.ends else 0}


@dataclass(slots=True, eq=False)
class Held:
    """One prompt that a node keeps, with the answer it gave."""

    row: int
    leaf: Edge | None
    """The edge at whose end it ends; None: it has no blocks."""
    prompt: float
    """Tokens, as the node told."""
    answer: float
    """Tokens of the answer, which follow the prompt in the node's cache."""
    continues: bool
    """Whether what goes on after its blocks goes on after its prompt."""
    idle: bool = True
    """In a slot; else in the node's host memory."""
    twin: Held | None = None
    """The same prompt in the other place, if it is in both."""

    @property
    def tokens(self) -> float:
        """All that is kept."""
        return self.prompt + self.answer


@dataclass(slots=True, eq=False)
class Edge:
    """A run of blocks without a branch or an end within."""

    above: Edge | None
    start: int
    """Blocks before it."""
    blocks: array[int]
    passing: int = 0
    """Kept prompts that have all of it."""
    tokens: float = 0.0
    """Tokens up to its end, where a node has told them; else 0."""
    idle: dict[int, int] = field(default_factory=dict)
    """For each row, how many idle slots hold it."""
    host: dict[int, int] = field(default_factory=dict)
    """For each row, how many prompts in host memory have it."""
    ending: dict[int, Held] | None = None
    """The prompt that ends here, for each row."""

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.blocks)

    def up(self) -> Iterator[Edge]:
        """This edge and those above it."""
        edge: Edge | None = self
        while edge is not None:
            yield edge
            edge = edge.above


class Prefixes:
    """The tree of all prompts that are kept anywhere."""

    def __init__(self) -> None:
        self._edges: dict[int, Edge] = {}

    def __len__(self) -> int:
        """Edges, for who watches their number."""
        return len(self._edges)

    def walk(self, blocks: tuple[int, ...]) -> dict[Edge, int]:
        """The edges that a prompt has in common with others, from its beginning.

        For each, blocks up to where they agree: less than the edge's `end` for the last one only.
        """
        found: dict[Edge, int] = {}
        edges, count, at = self._edges, len(blocks), 0
        while at < count:
            edge = edges.get(blocks[at])
            if edge is None or edge.start != at:
                break
            own = edge.blocks
            shared = min(len(own), count - at)
            if own[shared - 1] != blocks[at + shared - 1]:
                # Chained: the blocks agree up to some point and nowhere behind it.
                low, high = 1, shared - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    if own[middle - 1] == blocks[at + middle - 1]:
                        low = middle
                    else:
                        high = middle - 1
                shared = low
            at += shared
            found[edge] = at
            if shared < len(own):
                break
        return found

    def add(self, held: Held, blocks: tuple[int, ...], *, told: bool = True) -> None:
        """Keep a prompt of these blocks; sets its `leaf`. `told`: the node said how long it is."""
        if not blocks:
            return
        last: Edge | None = None
        at = 0
        for edge, agreed in self.walk(blocks).items():
            last = edge if agreed == edge.end else self._split(edge, agreed)
            at = agreed
        if at < len(blocks):
            last = Edge(last, at, array("q", blocks[at:]))
            self._edges[blocks[at]] = last
        assert last is not None
        held.leaf = last
        row = held.row
        for edge in last.up():
            edge.passing += 1
            rows = edge.idle if held.idle else edge.host
            rows[row] = rows.get(row, 0) + 1
        if told and held.continues:
            last.tokens = held.prompt
        if last.ending is None:
            last.ending = {}
        last.ending[row] = held

    def remove(self, held: Held) -> None:
        """Keep a prompt no longer."""
        leaf = held.leaf
        if leaf is None:
            return
        held.leaf = None
        twin, held.twin = held.twin, None
        if twin is not None:
            twin.twin = None
        if leaf.ending is not None and leaf.ending.get(held.row) is held:
            if twin is None:
                del leaf.ending[held.row]
            else:
                leaf.ending[held.row] = twin
        for edge in leaf.up():
            edge.passing -= 1
            if edge.passing:
                _count_down(edge.idle if held.idle else edge.host, held.row)
            else:
                del self._edges[edge.blocks[0]]

    def copy(self, held: Held) -> Held:
        """A slot's prompt goes to the node's host memory as well; the copy there."""
        leaf, row = held.leaf, held.row
        assert leaf is not None
        copied = Held(row, leaf, held.prompt, held.answer, held.continues, idle=False, twin=held)
        held.twin = copied
        for edge in leaf.up():
            edge.passing += 1
            edge.host[row] = edge.host.get(row, 0) + 1
        return copied

    def move(self, held: Held) -> None:
        """A slot's prompt goes to the node's host memory."""
        held.idle = False
        row = held.row
        if held.leaf is not None:
            for edge in held.leaf.up():
                _count_down(edge.idle, row)
                edge.host[row] = edge.host.get(row, 0) + 1

    def _split(self, edge: Edge, at: int) -> Edge:
        """Part an edge before block `at`; the part in front is new, and is returned."""
        cut = at - edge.start
        front = Edge(
            edge.above,
            edge.start,
            edge.blocks[:cut],
            edge.passing,
            idle=dict(edge.idle),
            host=dict(edge.host),
        )
        edge.above, edge.start, edge.blocks = front, at, edge.blocks[cut:]
        self._edges[front.blocks[0]] = front
        self._edges[edge.blocks[0]] = edge
        return front


def _count_down(rows: dict[int, int], row: int) -> None:
    left = rows[row] - 1
    if left:
        rows[row] = left
    else:
        del rows[row]
