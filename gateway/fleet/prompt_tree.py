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
class PromptKey:
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
    omits_volatile: bool = False
    """The blocks leave out something that the node gets to see, and may ignore or not."""

    def share_of(self, block: int) -> float:
        """The share of the prompt that the first `block` blocks are."""
        if not block:
            return 0.0
        if not self.ends:
            return block / len(self.blocks)
        return self.ends[block - 1] / (self.size or self.ends[-1])

    @property
    def ends_on_block(self) -> bool:
        """Whether the last block ends where the prompt does."""
        return bool(self.blocks) and self.size in {0, self.ends[-1] if self.ends else 0}


class PromptTree:
    """The tree of all prompts that are kept anywhere."""

    def __init__(self) -> None:
        self._edges: dict[int, PrefixEdge] = {}

    def __len__(self) -> int:
        """Edges, for who watches their number."""
        return len(self._edges)

    def match(self, blocks: tuple[int, ...]) -> dict[PrefixEdge, int]:
        """The edges that a prompt has in common with others, from its beginning.

        For each, blocks up to where they agree: less than the edge's `end` for the last one only.
        """
        found: dict[PrefixEdge, int] = {}
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

    def add(self, held: CachedPrompt, blocks: tuple[int, ...], *, reported: bool = True) -> None:
        """Keep a prompt of these blocks; sets its `leaf`. `told`: the node said how long it is."""
        if not blocks:
            return
        last: PrefixEdge | None = None
        at = 0
        for edge, agreed in self.match(blocks).items():
            last = edge if agreed == edge.end else self._split(edge, agreed)
            at = agreed
        if at < len(blocks):
            last = PrefixEdge(last, at, array("q", blocks[at:]))
            self._edges[blocks[at]] = last
        assert last is not None
        held.leaf = last
        row = held.row
        for edge in last.path_to_root():
            edge.prompt_count += 1
            rows = edge.slot_counts if held.in_slot else edge.host_counts
            rows[row] = rows.get(row, 0) + 1
        if reported and held.ends_on_block:
            last.reported_tokens = held.prompt_tokens
        if last.ending_here is None:
            last.ending_here = {}
        last.ending_here[row] = held

    def remove(self, held: CachedPrompt) -> None:
        """Keep a prompt no longer."""
        leaf = held.leaf
        if leaf is None:
            return
        held.leaf = None
        twin, held.other_copy = held.other_copy, None
        if twin is not None:
            twin.other_copy = None
        if leaf.ending_here is not None and leaf.ending_here.get(held.row) is held:
            if twin is None:
                del leaf.ending_here[held.row]
            else:
                leaf.ending_here[held.row] = twin
        for edge in leaf.path_to_root():
            edge.prompt_count -= 1
            if edge.prompt_count:
                _count_down(edge.slot_counts if held.in_slot else edge.host_counts, held.row)
            else:
                del self._edges[edge.blocks[0]]

    def copy_to_host(self, held: CachedPrompt) -> CachedPrompt:
        """A slot's prompt goes to the node's host memory as well; the copy there."""
        leaf, row = held.leaf, held.row
        assert leaf is not None
        copied = CachedPrompt(
            row,
            leaf,
            held.prompt_tokens,
            held.answer_tokens,
            held.ends_on_block,
            in_slot=False,
            other_copy=held,
        )
        held.other_copy = copied
        for edge in leaf.path_to_root():
            edge.prompt_count += 1
            edge.host_counts[row] = edge.host_counts.get(row, 0) + 1
        return copied

    def move_to_host(self, held: CachedPrompt) -> None:
        """A slot's prompt goes to the node's host memory."""
        held.in_slot = False
        row = held.row
        if held.leaf is not None:
            for edge in held.leaf.path_to_root():
                _count_down(edge.slot_counts, row)
                edge.host_counts[row] = edge.host_counts.get(row, 0) + 1

    def _split(self, edge: PrefixEdge, at: int) -> PrefixEdge:
        """Part an edge before block `at`; the part in front is new, and is returned."""
        cut = at - edge.start
        front = PrefixEdge(
            edge.parent,
            edge.start,
            edge.blocks[:cut],
            edge.prompt_count,
            slot_counts=dict(edge.slot_counts),
            host_counts=dict(edge.host_counts),
        )
        edge.parent, edge.start, edge.blocks = front, at, edge.blocks[cut:]
        self._edges[front.blocks[0]] = front
        self._edges[edge.blocks[0]] = edge
        return front


def _count_down(rows: dict[int, int], row: int) -> None:
    left = rows[row] - 1
    if left:
        rows[row] = left
    else:
        del rows[row]


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """One prompt that a node keeps, with the answer it gave."""

    row: int
    leaf: PrefixEdge | None
    """The edge at whose end it ends; None: it has no blocks."""
    prompt_tokens: float
    """Tokens, as the node told."""
    answer_tokens: float
    """Tokens of the answer, which follow the prompt in the node's cache."""
    ends_on_block: bool
    """Whether what goes on after its blocks goes on after its prompt."""
    in_slot: bool = True
    """In a slot; else in the node's host memory."""
    other_copy: CachedPrompt | None = None
    """The same prompt in the other place, if it is in both."""

    @property
    def tokens(self) -> float:
        """All that is kept."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(slots=True, eq=False)
class PrefixEdge:
    """A run of blocks without a branch or an end within."""

    parent: PrefixEdge | None
    start: int
    """Blocks before it."""
    blocks: array[int]
    prompt_count: int = 0
    """Kept prompts that have all of it."""
    reported_tokens: float = 0.0
    """Tokens up to its end, where a node has told them; else 0."""
    slot_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many idle slots hold it."""
    host_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many prompts in host memory have it."""
    ending_here: dict[int, CachedPrompt] | None = None
    """The prompt that ends here, for each row."""

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.blocks)

    def path_to_root(self) -> Iterator[PrefixEdge]:
        """This edge and those above it."""
        edge: PrefixEdge | None = self
        while edge is not None:
            yield edge
            edge = edge.parent
