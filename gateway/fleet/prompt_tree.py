"""Which prompts have a prefix in common: a radix tree over the chained blocks of prompts.

A block's number stands for the prompt up to its end. So equal numbers at one depth mean equal
prefixes, and one comparison shows whether a whole run of blocks agrees. A run within which no
prompt branches off or ends is one `PrefixEdge`, whatever its length: a fleet has about one edge for
each conversation, and a few for the prefixes that conversations share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field


class PromptTree:
    """The tree of all prompts that any node caches."""

    def __init__(self) -> None:
        self._edges: dict[int, PrefixEdge] = {}

    def __len__(self) -> int:
        """The number of edges."""
        return len(self._edges)

    def match(self, blocks: tuple[int, ...]) -> dict[PrefixEdge, int]:
        """The edges on the path of a prompt, from its beginning.

        For each: blocks up to where they agree, less than the edge's `end` for the last one only.
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
                # Blocks are chained: they agree up to some point and nowhere after it.
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
        """Add a prompt with these blocks. `reported`: the node reported its tokens."""
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
        held.end_at(last)
        for edge in last.path_to_root():
            edge.count(held)
        last.add_end(held, reported=reported)

    def remove(self, held: CachedPrompt) -> None:
        """Remove a prompt; its copy stays, if there is one."""
        leaf, copy = held.leaf, held.other_copy
        if leaf is None:
            return
        held.unlink()
        leaf.remove_end(held, copy)
        for edge in leaf.path_to_root():
            edge.uncount(held)
            if not edge.prompt_count:
                del self._edges[edge.blocks[0]]

    def copy_to_host(self, held: CachedPrompt) -> CachedPrompt:
        """A slot's prompt is in the node's host memory as well; returns the copy there."""
        leaf = held.leaf
        assert leaf is not None
        copied = held.copy_to_host()
        for edge in leaf.path_to_root():
            edge.count(copied)
        return copied

    def move_to_host(self, held: CachedPrompt) -> None:
        """A slot's prompt moves to the node's host memory."""
        if held.leaf is not None:
            for edge in held.leaf.path_to_root():
                edge.move_to_host(held.row)
        held.leave_slot()

    def _split(self, edge: PrefixEdge, at: int) -> PrefixEdge:
        """Split an edge before block `at`; returns the new edge in front."""
        front = edge.split(at)
        self._edges[front.blocks[0]] = front
        self._edges[edge.blocks[0]] = edge
        return front


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """One prompt that a node caches, with its answer."""

    row: int
    leaf: PrefixEdge | None
    """The edge at whose end it ends; None: it has no blocks."""
    prompt_tokens: float
    """Tokens, as the node reported them."""
    answer_tokens: float
    """Tokens of the answer, which follow the prompt in the node's cache."""
    ends_on_block: bool
    """Whether the last block ends where the prompt does, so that the next turn continues there."""
    in_slot: bool = True
    """In a slot; else in the node's host memory."""
    other_copy: CachedPrompt | None = None
    """The same prompt in the other place, if it is in both."""
    caller: str = ""
    """The id of the caller that sent it; empty: unknown."""

    @property
    def tokens(self) -> float:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def blocks(self) -> array[int]:
        """All its blocks."""
        blocks = array("q")
        for edge in [] if self.leaf is None else reversed([*self.leaf.path_to_root()]):
            blocks += edge.blocks
        return blocks

    def end_at(self, leaf: PrefixEdge) -> None:
        """It is in the tree, and ends at the end of this edge."""
        self.leaf = leaf

    def unlink(self) -> None:
        """It is no longer in the tree."""
        self.leaf = None
        copy, self.other_copy = self.other_copy, None
        if copy is not None:
            copy.unlink_copy()

    def unlink_copy(self) -> None:
        """Its copy is no longer in the tree."""
        self.other_copy = None

    def copy_to_host(self) -> CachedPrompt:
        """It is in host memory as well; returns the copy there."""
        copied = CachedPrompt(
            self.row,
            self.leaf,
            self.prompt_tokens,
            self.answer_tokens,
            self.ends_on_block,
            in_slot=False,
            other_copy=self,
            caller=self.caller,
        )
        self.other_copy = copied
        return copied

    def leave_slot(self) -> None:
        """It is in host memory now."""
        self.in_slot = False


@dataclass(slots=True, eq=False)
class PrefixEdge:
    """A run of blocks within which no prompt branches off or ends."""

    parent: PrefixEdge | None
    start: int
    """Blocks before it."""
    blocks: array[int]
    prompt_count: int = 0
    """Cached prompts that contain all of it."""
    reported_tokens: float = 0.0
    """Tokens up to its end, if a node has reported them; else 0."""
    slot_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many idle slots hold it."""
    host_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many prompts in host memory contain it."""
    ending_here: dict[int, CachedPrompt] | None = None
    """The prompt that ends here, for each row."""

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.blocks)

    def count(self, held: CachedPrompt) -> None:
        """One more prompt contains it."""
        self.prompt_count += 1
        rows = self.slot_counts if held.in_slot else self.host_counts
        rows[held.row] = rows.get(held.row, 0) + 1

    def uncount(self, held: CachedPrompt) -> None:
        """One prompt less contains it."""
        self.prompt_count -= 1
        if self.prompt_count:
            _count_down(self.slot_counts if held.in_slot else self.host_counts, held.row)

    def move_to_host(self, row: int) -> None:
        """One of the prompts that contain it moves from a slot to host memory."""
        _count_down(self.slot_counts, row)
        self.host_counts[row] = self.host_counts.get(row, 0) + 1

    def add_end(self, held: CachedPrompt, *, reported: bool) -> None:
        """This prompt ends here; `reported`: the node reported its tokens."""
        if reported and held.ends_on_block:
            self.reported_tokens = held.prompt_tokens
        if self.ending_here is None:
            self.ending_here = {}
        self.ending_here[held.row] = held

    def remove_end(self, held: CachedPrompt, copy: CachedPrompt | None) -> None:
        """This prompt is removed; its copy, if there is one, still ends here."""
        if self.ending_here is not None and self.ending_here.get(held.row) is held:
            if copy is None:
                del self.ending_here[held.row]
            else:
                self.ending_here[held.row] = copy

    def split(self, at: int) -> PrefixEdge:
        """Keep the blocks from `at` on; returns a new edge, the parent, with those before."""
        cut = at - self.start
        front = PrefixEdge(
            self.parent,
            self.start,
            self.blocks[:cut],
            self.prompt_count,
            slot_counts=dict(self.slot_counts),
            host_counts=dict(self.host_counts),
        )
        self.parent, self.start, self.blocks = front, at, self.blocks[cut:]
        return front

    def path_to_root(self) -> Iterator[PrefixEdge]:
        """This edge and all its ancestors."""
        edge: PrefixEdge | None = self
        while edge is not None:
            yield edge
            edge = edge.parent


def _count_down(rows: dict[int, int], row: int) -> None:
    left = rows[row] - 1
    if left:
        rows[row] = left
    else:
        del rows[row]
