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
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.fleet.coming import Running
from gateway.fleet.kept import HOST_TOKENS, LEAST_HOST, MOST_HOST, Kept
from gateway.fleet.prefixes import Edge, Held, Prefixes, Prompt

__all__ = ["Memory", "Prompt", "Recall"]

SIMILAR = 0.1
"""A slot's prompt has so much of a request's in common, or is as good as any other
(`--slot-prompt-similarity`)."""
SPARED = 0.5
"""With so much of its own left, a slot's prompt isn't saved, and host memory isn't looked into."""
LOADED = 0.25
"""With less of its own left, a prompt in host memory is left alone."""

SPARE_RUNNING = 16
"""Requests more than twice a node's slots that may run there without being forgotten."""

WORTH_LEARNING = 64.0
"""Tokens; from shorter predictions nothing is learnt."""
FAILED = 0.1  # of a prediction: if less came true it has failed as a whole
MOST_FAILURES = 2
"""In a row; then the node remembers nothing of what is believed of it."""
EXACT_ROWS, MANY_ROWS = 4, 8
"""Rows whose host memory is looked through for one prompt; for others the tree's word is taken."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What the fleet remembers of one prompt."""

    tokens: float
    """The whole prompt's tokens: as told for what some node has read, as estimated for the rest."""
    cached: dict[int, float]
    """For each row that remembers some of it, tokens it would not have to read."""
    coming: Mapping[int, float] = field(default_factory=dict)
    """For each row that reads some of it now, tokens it will know when that has ended."""


@dataclass(slots=True)
class _Running:
    """A request on a node, and what was believed of it."""

    prompt: Prompt
    predicted: float
    depth: float | None = None
    """Tokens in host memory down to the prompt it took from there; None: it took none."""
    forerunner: float = 0.0
    """Tokens of the prompt that it goes on after."""
    answer: float = 0.0
    """And of that one's answer."""


@dataclass(slots=True)
class _Node:
    slots: int
    kept: Kept
    running: dict[int, _Running] = field(default_factory=dict)
    """By the prompt's `id`."""
    answers: float = 1.0
    """The share of an answer that the next turn finds: less where thoughts are left out."""
    ignores: float = 1.0
    """The share of its cache that an unsure prompt finds: 1 where the server ignores the lines."""
    failures: int = 0


@dataclass(slots=True)
class _View:
    """One prompt against the tree."""

    total: float
    """The whole prompt's tokens."""
    agreed: dict[Edge, float]
    """Tokens up to where it agrees with each edge of its way."""
    over: set[Edge]
    """Edges that it agrees with to their end and beyond."""


class Memory:
    """What is believed of all nodes' prompt caches. Rows are small numbers that the caller gives.

    A row that was never sized is no error: nothing is known of it.
    """

    def __init__(self) -> None:
        self._tree = Prefixes()
        self._nodes: dict[int, _Node] = {}
        self._running = Running()

    def resize(self, row: int, slots: int, host: float | None = None) -> None:
        """A node has so many slots, and host memory for `host` tokens of prompts.

        None: nobody knows, and it is learnt; 0: there is none.
        """
        tokens = HOST_TOKENS if host is None else host
        node = self._nodes.get(row)
        if node is None:
            self._nodes[row] = _Node(max(1, slots), Kept(self._tree, row, tokens))
            return
        node.slots = max(1, slots)
        if host is not None:
            node.kept.host_tokens = host
        self._settle(row, node)

    def forget(self, row: int) -> None:
        """The server is another one, or gone: nothing of the row is known any more."""
        node = self._nodes.pop(row, None)
        if node is not None:
            for number in list(node.running):
                self._ended(row, node, number)
            node.kept.empty()

    def recall(self, prompt: Prompt) -> Recall:
        """What each row would find of this prompt if it were placed there now."""
        view = self._view(prompt)
        most = max(0.0, view.total - 1.0)  # the last token is always read
        cached: dict[int, float] = {}
        for edge, tokens in view.agreed.items():
            known = min(tokens, most)
            cached.update(dict.fromkeys(edge.host, known))
            cached.update(dict.fromkeys(edge.idle, known))
            if edge.ending and edge in view.over:
                for row, held in edge.ending.items():
                    cached[row] = min(self._kept(held), most)
        for row in _host_only(view):
            spared = self._chosen(self._nodes[row], view)[2]
            if spared > 0.0:
                cached[row] = min(spared, most)
            else:
                del cached[row]
        if prompt.unsure:
            nodes = self._nodes
            cached = {row: tokens * nodes[row].ignores for row, tokens in cached.items()}
        return Recall(view.total, cached, self._running.coming(prompt, view.total))

    def cached(self, prompt: Prompt) -> dict[int, float]:
        """For each row that remembers some of this prompt, tokens it would not have to read."""
        return self.recall(prompt).cached

    def placed(self, row: int, prompt: Prompt) -> None:
        """A request starts on a node: it takes over a slot there, and what the slot holds."""
        node = self._nodes.get(row)
        if node is None or id(prompt) in node.running:
            return
        view = self._view(prompt)
        slot, loaded, cached = self._chosen(node, view)
        running = _Running(prompt, min(cached, view.total))
        source = slot if loaded is None else loaded
        if source is not None and source.leaf in view.over and source.continues:
            running.forerunner, running.answer = source.prompt, source.answer
        if loaded is not None:
            running.depth = node.kept.depth(loaded)
            node.kept.drop(loaded)
        if slot is not None:
            if loaded is None and self._common(slot, view) >= SPARED * slot.tokens:
                node.kept.drop(slot)
            else:
                node.kept.save(slot)
        node.kept.copy_idle()
        node.running[id(prompt)] = running
        self._running.add(row, prompt)
        self._settle(row, node)

    def finished(
        self,
        row: int,
        prompt: Prompt,
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
        held = Held(row, None, prompt_tokens, answer, prompt.whole)
        self._tree.add(held, prompt.blocks)
        node.kept.idle[held] = None
        self._settle(row, node)

    def dropped(self, row: int, prompt: Prompt, written: float = 0.0) -> None:
        """A request ended without figures, after `written` tokens of its answer.

        Without one it isn't known what its slot holds; with one the prompt has been read.
        """
        node = self._nodes.get(row)
        running = None if node is None else self._ended(row, node, id(prompt))
        if node is None or running is None or not 0 < written < math.inf:
            return
        held = Held(row, None, self._view(prompt).total, written, prompt.whole)
        self._tree.add(held, prompt.blocks, told=False)
        node.kept.idle[held] = None
        self._settle(row, node)

    def _ended(self, row: int, node: _Node, number: int) -> _Running | None:
        """Take it from what runs."""
        running = node.running.pop(number, None)
        if running is not None:
            self._running.remove(row, running.prompt)
        return running

    def _view(self, prompt: Prompt) -> _View:
        blocks = prompt.blocks
        estimate = max(1.0, prompt.tokens) if prompt.tokens < math.inf else 1.0
        known = told = 0.0
        agreed: dict[Edge, float] = {}
        over: set[Edge] = set()
        for edge, at in self._tree.walk(blocks).items():
            share = prompt.measured(at)
            tokens = known + (share - told) * estimate
            if at == edge.end:
                if edge.tokens:
                    known, told, tokens = edge.tokens, share, edge.tokens
                if at < len(blocks):
                    over.add(edge)
            agreed[edge] = tokens
        return _View(max(1.0, known + (1.0 - told) * estimate), agreed, over)

    def _kept(self, held: Held) -> float:
        """Tokens that the next turn after a prompt finds of it."""
        if not held.continues:
            return held.prompt
        return held.prompt + held.answer * self._nodes[held.row].answers

    def _common(self, held: Held, view: _View) -> float:
        """Tokens that what a node keeps has in common with a prompt."""
        leaf = held.leaf
        if leaf is None:
            return 0.0
        if leaf in view.over:
            return self._kept(held)
        agreed = view.agreed
        for edge in leaf.up():
            if edge in agreed:
                return agreed[edge]
        return 0.0

    def _chosen(self, node: _Node, view: _View) -> tuple[Held | None, Held | None, float]:
        """The slot's prompt and the host memory's that llama.cpp would take, and what they spare.

        No slot's prompt: the slot is empty, or none is known to be idle.
        """
        slot: Held | None = None
        spared = SIMILAR * view.total
        for held in node.kept.idle:
            common = self._common(held, view)
            if common > spared:
                slot, spared = held, common
        if slot is not None:
            if spared >= SPARED * slot.tokens:
                return slot, None, spared
        elif len(node.kept.idle) + len(node.running) >= node.slots and node.kept.idle:
            slot = next(iter(node.kept.idle))
            spared = self._common(slot, view)
        else:
            spared = 0.0
        kept = spared / slot.tokens if slot is not None else -1.0
        loaded: Held | None = None
        for held in node.kept.host:
            common = self._common(held, view)
            share = common / held.tokens
            if common > spared and share > kept and share >= LOADED:
                loaded, spared, kept = held, common, share
        return slot, loaded, spared

    def _learn(self, node: _Node, running: _Running, cached: float) -> None:
        """Compare what was believed with what came back."""
        predicted = running.predicted
        if running.prompt.unsure:
            if predicted >= WORTH_LEARNING:
                node.ignores += 0.5 * (min(1.0, cached / predicted) - node.ignores)
            return
        if running.answer >= WORTH_LEARNING and cached >= 0.9 * running.forerunner:
            share = min(1.0, max(0.0, cached - running.forerunner) / running.answer)
            node.answers += 0.25 * (share - node.answers)
        if (
            cached > 2.0 * predicted + WORTH_LEARNING
            and node.kept.used > 0.5 * node.kept.host_tokens
        ):
            # The server still has what was let go of here.
            node.kept.host_tokens = min(MOST_HOST, 1.1 * node.kept.host_tokens)
        if predicted < WORTH_LEARNING:
            return
        if running.depth is not None:
            if cached >= SPARED * predicted:
                node.kept.host_tokens = max(
                    node.kept.host_tokens, min(MOST_HOST, 1.25 * running.depth)
                )
            else:
                # What is older than a prompt that is gone is gone as well.
                node.kept.host_tokens = max(
                    LEAST_HOST, min(node.kept.host_tokens, 0.9 * running.depth)
                )
        if cached >= FAILED * predicted:
            node.failures = 0
        else:
            node.failures += 1
            if node.failures >= MOST_FAILURES:
                node.kept.empty()
                node.failures = 0

    def _settle(self, row: int, node: _Node) -> None:
        """Let go of what a node can't hold."""
        while len(node.running) > 2 * node.slots + SPARE_RUNNING:
            self._ended(row, node, next(iter(node.running)))
        node.kept.settle(node.slots - len(node.running))


def _host_only(view: _View) -> set[int]:
    """Some rows that would have to load what they know best of a prompt from host memory.

    Of a beginning that many share it makes no difference, and it would take long to tell.
    """
    found: set[int] = set()
    for edge in reversed(view.agreed):
        if len(edge.host) > MANY_ROWS:
            break
        found.update(edge.host.keys() - edge.idle.keys())
        if len(found) >= EXACT_ROWS:
            break
    return found
