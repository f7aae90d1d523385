"""What each node caches of the prompts that it has read: a model of llama.cpp's prompt caches.

A llama.cpp server keeps the last prompt of each slot, answer included, and in host memory
(`--cache-ram`) prompts that had to leave their slots. A request gets the idle slot whose prompt is
most like its own. If less than half of that prompt could be kept, it goes to host memory first, and
a prompt from there that fits better takes its place. (`get_available_slot` in llama.cpp's
`tools/server/server-context.cpp`, `server_prompt_cache` in `server-task.cpp`.)

The gateway does the same with the prompts that it sends, so that before it places a request it
knows how many of its tokens each node would not have to read. No server reports how much fits into
its host memory: that is learnt from predictions that came true or failed.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Annotated, NamedTuple

import msgspec

from gateway.lease import PromptKey


class PromptTree:
    """The tree of all prompts that any node caches."""

    def __init__(self) -> None:
        self._edges: dict[int, PrefixEdge] = {}

    def path(self, blocks: tuple[int, ...]) -> Iterator[tuple[PrefixEdge, int, bool]]:
        """The edges on the path of a prompt, from its beginning.

        For each: blocks up to where they agree, and whether that is the edge's end, as it is for
        all but perhaps the last one.
        """
        edges, count, at = self._edges, len(blocks), 0
        while at < count:
            edge = edges.get(blocks[at])
            if edge is None or edge.start != at:
                break
            own = edge.blocks
            length = len(own)
            shared = min(length, count - at)
            if own[shared - 1] != blocks[at + shared - 1]:
                shared = common_blocks(own, blocks, at)
            at += shared
            yield edge, at, shared == length
            if shared < length:
                break

    def add(self, held: CachedPrompt, blocks: tuple[int, ...]) -> None:
        """Add the prompt of a slot, which has these blocks."""
        if not blocks:
            return
        last: PrefixEdge | None = None
        at, to_end = 0, True
        for last, at, to_end in self.path(blocks):  # noqa: B007 - the last one counts
            pass
        if last is not None and not to_end:
            rest, last = last, last.split(at)
            self._edges[last.blocks[0]], self._edges[rest.blocks[0]] = last, rest
        if last is None or at < len(blocks):
            last = PrefixEdge(last, at, array("q", blocks[at:]))
            self._edges[blocks[at]] = last
        held.end_at(last)
        last.count(held.row, in_slot=True)
        last.add_end(held)

    def remove(self, held: CachedPrompt, *, in_slot: bool) -> None:
        """Remove a prompt from its slot, or from host memory; it may stay in the other place."""
        leaf = held.leaf
        held.leave(in_slot=in_slot)
        if leaf is not None:
            if not (held.in_slot or held.in_host) and leaf.ending_here.get(held.row) is held:
                del leaf.ending_here[held.row]
            for edge in leaf.uncount(held.row, in_slot=in_slot):
                if not (edge.slot_counts or edge.host_counts):
                    del self._edges[edge.blocks[0]]


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """One prompt that a node caches, with its answer."""

    row: int
    leaf: PrefixEdge | None  # the edge at whose end it ends; None: it has no blocks
    prompt_tokens: float
    answer_tokens: float  # tokens of the answer, which follow the prompt in the node's cache
    ends_on_block: bool
    """Whether the last block ends where the prompt does, so that the next turn continues there."""
    in_slot: bool = True
    in_host: bool = False  # in the node's host memory, perhaps beside a slot
    caller: str = ""  # the id of the caller that sent it; empty: unknown

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

    def copy_to_host(self) -> None:
        """It is in host memory as well."""
        assert self.leaf is not None
        self.leaf.count(self.row, in_slot=False)
        self.in_host = True

    def leave(self, *, in_slot: bool) -> None:
        """It is no longer in its slot, or in host memory."""
        if in_slot:
            self.in_slot = False
        else:
            self.in_host = False


@dataclass(slots=True, eq=False)
class PrefixEdge:
    """A run of blocks within which no prompt branches off or ends."""

    parent: PrefixEdge | None
    start: int  # blocks before it
    blocks: array[int]
    reported_tokens: float = 0.0  # tokens up to its end, if a node has reported them; else 0
    slot_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many idle slots hold it."""
    host_counts: dict[int, int] = field(default_factory=dict)
    """For each row, how many prompts in host memory contain it."""
    ending_here: dict[int, CachedPrompt] = field(default_factory=dict)
    """The prompt that ends here, for each row."""

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.blocks)

    def count(self, row: int, *, in_slot: bool) -> None:
        """One more prompt, of a slot or of host memory, contains it and its ancestors."""
        for edge in self.path_to_root():
            rows = edge.slot_counts if in_slot else edge.host_counts
            rows[row] = rows.get(row, 0) + 1

    def uncount(self, row: int, *, in_slot: bool) -> list[PrefixEdge]:
        """One such prompt less; returns the edges that no other of the row contains."""
        left: list[PrefixEdge] = []
        for edge in self.path_to_root():
            rows = edge.slot_counts if in_slot else edge.host_counts
            if rows[row] > 1:
                rows[row] -= 1
            else:
                del rows[row]
                left.append(edge)
        return left

    def add_end(self, held: CachedPrompt) -> None:
        """This prompt, whose tokens a node has reported, ends here."""
        if held.ends_on_block:
            self.reported_tokens = held.prompt_tokens
        self.ending_here[held.row] = held

    def split(self, at: int) -> PrefixEdge:
        """Keep the blocks from `at` on; returns a new edge, the parent, with those before."""
        cut = at - self.start
        front = PrefixEdge(
            self.parent,
            self.start,
            self.blocks[:cut],
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


# Least share of a request's prompt that a slot's prompt must have for the slot to be chosen for it
# (`--slot-prompt-similarity`).
SLOT_SIMILARITY = 0.1
# If so much of its own prompt is kept, a slot is not saved to host memory, and host memory is not
# searched.
SLOT_KEPT_SHARE = 0.5
# Least share of a prompt in host memory that must be kept for it to be loaded.
HOST_LOADED_SHARE = 0.25
# Running requests beyond twice a node's slots; the oldest ones beyond that are forgotten.
EXTRA_RUNNING_PROMPTS = 16
LEAST_PREDICTION = 64.0  # tokens; shorter predictions prove nothing
FAILED_PREDICTION_SHARE = 0.1  # a prediction of which less than this share came true has failed
# Failed predictions in a row after which the node is assumed to cache nothing.
MOST_FAILED_PREDICTIONS = 2
# Rows whose host memory is searched for one prompt; for others the tree's answer is taken.
LEAST_HOST_LOOKUP_ROWS, MOST_HOST_LOOKUP_ROWS = 4, 8
# First guess of what a node's host memory keeps: llama.cpp's default of 8 GiB, at the 128 KiB a
# token of models of 7 to 8 billion parameters (32 layers, 8 KV heads of 128, 16 bits).
DEFAULT_HOST_TOKENS = 65_536.0
LEAST_HOST_TOKENS, MOST_HOST_TOKENS = 4096.0, 1_048_576.0  # tokens between which the guess moves
MOST_HOST_PROMPTS = 96  # prompts of one node's host memory that are modelled
MOST_HOST_BLOCKS = 4096  # blocks of one node's host memory that are modelled
MOST_COMPARED_PROMPTS = 32  # running requests that one prompt is compared with
MOST_HIT_PREFIXES = 16  # prefixes of one node whose hits are counted: the last ones that had any


class CacheLookup(NamedTuple):
    """What the fleet caches of one prompt."""

    tokens: float
    """The whole prompt's tokens: as reported for what some node has read, estimated for the rest.
    """
    cached: dict[int, float]
    """For each row that caches some of it: tokens that the node would not have to read."""
    pending: dict[int, float]
    """For each row that reads some of it now: tokens that it will cache when it has done so."""


class KeptPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A cached prompt as it outlives the process."""

    blocks: bytes  # 64 bits each, little-endian
    prompt_tokens: Annotated[float, msgspec.Meta(ge=1, le=1e9)]
    answer_tokens: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    ends_on_block: bool

    @classmethod
    def of(cls, held: CachedPrompt) -> KeptPrompt:
        """The prompt in this form."""
        blocks = held.blocks.tobytes()
        return cls(blocks, held.prompt_tokens, held.answer_tokens, held.ends_on_block)


@dataclass(slots=True)
class PrefixHits:
    """What one node had cached of prompts with a common beginning, since the first such hit."""

    requests: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    length: float = math.inf
    """The least tokens that a hit has found: what all of them have in common."""


@dataclass(slots=True)
class RunningPrompt:
    """A request on a node, and what was predicted of it."""

    prompt: PromptKey
    predicted: float  # tokens that the node would not have to read
    host_depth: float | None = None
    """Tokens in host memory down to the prompt that it loaded from there; None: it loaded none."""
    previous_prompt: float = 0.0  # tokens of the prompt whose conversation it continues
    previous_answer: float = 0.0  # tokens of that prompt's answer


class CacheChoice(NamedTuple):
    """What llama.cpp would choose for a prompt."""

    slot: CachedPrompt | None  # the slot's prompt; None: the slot is empty, or none is idle
    loaded: CachedPrompt | None  # the prompt that is loaded from host memory
    spared: float  # tokens that need not be read


@dataclass(slots=True)
class PromptMatch:
    """One prompt against the tree."""

    prompt: PromptKey
    total: float  # the whole prompt's tokens
    agreed: dict[PrefixEdge, float]
    """For each edge on its path: tokens up to where the prompt agrees with it."""
    passed: set[PrefixEdge]  # edges that the prompt agrees with to their end, and goes on
    choices: dict[int, CacheChoice] = field(
        default_factory=dict
    )  # by row, as far as they are known


class FleetPromptCache:
    """The prompt caches of all nodes, as predicted. A row is a number that the caller gives a node.

    A row that was never sized is no error: it caches nothing.
    """

    def __init__(self) -> None:
        self.tree = PromptTree()
        self.nodes: dict[int, NodePromptCache] = {}  # by row
        self._reading = defaultdict[int, dict[tuple[int, int], PromptKey]](dict)
        """Prompts of running requests: by the first block, then by row and the prompt's `id`."""
        self._latest: PromptMatch | None = None
        """Of the last lookup, unless something has changed since: its request is placed next."""

    def resize(self, row: int, slots: int) -> None:
        """A node has so many slots."""
        if (node := self.nodes.get(row)) is None:
            self.nodes[row] = NodePromptCache(self.tree, row, max(1, slots))
            return
        self._latest = None
        node.resize(max(1, slots))
        self._forget_excess(row, node)

    def forget_node(self, row: int) -> None:
        """The node has another server, or is gone: it caches nothing."""
        if (node := self.nodes.pop(row, None)) is not None:
            self._latest = None
            for key in list(node.running):
                self._stop(row, node, key)
            node.clear()

    def lookup(self, prompt: PromptKey) -> CacheLookup:
        """The tokens of this prompt that each row would find in its cache now."""
        self._latest = match = self._match(prompt)
        nodes = self.nodes
        most = max(0.0, match.total - 1.0)  # the last token is always read
        cached: dict[int, float] = {}
        for edge, tokens in match.agreed.items():
            known = min(most, tokens)
            if edge.host_counts:
                cached.update(dict.fromkeys(edge.host_counts, known))
            if edge.slot_counts:
                cached.update(dict.fromkeys(edge.slot_counts, known))
            if edge.ending_here and edge in match.passed:
                for row, held in edge.ending_here.items():
                    cached[row] = min(nodes[row].reusable_tokens(held), most)
        for row in _rows_to_search(match):
            match.choices[row] = choice = nodes[row].choose(match)
            if choice.spared > 0.0:
                cached[row] = min(choice.spared, most)
            else:
                del cached[row]
        if prompt.omits_volatile:
            cached = {row: tokens * nodes[row].volatile_share for row, tokens in cached.items()}
        return CacheLookup(match.total, cached, self._pending_tokens(prompt, match.total))

    def request_placed(self, row: int, prompt: PromptKey) -> None:
        """A request starts on a node: it takes over a slot there, and the slot's prompt."""
        node = self.nodes.get(row)
        if node is None or id(prompt) in node.running:
            return
        match = self._latest
        if match is None or match.prompt is not prompt:
            match = self._match(prompt)
        self._latest = None
        node.start(match, match.choices.get(row) or node.choose(match))
        if prompt.blocks:
            self._reading[prompt.blocks[0]][row, id(prompt)] = prompt
        self._forget_excess(row, node)

    def request_finished(
        self,
        row: int,
        prompt: PromptKey,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
        caller: str = "",
    ) -> None:
        """A request ended and reported its usage: its slot holds prompt and answer now."""
        node = self.nodes.get(row)
        running = None if node is None else self._stop(row, node, id(prompt))
        if node is None or running is None or not 1 <= prompt_tokens < math.inf:
            return
        if 0 <= cached_tokens <= prompt_tokens:
            node.learn(running, cached_tokens)
        answer = completion_tokens if 0 <= completion_tokens < math.inf else 0.0
        held = CachedPrompt(row, None, prompt_tokens, answer, prompt.ends_on_block, caller=caller)
        node.take_in(held, prompt.blocks)
        if 0 <= cached_tokens <= prompt_tokens and prompt.blocks:
            node.count_hit(prompt.blocks[0], prompt_tokens, cached_tokens)

    def request_dropped(self, row: int, prompt: PromptKey) -> None:
        """A request ended without usage: it is unknown what its slot holds."""
        if (node := self.nodes.get(row)) is not None:
            self._stop(row, node, id(prompt))

    def export(self, row: int) -> Iterator[tuple[int, CachedPrompt]]:
        """The prompts that a node caches, the longest cached first: each with its last block."""
        node = self.nodes.get(row)
        for held in [] if node is None else [*node.host_prompts, *node.slot_prompts]:
            if held.leaf is not None:
                yield held.leaf.blocks[-1], held

    def restore(self, row: int, kept: KeptPrompt, caller: str) -> None:
        """A node has this prompt in its cache, after those restored before.

        It goes where it would be had it been answered now. Raises: ValueError.
        """
        node, blocks = self.nodes.get(row), array("q")
        blocks.frombytes(kept.blocks)
        if node is None or not blocks:
            return
        held = CachedPrompt(
            row, None, kept.prompt_tokens, kept.answer_tokens, kept.ends_on_block, caller=caller
        )
        self._latest = None
        node.take_in(held, tuple(blocks))

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Forget the prompts of the callers that are gone."""
        self._latest = None
        for node in self.nodes.values():
            for held in {**node.slot_prompts, **node.host_prompts}:
                if held.caller and is_gone(held.caller):
                    node.evict(held)

    def _match(self, prompt: PromptKey) -> PromptMatch:
        """Where the prompt agrees with cached ones, in tokens: reported, else in proportion."""
        blocks = prompt.blocks
        estimate = max(1.0, prompt.tokens) if prompt.tokens < math.inf else 1.0
        known = known_share = 0.0
        agreed: dict[PrefixEdge, float] = {}
        passed: set[PrefixEdge] = set()
        for edge, at, to_end in self.tree.path(blocks):
            share = prompt.share_of(at)
            tokens = known + (share - known_share) * estimate
            if to_end:
                if edge.reported_tokens:
                    known = tokens = edge.reported_tokens
                    known_share = share
                if at < len(blocks):
                    passed.add(edge)
            agreed[edge] = tokens
        total = max(1.0, known + (1.0 - known_share) * estimate)
        return PromptMatch(prompt, total, agreed, passed)

    def _stop(self, row: int, node: NodePromptCache, key: int) -> RunningPrompt | None:
        self._latest = None
        running = node.running.pop(key, None)
        if running is not None and (blocks := running.prompt.blocks):
            del self._reading[blocks[0]][row, key]
            if not self._reading[blocks[0]]:
                del self._reading[blocks[0]]
        return running

    def _pending_tokens(self, prompt: PromptKey, tokens: float) -> dict[int, float]:
        """For each row: how many of the prompt's `tokens` its running requests will cache."""
        blocks, shared = prompt.blocks, dict[int, int]()
        running = self._reading.get(blocks[0], {}) if blocks else {}
        for (row, _), other in islice(running.items(), MOST_COMPARED_PROMPTS):
            count = min(len(blocks), len(other.blocks))
            if blocks[count - 1] != other.blocks[count - 1]:
                count = common_blocks(blocks, other.blocks)
            if count > shared.get(row, 0):
                shared[row] = count
        known = {row: prompt.share_of(count) * tokens for row, count in shared.items()}
        return {row: found for row, found in known.items() if found > 0.0}

    def _forget_excess(self, row: int, node: NodePromptCache) -> None:
        while len(node.running) > 2 * node.slots + EXTRA_RUNNING_PROMPTS:
            self._stop(row, node, next(iter(node.running)))
        node.evict_excess()


def _rows_to_search(match: PromptMatch) -> set[int]:
    """Some rows that would have to load their longest match from host memory.

    For a prefix that many nodes share the search makes no difference, and would take long.
    """
    found: set[int] = set()
    for edge in reversed(match.agreed):
        if not edge.host_counts:
            continue
        if len(edge.host_counts) > MOST_HOST_LOOKUP_ROWS:
            break
        found.update(edge.host_counts.keys() - edge.slot_counts.keys())
        if len(found) >= LEAST_HOST_LOOKUP_ROWS:
            break
    return found


@dataclass(slots=True)
class NodePromptCache:
    """The prompt cache of one node, as predicted."""

    tree: PromptTree
    row: int
    slots: int
    host_capacity: float = DEFAULT_HOST_TOKENS  # tokens that host memory is believed to keep
    slot_prompts: dict[CachedPrompt, None] = field(default_factory=dict)
    """Prompts of idle slots, the least recently used first."""
    host_prompts: dict[CachedPrompt, None] = field(default_factory=dict)
    """Prompts in host memory, oldest first."""
    host_used: float = 0.0
    host_blocks: int = 0
    running: dict[int, RunningPrompt] = field(default_factory=dict)
    """By the prompt's `id`, oldest first."""
    answer_share: float = 1.0
    """The share of an answer that the next turn finds: less if reasoning is left out of it."""
    volatile_share: float = 1.0
    """The share of a prediction that comes true for prompts whose key omits volatile lines: 1 if
    the server ignores them."""
    failures: int = 0  # failed predictions in a row
    changes: int = 0  # prompts that have come or gone
    hits: dict[int, PrefixHits] = field(default_factory=dict)
    """By the first block of prompts, the one that was used least recently first."""

    def contents(self) -> tuple[int, int]:
        """Prompts in idle slots and in host memory, and their tokens."""
        tokens = sum(held.tokens for held in self.slot_prompts) + self.host_used
        return len(self.slot_prompts) + len(self.host_prompts), int(tokens)

    def take_in(self, held: CachedPrompt, blocks: tuple[int, ...]) -> None:
        """A slot holds this prompt, of these blocks, now."""
        self.tree.add(held, blocks)
        self.slot_prompts[held] = None
        self.changes += 1
        self.evict_excess()

    def resize(self, slots: int) -> None:
        """The node has so many slots."""
        self.slots = slots

    def reusable_tokens(self, held: CachedPrompt) -> float:
        """Tokens of this prompt and its answer that the next turn finds."""
        found = self.answer_share if held.ends_on_block else 0.0
        return held.prompt_tokens + held.answer_tokens * found

    def common_tokens(self, held: CachedPrompt, match: PromptMatch) -> float:
        """Tokens that a cached prompt has in common with the matched one."""
        edge, agreed = held.leaf, match.agreed
        if edge in match.passed:
            return self.reusable_tokens(held)
        while edge is not None:
            if edge in agreed:
                return agreed[edge]
            edge = edge.parent
        return 0.0

    def most_in_common(self, match: PromptMatch, *, in_slot: bool) -> float:
        """A bound on `common_tokens` of all prompts in slots, or in host memory."""
        most, row = 0.0, self.row
        for edge, tokens in match.agreed.items():
            if row in (edge.slot_counts if in_slot else edge.host_counts):
                if edge.ending_here and edge in match.passed:
                    return math.inf  # A prompt that ends here counts with its answer.
                most = max(most, tokens)
        return most

    def choose(self, match: PromptMatch) -> CacheChoice:
        """What llama.cpp would choose for this prompt."""
        slot: CachedPrompt | None = None
        spared = SLOT_SIMILARITY * match.total
        most = self.most_in_common(match, in_slot=True)
        for held in self.slot_prompts if most > spared else ():
            common = self.common_tokens(held, match)
            if common > spared:
                slot, spared = held, common
                if common >= most:
                    break
        if slot is not None:
            if spared >= SLOT_KEPT_SHARE * slot.tokens:
                return CacheChoice(slot, None, spared)
        elif len(self.slot_prompts) + len(self.running) >= self.slots and self.slot_prompts:
            slot = next(iter(self.slot_prompts))
            spared = self.common_tokens(slot, match)
        else:
            spared = 0.0
        kept_share = spared / slot.tokens if slot is not None else -1.0
        loaded: CachedPrompt | None = None
        if self.most_in_common(match, in_slot=False) > spared:
            for held in self.host_prompts:
                common = self.common_tokens(held, match)
                if common > spared:
                    share = common / held.tokens
                    if share > kept_share and share >= HOST_LOADED_SHARE:
                        loaded, spared, kept_share = held, common, share
        return CacheChoice(slot, loaded, spared)

    def start(self, match: PromptMatch, choice: CacheChoice) -> None:
        """A request starts: its slot's prompt is kept, saved to host memory or replaced by one."""
        slot, loaded, spared = choice
        running = RunningPrompt(match.prompt, min(spared, match.total))
        source = slot if loaded is None else loaded
        if source is not None and source.leaf in match.passed and source.ends_on_block:
            running.previous_prompt = source.prompt_tokens
            running.previous_answer = source.answer_tokens
        if loaded is not None:
            # From the newest prompt down to this one.
            kept = dropwhile(lambda held: held is not loaded, self.host_prompts)
            running.host_depth = sum(held.tokens for held in kept)
            self.leave_host(loaded)
        if slot is not None:
            if loaded is not None or spared < SLOT_KEPT_SHARE * slot.tokens:
                self.copy_to_host(slot)
            self.leave_slot(slot)
        if self.host_capacity > 0.0:
            for held in self.slot_prompts:
                self.copy_to_host(held)  # llama.cpp copies those of idle slots when work begins.
        self.running[id(match.prompt)] = running

    def learn(self, running: RunningPrompt, cached: float) -> None:
        """Compare a prediction with the tokens that the node reported as cached."""
        predicted = running.predicted
        if running.prompt.omits_volatile:
            if predicted >= LEAST_PREDICTION:
                self.volatile_share += 0.5 * (min(1.0, cached / predicted) - self.volatile_share)
            return
        answer = running.previous_answer
        if answer >= LEAST_PREDICTION and cached >= 0.9 * running.previous_prompt:
            share = min(1.0, max(0.0, cached - running.previous_prompt) / answer)
            self.answer_share += 0.25 * (share - self.answer_share)
        if (
            cached > 2.0 * predicted + LEAST_PREDICTION
            and self.host_used > 0.5 * self.host_capacity
        ):
            # The server still has a prompt that was evicted here.
            self.host_capacity = min(MOST_HOST_TOKENS, 1.1 * self.host_capacity)
        if predicted < LEAST_PREDICTION:
            return
        if running.host_depth is not None:
            if cached >= SLOT_KEPT_SHARE * predicted:
                self.host_capacity = max(
                    self.host_capacity, min(MOST_HOST_TOKENS, 1.25 * running.host_depth)
                )
            else:
                # The server has evicted it, and so all older prompts.
                self.host_capacity = max(
                    LEAST_HOST_TOKENS, min(self.host_capacity, 0.9 * running.host_depth)
                )
        if cached >= FAILED_PREDICTION_SHARE * predicted:
            self.failures = 0
        else:
            self.failures += 1
            if self.failures >= MOST_FAILED_PREDICTIONS:
                self.clear()
                self.failures = 0

    def count_hit(self, first: int, prompt_tokens: float, cached: float) -> None:
        """A prompt that begins with this block found so much in the cache, or nothing."""
        is_hit = cached >= LEAST_PREDICTION
        found = self.hits.pop(first, None) or (PrefixHits() if is_hit else None)
        if found is None:
            return
        self.hits[first] = found  # The last used is the last one.
        if len(self.hits) > MOST_HIT_PREFIXES:
            del self.hits[next(iter(self.hits))]
        found.requests += 1
        found.prompt_tokens += prompt_tokens
        found.cached_tokens += cached
        found.length = min(found.length, cached) if is_hit else found.length

    def copy_to_host(self, held: CachedPrompt) -> None:
        """Host memory keeps a slot's prompt, and none of its prefixes.

        Not if it has it, alone or as the prefix of another.
        """
        leaf = held.leaf
        if leaf is None or self.row in leaf.host_counts or self.host_capacity <= 0.0:
            return
        held.copy_to_host()
        for edge in leaf.path_to_root():
            shorter = edge.ending_here.get(self.row)
            if shorter is not None and shorter.in_host and shorter is not held:
                self.leave_host(shorter)
        self.host_prompts[held] = None
        self.host_used += held.tokens
        self.host_blocks += leaf.end

    def leave_slot(self, held: CachedPrompt) -> None:
        """A prompt leaves its slot."""
        self.changes += 1
        del self.slot_prompts[held]
        self.tree.remove(held, in_slot=True)

    def leave_host(self, held: CachedPrompt) -> None:
        """A prompt leaves host memory."""
        self.changes += 1
        del self.host_prompts[held]
        self.host_used -= held.tokens
        self.host_blocks -= 0 if held.leaf is None else held.leaf.end
        self.tree.remove(held, in_slot=False)

    def evict(self, held: CachedPrompt) -> None:
        """A prompt is cached no more."""
        if held.in_slot:
            self.leave_slot(held)
        if held.in_host:
            self.leave_host(held)

    def evict_excess(self) -> None:
        """Evict the prompts that no longer fit."""
        idle_slots = max(0, self.slots - len(self.running))
        while len(self.slot_prompts) > idle_slots:
            held = next(iter(self.slot_prompts))
            self.copy_to_host(held)
            self.leave_slot(held)
        while self.host_prompts and (
            self.host_used > self.host_capacity
            or len(self.host_prompts) > MOST_HOST_PROMPTS
            or self.host_blocks > MOST_HOST_BLOCKS
        ):
            self.leave_host(next(iter(self.host_prompts)))

    def clear(self) -> None:
        """The node caches nothing any more."""
        for held in {**self.slot_prompts, **self.host_prompts}:
            self.evict(held)


def common_blocks(blocks: Sequence[int], others: Sequence[int], start: int = 0) -> int:
    """How many blocks agree with the `others` from `start` on, from the beginning.

    A block stands for all before it, so that a binary search finds it.
    """
    least, most = 0, min(len(blocks), len(others) - start)
    while least < most:
        middle = (least + most + 1) // 2
        if blocks[middle - 1] == others[start + middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
