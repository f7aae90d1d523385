"""What each node remembers of the prompts it has read: a model of llama.cpp's prompt caches.

A llama.cpp server keeps the last prompt of each slot, answer included, and in host memory
(`--cache-ram`) prompts that had to leave their slots. A request gets the idle slot whose prompt is
most like its own. If less than half of that prompt could be kept, it goes to host memory first, and
a prompt from there that fits better takes its place. (`get_available_slot` in llama.cpp's
`tools/server/server-context.cpp`, `server_prompt_cache` in `server-task.cpp`.)

The same is done here with what the gateway has sent, so that it is known before a request is
placed how many of its tokens each node would not have to read. How much fits into host memory no
server tells: that is learnt from predictions that held and failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gateway.fleet.prompt_tree import CachedPrompt, PrefixEdge, PromptKey, PromptTree

__all__ = ["CacheLookup", "FleetPromptCache", "PromptKey"]

SLOT_SIMILARITY = 0.1
"""A slot's prompt has so much of a request's in common, or is as good as any other
(`--slot-prompt-similarity`)."""

SLOT_KEPT_SHARE = 0.5
"""With so much of its own left, a slot's prompt isn't saved, and host memory isn't looked into."""

HOST_LOADED_SHARE = 0.25
"""With less of its own left, a prompt in host memory is left alone."""

EXTRA_RUNNING_PROMPTS = 16
"""Requests more than twice a node's slots that may run there without being forgotten."""

LEAST_PREDICTION = 64.0
"""Tokens; from shorter predictions nothing is learnt."""

FAILED_PREDICTION_SHARE = 0.1  # of a prediction: if less came true it has failed as a whole

MOST_FAILED_PREDICTIONS = 2
"""In a row; then the node remembers nothing of what is believed of it."""

LEAST_HOST_LOOKUP_ROWS, MOST_HOST_LOOKUP_ROWS = 4, 8
"""Rows whose host memory is looked through for one prompt; for others the tree's word is taken."""


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """What the fleet remembers of one prompt."""

    tokens: float
    """The whole prompt's tokens: as told for what some node has read, as estimated for the rest."""
    cached: dict[int, float]
    """For each row that remembers some of it, tokens it would not have to read."""
    pending: Mapping[int, float] = field(default_factory=dict)
    """For each row that reads some of it now, tokens it will know when that has ended."""


@dataclass(slots=True)
class _RunningPrompt:
    """A request on a node, and what was believed of it."""

    prompt: PromptKey
    predicted: float
    depth: float | None = None
    """Tokens in host memory down to the prompt it took from there; None: it took none."""
    forerunner: float = 0.0
    """Tokens of the prompt that it goes on after."""
    answer: float = 0.0
    """And of that one's answer."""


@dataclass(slots=True)
class _TreeMatch:
    """One prompt against the tree."""

    total: float
    """The whole prompt's tokens."""
    agreed: dict[PrefixEdge, float]
    """Tokens up to where it agrees with each edge of its way."""
    over: set[PrefixEdge]
    """Edges that it agrees with to their end and beyond."""


class FleetPromptCache:
    """What is believed of all nodes' prompt caches. Rows are small numbers that the caller gives.

    A row that was never sized is no error: nothing is known of it.
    """

    def __init__(self) -> None:
        self._tree = PromptTree()
        self._nodes: dict[int, _CachedNode] = {}
        self._running = PendingPrefixes()

    def resize(self, row: int, slots: int, host_tokens: float | None = None) -> None:
        """A node has so many slots, and host memory for `host` tokens of prompts.

        None: nobody knows, and it is learnt; 0: there is none.
        """
        tokens = DEFAULT_HOST_TOKENS if host_tokens is None else host_tokens
        node = self._nodes.get(row)
        if node is None:
            self._nodes[row] = _CachedNode(max(1, slots), NodePromptCache(self._tree, row, tokens))
            return
        node.slots = max(1, slots)
        if host_tokens is not None:
            node.kept.host_capacity = host_tokens
        self._settle(row, node)

    def forget_node(self, row: int) -> None:
        """The server is another one, or gone: nothing of the row is known any more."""
        node = self._nodes.pop(row, None)
        if node is not None:
            for number in list(node.running):
                self._ended(row, node, number)
            node.kept.clear()

    def lookup(self, prompt: PromptKey) -> CacheLookup:
        """What each row would find of this prompt if it were placed there now."""
        view = self._view(prompt)
        most = max(0.0, view.total - 1.0)  # the last token is always read
        cached: dict[int, float] = {}
        for edge, tokens in view.agreed.items():
            known = min(tokens, most)
            cached.update(dict.fromkeys(edge.host_counts, known))
            cached.update(dict.fromkeys(edge.slot_counts, known))
            if edge.ending_here and edge in view.over:
                for row, held in edge.ending_here.items():
                    cached[row] = min(self._kept(held), most)
        for row in _host_only(view):
            spared = self._chosen(self._nodes[row], view)[2]
            if spared > 0.0:
                cached[row] = min(spared, most)
            else:
                del cached[row]
        if prompt.omits_volatile:
            nodes = self._nodes
            cached = {row: tokens * nodes[row].ignores for row, tokens in cached.items()}
        return CacheLookup(view.total, cached, self._running.pending_tokens(prompt, view.total))

    def cached_tokens(self, prompt: PromptKey) -> dict[int, float]:
        """For each row that remembers some of this prompt, tokens it would not have to read."""
        return self.lookup(prompt).cached

    def request_placed(self, row: int, prompt: PromptKey) -> None:
        """A request starts on a node: it takes over a slot there, and what the slot holds."""
        node = self._nodes.get(row)
        if node is None or id(prompt) in node.running:
            return
        view = self._view(prompt)
        slot, loaded, cached = self._chosen(node, view)
        running = _RunningPrompt(prompt, min(cached, view.total))
        source = slot if loaded is None else loaded
        if source is not None and source.leaf in view.over and source.ends_on_block:
            running.forerunner, running.answer = source.prompt_tokens, source.answer_tokens
        if loaded is not None:
            running.depth = node.kept.host_depth(loaded)
            node.kept.evict(loaded)
        if slot is not None:
            if loaded is None and self._common(slot, view) >= SLOT_KEPT_SHARE * slot.tokens:
                node.kept.evict(slot)
            else:
                node.kept.move_to_host(slot)
        node.kept.copy_idle_to_host()
        node.running[id(prompt)] = running
        self._running.add(row, prompt)
        self._settle(row, node)

    def request_finished(
        self,
        row: int,
        prompt: PromptKey,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
    ) -> None:
        """A request ended and told its figures: its slot holds prompt and answer from now on."""
        node = self._nodes.get(row)
        running = None if node is None else self._ended(row, node, id(prompt))
        if node is None or running is None or not 1 <= prompt_tokens < math.inf:
            return
        if 0 <= cached_tokens <= prompt_tokens:
            self._learn(node, running, cached_tokens)
        answer = completion_tokens if 0 <= completion_tokens < math.inf else 0.0
        held = CachedPrompt(row, None, prompt_tokens, answer, prompt.ends_on_block)
        self._tree.add(held, prompt.blocks)
        node.kept.slot_prompts[held] = None
        self._settle(row, node)

    def request_dropped(self, row: int, prompt: PromptKey, written_tokens: float = 0.0) -> None:
        """A request ended without figures, after `written` tokens of its answer.

        Without one it isn't known what its slot holds; with one the prompt has been read.
        """
        node = self._nodes.get(row)
        running = None if node is None else self._ended(row, node, id(prompt))
        if node is None or running is None or not 0 < written_tokens < math.inf:
            return
        held = CachedPrompt(
            row, None, self._view(prompt).total, written_tokens, prompt.ends_on_block
        )
        self._tree.add(held, prompt.blocks, reported=False)
        node.kept.slot_prompts[held] = None
        self._settle(row, node)

    def _ended(self, row: int, node: _CachedNode, number: int) -> _RunningPrompt | None:
        """Take it from what runs."""
        running = node.running.pop(number, None)
        if running is not None:
            self._running.remove(row, running.prompt)
        return running

    def _view(self, prompt: PromptKey) -> _TreeMatch:
        blocks = prompt.blocks
        estimate = max(1.0, prompt.tokens) if prompt.tokens < math.inf else 1.0
        known = told = 0.0
        agreed: dict[PrefixEdge, float] = {}
        over: set[PrefixEdge] = set()
        for edge, at in self._tree.match(blocks).items():
            share = prompt.share_of(at)
            tokens = known + (share - told) * estimate
            if at == edge.end:
                if edge.reported_tokens:
                    known, told, tokens = edge.reported_tokens, share, edge.reported_tokens
                if at < len(blocks):
                    over.add(edge)
            agreed[edge] = tokens
        return _TreeMatch(max(1.0, known + (1.0 - told) * estimate), agreed, over)

    def _kept(self, held: CachedPrompt) -> float:
        """Tokens that the next turn after a prompt finds of it."""
        if not held.ends_on_block:
            return held.prompt_tokens
        return held.prompt_tokens + held.answer_tokens * self._nodes[held.row].answers

    def _common(self, held: CachedPrompt, view: _TreeMatch) -> float:
        """Tokens that what a node keeps has in common with a prompt."""
        leaf = held.leaf
        if leaf is None:
            return 0.0
        if leaf in view.over:
            return self._kept(held)
        agreed = view.agreed
        for edge in leaf.path_to_root():
            if edge in agreed:
                return agreed[edge]
        return 0.0

    def _chosen(
        self, node: _CachedNode, view: _TreeMatch
    ) -> tuple[CachedPrompt | None, CachedPrompt | None, float]:
        """The slot's prompt and the host memory's that llama.cpp would take, and what they spare.

        No slot's prompt: the slot is empty, or none is known to be idle.
        """
        slot: CachedPrompt | None = None
        spared = SLOT_SIMILARITY * view.total
        for held in node.kept.slot_prompts:
            common = self._common(held, view)
            if common > spared:
                slot, spared = held, common
        if slot is not None:
            if spared >= SLOT_KEPT_SHARE * slot.tokens:
                return slot, None, spared
        elif (
            len(node.kept.slot_prompts) + len(node.running) >= node.slots and node.kept.slot_prompts
        ):
            slot = next(iter(node.kept.slot_prompts))
            spared = self._common(slot, view)
        else:
            spared = 0.0
        kept = spared / slot.tokens if slot is not None else -1.0
        loaded: CachedPrompt | None = None
        for held in node.kept.host_prompts:
            common = self._common(held, view)
            share = common / held.tokens
            if common > spared and share > kept and share >= HOST_LOADED_SHARE:
                loaded, spared, kept = held, common, share
        return slot, loaded, spared

    def _learn(self, node: _CachedNode, running: _RunningPrompt, cached: float) -> None:
        """Compare what was believed with what came back."""
        predicted = running.predicted
        if running.prompt.omits_volatile:
            if predicted >= LEAST_PREDICTION:
                node.ignores += 0.5 * (min(1.0, cached / predicted) - node.ignores)
            return
        if running.answer >= LEAST_PREDICTION and cached >= 0.9 * running.forerunner:
            share = min(1.0, max(0.0, cached - running.forerunner) / running.answer)
            node.answers += 0.25 * (share - node.answers)
        if (
            cached > 2.0 * predicted + LEAST_PREDICTION
            and node.kept.host_used > 0.5 * node.kept.host_capacity
        ):
            # The server still has what was let go of here.
            node.kept.host_capacity = min(MOST_HOST_TOKENS, 1.1 * node.kept.host_capacity)
        if predicted < LEAST_PREDICTION:
            return
        if running.depth is not None:
            if cached >= SLOT_KEPT_SHARE * predicted:
                node.kept.host_capacity = max(
                    node.kept.host_capacity, min(MOST_HOST_TOKENS, 1.25 * running.depth)
                )
            else:
                # What is older than a prompt that is gone is gone as well.
                node.kept.host_capacity = max(
                    LEAST_HOST_TOKENS, min(node.kept.host_capacity, 0.9 * running.depth)
                )
        if cached >= FAILED_PREDICTION_SHARE * predicted:
            node.failures = 0
        else:
            node.failures += 1
            if node.failures >= MOST_FAILED_PREDICTIONS:
                node.kept.clear()
                node.failures = 0

    def _settle(self, row: int, node: _CachedNode) -> None:
        """Let go of what a node can't hold."""
        while len(node.running) > 2 * node.slots + EXTRA_RUNNING_PROMPTS:
            self._ended(row, node, next(iter(node.running)))
        node.kept.evict_excess(node.slots - len(node.running))


def _host_only(view: _TreeMatch) -> set[int]:
    """Some rows that would have to load what they know best of a prompt from host memory.

    Of a beginning that many share it makes no difference, and it would take long to tell.
    """
    found: set[int] = set()
    for edge in reversed(view.agreed):
        if len(edge.host_counts) > MOST_HOST_LOOKUP_ROWS:
            break
        found.update(edge.host_counts.keys() - edge.slot_counts.keys())
        if len(found) >= LEAST_HOST_LOOKUP_ROWS:
            break
    return found


DEFAULT_HOST_TOKENS = 65_536.0
"""First guess of what a node's host memory keeps: llama.cpp's default of 8 GiB, at the 128 KiB a
token of models of 7 to 8 billion parameters (32 layers, 8 KV heads of 128, 16 bits)."""

LEAST_HOST_TOKENS, MOST_HOST_TOKENS = 4096.0, 1_048_576.0
"""Tokens between which the guess moves."""

MOST_HOST_PROMPTS = 96

MOST_HOST_BLOCKS = 4096
"""Of one node's host memory; what is more is forgotten here first."""


@dataclass(slots=True)
class NodePromptCache:
    """What a node keeps, as it is believed."""

    tree: PromptTree
    row: int
    host_capacity: float
    """What host memory is believed to keep, tokens."""
    slot_prompts: dict[CachedPrompt, None] = field(default_factory=dict)
    """What idle slots hold, the one that was used longest ago first."""
    host_prompts: dict[CachedPrompt, None] = field(default_factory=dict)
    """What host memory holds, oldest first."""
    host_used: float = 0.0
    """Tokens that host memory holds."""
    host_blocks: int = 0
    """And blocks."""

    def copy_idle_to_host(self) -> None:
        """Work begins: what idle slots hold goes to host memory as well."""
        for held in self.slot_prompts:
            if held.other_copy is None and self._has_place(held):
                self._put(self.tree.copy_to_host(held))

    def move_to_host(self, held: CachedPrompt) -> None:
        """A slot's prompt goes to host memory."""
        if held.other_copy is not None or not self._has_place(held):
            self.evict(held)
            return
        del self.slot_prompts[held]
        self.tree.move_to_host(held)
        self._put(held)

    def evict(self, held: CachedPrompt) -> None:
        """Something is kept no longer; its copy is, if there is one."""
        if held.in_slot:
            del self.slot_prompts[held]
        else:
            del self.host_prompts[held]
            self.host_used -= held.tokens
            self.host_blocks -= 0 if held.leaf is None else held.leaf.end
        self.tree.remove(held)

    def evict_excess(self, idle_slots: int) -> None:
        """Let go of what no longer fits, where so many slots are idle."""
        while self.slot_prompts and len(self.slot_prompts) > idle_slots:
            self.move_to_host(next(iter(self.slot_prompts)))
        while self.host_prompts and (
            self.host_used > self.host_capacity
            or len(self.host_prompts) > MOST_HOST_PROMPTS
            or self.host_blocks > MOST_HOST_BLOCKS
        ):
            self.evict(next(iter(self.host_prompts)))

    def clear(self) -> None:
        """Nothing is believed any more of what the node keeps."""
        for held in [*self.slot_prompts, *self.host_prompts]:
            self.evict(held)

    def host_depth(self, found: CachedPrompt) -> float:
        """Tokens that host memory holds from the newest prompt down to this one."""
        tokens = 0.0
        for held in reversed(self.host_prompts):
            tokens += held.tokens
            if held is found:
                break
        return tokens

    def _has_place(self, held: CachedPrompt) -> bool:
        """Whether host memory takes it: not what it has, alone or as the beginning of another."""
        leaf = held.leaf
        return leaf is not None and self.row not in leaf.host_counts and self.host_capacity > 0.0

    def _put(self, held: CachedPrompt) -> None:
        """Keep it in host memory, where nothing is kept that begins another."""
        leaf = held.leaf
        assert leaf is not None
        for edge in leaf.path_to_root():
            shorter = edge.ending_here.get(self.row) if edge.ending_here else None
            if shorter is not None and shorter.in_slot:
                shorter = shorter.other_copy
            if shorter is not None and shorter is not held:
                self.evict(shorter)
        self.host_prompts[held] = None
        self.host_used += held.tokens
        self.host_blocks += leaf.end


@dataclass(slots=True)
class _CachedNode:
    slots: int
    kept: NodePromptCache
    running: dict[int, _RunningPrompt] = field(default_factory=dict)
    """By the prompt's `id`."""
    answers: float = 1.0
    """The share of an answer that the next turn finds: less where thoughts are left out."""
    ignores: float = 1.0
    """The share of its cache that an unsure prompt finds: 1 where the server ignores the lines."""
    failures: int = 0


MOST_COMPARED_PROMPTS = 32
"""Running requests that one prompt is compared with."""


class PendingPrefixes:
    """The prompts of requests that run, by how they begin."""

    def __init__(self) -> None:
        self._starts: dict[int, dict[tuple[int, int], PromptKey]] = {}
        """By the first block, then by row and the prompt's `id`."""

    def add(self, row: int, prompt: PromptKey) -> None:
        """A request starts there."""
        if prompt.blocks:
            self._starts.setdefault(prompt.blocks[0], {})[row, id(prompt)] = prompt

    def remove(self, row: int, prompt: PromptKey) -> None:
        """It has ended."""
        if prompt.blocks:
            starts = self._starts[prompt.blocks[0]]
            del starts[row, id(prompt)]
            if not starts:
                del self._starts[prompt.blocks[0]]

    def pending_tokens(self, prompt: PromptKey, tokens: float) -> dict[int, float]:
        """What each row will know of a prompt of so many tokens, by what it runs now."""
        starts = self._starts.get(prompt.blocks[0]) if prompt.blocks else None
        coming: dict[int, float] = {}
        if starts:
            for (row, _), running in islice(starts.items(), MOST_COMPARED_PROMPTS):
                known = prompt.share_of(common_blocks(prompt.blocks, running.blocks)) * tokens
                if known > coming.get(row, 0.0):
                    coming[row] = known
        return coming


def common_blocks(blocks: Sequence[int], others: Sequence[int]) -> int:
    """How many blocks two prompts begin with alike: each block stands for all before it."""
    least, most = 0, min(len(blocks), len(others))
    while least < most:
        middle = (least + most + 1) // 2
        if blocks[middle - 1] == others[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
