"""What the store has for the feeder: read from time to time, and counted down with each claim."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.batches.claims import Pick
from gateway.batches.feeding import BatchWork, PrefixGroup, Want
from gateway.batches.feeding_rows import ReadPrefixes, ReadWaiting, Waiting
from gateway.batches.request_rows import StoredRow
from gateway.batches.runner import RequestTarget
from gateway.batches.states import RequestKind
from gateway.store.store import Store

READ_SECONDS = 2.0
"""Seconds after which it is read again what waits."""

IDLE_SECONDS = 5.0
"""The same, while nothing waits that is known of."""

READ_SHARE = 20
"""Reading what waits takes at most one part in so many of the time."""

PREFIX_SECONDS = 10.0
"""Seconds after which the groups of a batch are read again."""

MOST_GROUPED = 8
"""Batches of one target whose groups are read: those that are next."""


class Targets(Protocol):
    """Knows what may serve a request; the runner."""

    def target_of(self, owner: str, path: str, model: str | None) -> RequestTarget | None:
        """None: it is refused without a node."""


@dataclass(slots=True, eq=False)
class Supply:
    """Lines that wait, by target. `clock` is monotonic, `now` gives Unix time."""

    store: Store
    targets: Targets
    clock: Callable[[], float]
    now: Callable[[], float]
    read_at: float = 0.0
    """When it is to be read again."""
    _works: dict[RequestTarget | None, dict[str, BatchWork]] = field(default_factory=dict)
    _classes: dict[str, str] = field(default_factory=dict)
    """The highest class of each batch's lines."""
    _models: dict[str, dict[str | None, RequestTarget | None]] = field(default_factory=dict)
    """The models of each batch with waiting lines, and where they go."""
    _prefixes: dict[str, tuple[float, tuple[PrefixGroup, ...]]] = field(default_factory=dict)
    """Groups of batches, and when they were read."""

    async def read(self, folder: str, kept: Iterable[str | None]) -> Waiting:
        """Read what waits; of the batches `kept` the rest is remembered. Raises: StoreError."""
        began = self.clock()
        waiting = await self.store.run(ReadWaiting(folder, self.now()), write=False)
        took = self.clock() - began
        pause = READ_SECONDS if waiting.groups else IDLE_SECONDS
        self.read_at = self.clock() + max(pause, took * READ_SHARE)
        works = defaultdict[RequestTarget | None, dict[str, BatchWork]](dict)
        self._models.clear()
        for group in waiting.groups:
            if group.kind is not RequestKind.LINE or group.batch is None:
                continue
            target = self.targets.target_of(group.owner, group.path, group.model)
            self._classes[group.batch] = group.class_
            self._models.setdefault(group.batch, {})[group.model] = target
            deadline = math.inf if group.nearest_deadline is None else group.nearest_deadline
            before = works[target].get(group.batch)
            rows = group.rows if before is None else group.rows + before.rows
            works[target][group.batch] = BatchWork(group.batch, group.owner, rows, deadline)
        self._works = dict(works)
        for batch in set(self._classes) - set(kept) - set(self._models):
            del self._classes[batch]
            self._prefixes.pop(batch, None)
        return waiting

    def read_soon(self, seconds: float = 0.0) -> None:
        """Read again within so many seconds: something has changed."""
        self.read_at = min(self.read_at, self.clock() + seconds)

    def known_targets(self) -> list[RequestTarget | None]:
        """Where something waits for."""
        return list(self._works)

    def works_of(self, target: RequestTarget | None) -> list[BatchWork]:
        """Batches with lines that wait for a target, as far as is known."""
        return [work for work in self._works.get(target, {}).values() if work.rows > 0]

    def class_of(self, batch: str | None) -> str:
        """The label of the highest class that the lines of a batch may have."""
        return self._classes.get(batch or "", "")

    async def with_groups(self, works: list[BatchWork], held: Mapping[str, int]) -> list[BatchWork]:
        """The same with the groups of those that are next. Raises: StoreError.

        `held`: batches that have claimed rows already.
        """
        works = sorted(works, key=lambda one: (one.batch not in held, one.deadline, one.batch))
        for work in works[:MOST_GROUPED]:
            known = self._prefixes.get(work.batch)
            if known is None or self.clock() - known[0] > PREFIX_SECONDS:
                groups = await self.store.run(ReadPrefixes(work.batch, self.now()), write=False)
                self._prefixes[work.batch] = self.clock(), groups
        return [
            replace(work, groups=self._prefixes.get(work.batch, (0.0, ()))[1]) for work in works
        ]

    def picks(self, target: RequestTarget | None, wants: Sequence[Want]) -> list[Pick]:
        """What to claim: of batches with several models, those that go to this target."""
        found: list[Pick] = []
        for want in wants:
            models = self._models.get(want.batch, {})
            if len(models) <= 1:
                found.append(Pick(want.rows, RequestKind.LINE, want.batch, prefix=want.prefix))
                continue
            chosen = [model for model, of_model in models.items() if of_model == target]
            found += [
                Pick(
                    max(1, want.rows // len(chosen)), RequestKind.LINE, want.batch,
                    model=model, prefix=want.prefix,
                )
                for model in chosen
            ]  # fmt: skip
        return found

    def count_claimed(
        self, target: RequestTarget | None, picks: Sequence[Pick], rows: Sequence[StoredRow]
    ) -> None:
        """What was claimed does not wait any more, nor what was asked for in vain."""
        claimed = Counter(row.batch for row in rows)
        of_group = Counter((row.batch, row.prefix) for row in rows)
        works = self._works.get(target, {})
        for batch in {pick.batch for pick in picks if pick.batch is not None}:
            if batch in works:
                left = works[batch].rows - claimed[batch] if claimed[batch] else 0
                works[batch] = replace(works[batch], rows=left)
            if batch in self._prefixes:
                read_at, groups = self._prefixes[batch]
                counted = (
                    group._replace(rows=group.rows - of_group[batch, group.prefix])
                    for group in groups
                )
                self._prefixes[batch] = read_at, tuple(one for one in counted if one.rows > 0)
        if len(rows) < sum(pick.limit for pick in picks) // 2:
            self.read_soon(0.2)
