"""Why no line of a batch runs, since when, and when one is expected to.

`why_lines_wait` is the policy, on plain facts. `BatchWaits` gathers the facts from the feeder and
remembers since when no line of a batch has been at a node. It knows that from its own process: what
was before its start it can't tell.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.lease import BatchRoom
from gateway.stored.batch_rows import Ahead, Batch
from gateway.stored.claims import BatchState
from gateway.stored.feeder import Feeder
from gateway.stored.feeding import rows_to_offer
from gateway.stored.runner import RequestTarget

# Seconds without a line at a node after which a batch waits: one line follows the other sooner.
PATIENCE = 3.0
# Seconds ahead at which it is looked whether a slot is free by then; the last is the farthest.
HORIZONS = (1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
# States of nodes that have their model, or wake up with it.
_UP = frozenset({"ready", "degraded", "mute", "sleeping"})
# States of a router's model that can be loaded, or was tried.
_ON_DEMAND = frozenset({"unloaded", "unloading", "failed"})

MESSAGES = {
    "validating": "Its input is being read.",
    "paused": "It is paused: resume it.",
    "key_storage_full": "Its key keeps as much as it may: delete files, responses or batches.",
    "storage_full": "The gateway's folder or disk is full: the operator makes room.",
    "storage_unavailable": "The gateway's folder can't be used now: its log says why.",
    "restored": "The store came out of a backup while it was unfinished: resume it.",
    "folder_elsewhere": "Its files are in the folder of a member that does not lead the cluster.",
    "folder_gone": "Its files are in a folder that no member of the cluster has now.",
    "key_limit": "Its key has reached one of its limits.",
    "deadline": "Nodes can't read what is left of it before its deadline.",
    "nodes_failed": "Nodes have failed its lines, which are run again after a pause.",
    "model_paused": "An operator has paused its model.",
    "model_loading": "Its model is being loaded.",
    "model_not_loaded": "Its model is loaded nowhere; it is loaded when there is room for it.",
    "no_node": "No node that serves its model is up.",
    "slots_reserved": "All slots of its model are reserved for callers' requests.",
    "callers_first": "Callers' requests go first: they have the slots, or wait for them.",
    "other_batches": "Lines of other batches have the slots that batches may use.",
}
"""What a batch waits for, by the word of the reason."""


class BatchWait(NamedTuple):
    """What a batch waits for. Times are Unix seconds."""

    reason: str  # a word of `MESSAGES`
    since: float | None  # None: not known here
    until: float | None = None  # when that is over; None: nobody knows

    @property
    def message(self) -> str:
        """The reason as a sentence."""
        return MESSAGES.get(self.reason, "It waits.")


class ServingNodes(NamedTuple):
    """The nodes that serve a model."""

    states: Mapping[str, int]  # how many are in each state
    prefill_tps: float  # prompt tokens a second of all that are up
    decode_tps: float  # tokens a second that all their slots write together


def why_lines_wait(
    nodes: ServingNodes, room: BatchRoom, running: int, *, model_paused: bool = False
) -> str:
    """The word for what lines wait for that may run, of a batch none of which does.

    `running`: lines of other batches at these nodes; `model_paused`: an operator has paused it.
    """
    states = {state for state, number in nodes.states.items() if number}
    if model_paused:
        return "model_paused"
    if not states & _UP:
        if "loading" in states:
            return "model_loading"
        return "model_not_loaded" if states & _ON_DEMAND else "no_node"
    if not room.slots:
        return "slots_reserved"
    return "other_batches" if running else "callers_first"


@dataclass(slots=True, eq=False)
class BatchWaits:
    """Why the batches of a folder wait. `now` gives Unix time."""

    feeder: Feeder
    nodes_of: Callable[[RequestTarget], ServingNodes]
    now: Callable[[], float]
    is_folder_there: Callable[[str], bool | None] = lambda _: None
    """Whether a member of the cluster has this folder; None: there is no cluster."""
    _idle_since: dict[str, float] = field(default_factory=dict)
    """Since when none of their lines is at a node, by batch."""

    def look(self, found: Iterable[Batch]) -> None:
        """Note which of all unfinished batches have a line at a node; to be called each second."""
        at_nodes, now = {batch for batch, _ in self.feeder.at_nodes()}, self.now()
        runnable = [one.id for one in found if _may_run(one)]
        self._idle_since = {
            id_: self._idle_since.get(id_, now) for id_ in runnable if id_ not in at_nodes
        }
        self.feeder.keep_put_off(runnable)

    async def of(self, found: Iterable[Batch]) -> list[BatchWait | None]:
        """What each of these waits for; None: it does not, or has ended."""
        at_nodes = self.feeder.at_nodes()
        busy = {batch for batch, _ in at_nodes}
        running = Counter(target for _, target in at_nodes)
        reasons: dict[RequestTarget, str] = {}
        waits: list[BatchWait | None] = []
        for batch in found:
            wait = self._standing(batch)
            since = self._idle_since.get(batch.id)
            is_idle = since is not None and self.now() - since >= PATIENCE
            if wait is None and is_idle and _may_run(batch) and batch.id not in busy:
                wait = self._put_off(batch, since)
                # Of several models any tells what they wait for.
                target = next(iter(self._targets_of(batch)), None) if wait is None else None
                if target is not None:
                    if target not in reasons:
                        reasons[target] = why_lines_wait(
                            self.nodes_of(target),
                            self.feeder.room(target, 0.0),
                            running[target],
                            model_paused=not target.model_names,
                        )
                        await asyncio.sleep(0)  # All nodes and all that waits were looked at.
                    wait = BatchWait(reasons[target], since)
            waits.append(wait)
        return waits

    async def outlook(self, batch: Batch, running: int) -> tuple[BatchWait | None, Ahead]:
        """What one batch waits for, and what it has before it.

        `running`: its lines that processes have claimed. Of those of others it is not known whether
        they are at a node: then it counts as running.
        """
        wait = None
        if running <= self.feeder.held_of(batch.id):
            (wait,) = await self.of([batch])
        starts_at, targets = None if wait is None else wait.until, self._targets_of(batch)
        if batch.state.ended or self._is_elsewhere(batch):
            return wait, Ahead(starts_at)
        if wait is not None and wait.reason in {"callers_first", "other_batches"}:
            # When a line is expected to get a slot, as far as what runs and waits now tells.
            for seconds in HORIZONS:
                if any(rows_to_offer(self.feeder.room(one, seconds), 0) > 0 for one in targets):
                    starts_at = self.now() + seconds
                    break
        # Of several models all nodes: each works on some of its lines.
        nodes = [self.nodes_of(one) for one in targets]
        return wait, Ahead(
            starts_at, sum(one.prefill_tps for one in nodes), sum(one.decode_tps for one in nodes)
        )

    def _standing(self, batch: Batch) -> BatchWait | None:
        """What it waits for that nobody's requests change."""
        if batch.state not in {BatchState.VALIDATING, BatchState.IN_PROGRESS}:
            return None
        if self._is_elsewhere(batch):
            # Without a cluster its own gateway alone knows whether it waits.
            is_there = self.is_folder_there(batch.folder)
            word = "folder_elsewhere" if is_there else "folder_gone"
            return None if is_there is None else BatchWait(word, None)
        if batch.paused_at is not None:
            return BatchWait(batch.pause_reason or "paused", batch.paused_at)
        if batch.state is BatchState.VALIDATING:
            return BatchWait("validating", batch.created_at)
        return None

    def _is_elsewhere(self, batch: Batch) -> bool:
        return batch.folder != (self.feeder.leases.storage.folder.id or batch.folder)

    def _put_off(self, batch: Batch, since: float | None) -> BatchWait | None:
        """What its lines wait for that may not run before a certain time."""
        if (seconds := self.feeder.seconds_paused(batch.owner)) > 0:
            return BatchWait("key_limit", since, self.now() + seconds)
        reason, until = self.feeder.put_off.get(batch.id, ("", 0.0))
        if reason in MESSAGES and until > self.now():
            return BatchWait(reason, since, until if reason == "nodes_failed" else None)
        return None

    def _targets_of(self, batch: Batch) -> set[RequestTarget]:
        """What may serve its lines; nothing: they will fail."""
        if found := self.feeder.targets_of(batch.id):
            return found
        target = self.feeder.runner.target_of(batch.owner, batch.endpoint, batch.model)
        return set() if target is None else {target}


def _may_run(batch: Batch) -> bool:
    return batch.state is BatchState.IN_PROGRESS and batch.paused_at is None
