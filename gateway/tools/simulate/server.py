"""A llama.cpp server as a model: slots that share one computation, step by step.

Every step is one batch, as in llama.cpp's `update_slots`: a token for each slot that writes,
then prompt tokens of the slots that read, in the order of the slots, until the batch is full.
So a prompt that is read lets its neighbours write one token a step, and such a step is long.

    seconds of a step = max(token_base, prompt tokens / prefill) + token_step x writers
    without a prompt  = token_base + token_step x (writers - 1)

A step reads all weights once, whatever it holds, so it is never shorter than `token_base`.
Steps that are alike are taken together: the model has events when something begins or ends,
none for a token, and is exact all the same. What comes in waits for the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from gateway.tools.simulate.trace import Job, TracePrompt, common_tokens


class SimulatedServer:
    """One simulated node. Times are seconds of the simulation; it schedules nothing itself.

    `take` a job, or `step_ended` when the time `ends` has come; then ask for `ends` again.
    """

    __slots__ = (
        "_alike",
        "_base",
        "_batch",
        "_began",
        "_per_prompt_token",
        "_read",
        "_readers",
        "_seconds",
        "_step",
        "_writers",
        "busy_seconds",
        "cache",
        "end_version",
        "machine",
        "next_end",
        "queue",
        "slots",
    )

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.cache = SimulatedPromptCache(machine.slots, machine.cache_tokens)
        self.slots: list[Job | None] = [None] * machine.slots
        self.queue: deque[Job] = deque()
        """What came while every slot was busy: first in, first out."""
        self.next_end = -1.0
        """When the steps under way end; -1: it idles."""
        self.end_version = 0
        """Counts the changes of `ends`, so that an event for an older one is known as void."""
        self.busy_seconds = 0.0
        """Seconds in which it computed."""
        self._base = machine.token_base
        self._step = machine.token_step
        self._per_prompt_token = 1.0 / machine.prefill_tps
        self._batch = machine.batch_tokens
        # The steps under way: since when, how long each is, how many are alike.
        self._began = 0.0
        self._seconds = 0.0
        self._alike = 0
        self._writers: list[Job] = []
        self._readers: list[Job] = []
        """In the order of their slots."""
        self._read: list[int] = []
        """Prompt tokens that one step reads of each of the first readers."""

    def take(self, job: Job, now: float) -> bool:
        """Take a job in; whether `ends` has changed."""
        free = [number for number, held in enumerate(self.slots) if held is None]
        if not free:
            self.queue.append(job)
            return False
        self._launch(job, free, now)
        if self.next_end < 0:
            self._compose(now)
            return True
        if self._alike > 1:
            # It joins after the step under way.
            done = int((now - self._began) / self._seconds) + 1
            if done < self._alike:
                self._alike = done
                self.next_end = self._began + done * self._seconds
                self.end_version += 1
                return True
        return False

    def end_steps(self, now: float) -> tuple[list[Job], list[Job]]:
        """Account for the steps that have ended: who wrote a first token, who is done.

        A slot that is free again takes up what waits here, and the next steps begin.
        """
        steps = self._alike
        writers = self._writers
        self.busy_seconds += now - self._began
        done: list[Job] = []
        for job in writers:
            job.to_write -= steps
            if not job.to_write:
                done.append(job)
        first: list[Job] = []
        if self._read:
            for job, read in zip(self._readers, self._read, strict=False):
                job.to_read -= read * steps
                if not job.to_read:
                    # The step that reads the last of the prompt gives the first token.
                    job.first = now
                    job.to_write -= 1
                    first.append(job)
                    if not job.to_write:
                        done.append(job)
            if first:
                self._readers = [job for job in self._readers if job.to_read]
                writers += [job for job in first if job.to_write]
        if done:
            self._writers = [job for job in writers if job.to_write]
            for job in done:
                self._release(job, now)
            while self.queue and None in self.slots:
                free = [number for number, held in enumerate(self.slots) if held is None]
                self._launch(self.queue.popleft(), free, now)
        self._compose(now)
        return first, done

    def _launch(self, job: Job, free: list[int], now: float) -> None:
        slot, cached = self.cache.choose_slot(job.prompt, free)
        job.began = now
        job.slot = slot
        job.cached = cached
        job.to_read = job.prompt.tokens - cached
        job.to_write = job.output
        self.slots[slot] = job
        self.cache.save_idle([held is not None for held in self.slots])
        readers = self._readers
        place = len(readers)
        while place and readers[place - 1].slot > slot:
            place -= 1
        # The steps under way count their readers by place: a newcomer must not move those.
        self._readers = [*readers[:place], job, *readers[place:]]
        if place < len(self._read):
            self._read.insert(place, 0)

    def _release(self, job: Job, now: float) -> None:
        job.ended = now
        self.slots[job.slot] = None
        self.cache.store(job.slot, job.final_prompt, now)

    def _compose(self, now: float) -> None:
        """Begin the next steps, as many as are alike."""
        writers = self._writers
        readers = self._readers
        count = len(writers)
        self.end_version += 1
        if readers:
            room = self._batch - count
            left = readers[0].to_read
            if left >= room:
                steps = left // room
                read = room
                self._read = [room]
            else:
                steps = 1
                read = 0
                self._read = []
                for job in readers:
                    part = min(job.to_read, room - read)
                    if not part:
                        break
                    self._read.append(part)
                    read += part
            seconds = max(self._base, read * self._per_prompt_token) + self._step * count
        elif count:
            self._read = []
            steps = writers[0].to_write
            seconds = self._base + self._step * (count - 1)
        else:
            self.next_end = -1.0
            return
        for job in writers:
            steps = min(steps, job.to_write)
        self._began = now
        self._seconds = seconds
        self._alike = steps
        self.next_end = now + steps * seconds


BATCH_TOKENS = 512
"""Tokens of one step (`n_batch`): what `llama-gateway up` and its advice to operators set."""

BATCH_COST = 0.15
"""A busy slot more makes a decoding step so much longer, as a share of the step of one slot.

Reading the weights dominates a step on a CPU; another token costs little beside it.
"""

CACHE_RAM_MIB = 8192
"""MiB of evicted prompts in host memory: llama.cpp's default (`--cache-ram`)."""

KV_BYTES_PER_TOKEN = 131_072
"""Bytes of a token's keys and values: 32 layers, 8 heads of 128, F16, as in Mistral 7B."""

SLOT_SIMILARITY = 0.1
"""Share of a prompt that a slot must hold to be chosen for it (`--slot-prompt-similarity`)."""


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """One llama.cpp server. Speeds in tokens per second."""

    name: str
    slots: int
    prefill_tps: float
    """Prompt tokens read in a second."""
    decode_tps: float
    """Tokens written in a second by one request alone."""
    batch_cost: float = BATCH_COST
    batch_tokens: int = BATCH_TOKENS
    cache_tokens: int = CACHE_RAM_MIB * 1024 * 1024 // KV_BYTES_PER_TOKEN
    """Tokens of evicted prompts that the host-memory cache holds; 0: it has none."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.batch_tokens <= self.slots or self.cache_tokens < 0:
            raise ValueError("a node needs a slot, and a batch larger than its slots")
        for speed in (self.prefill_tps, self.decode_tps):
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError("speeds must be positive")
        if not (math.isfinite(self.batch_cost) and self.batch_cost >= 0):
            raise ValueError("the cost of a busy slot more must not be negative")

    @property
    def token_base(self) -> float:
        """Seconds of a step that writes one token."""
        return 1.0 / self.decode_tps

    @property
    def token_step(self) -> float:
        """Seconds that every further busy slot adds to a step."""
        return self.batch_cost / self.decode_tps


SLOT_KEPT_SHARE = 0.5
"""A slot that would keep less than this share of what it holds saves it first."""

HOST_LOADED_SHARE = 0.25
"""An evicted prompt is not taken back for the sake of less than this share of it."""

EMPTY_PROMPT = TracePrompt(-1, 0)


class SimulatedPromptCache:
    """The prompts of one server. A slot's prompt is `EMPTY` before its first use."""

    __slots__ = ("_limit", "_total", "host_prompts", "slot_prompts", "slot_used_at")

    def __init__(self, slots: int, host_tokens: int) -> None:
        self.slot_prompts = [EMPTY_PROMPT] * slots
        """What each slot holds."""
        self.slot_used_at = [-1.0] * slots
        """When each slot ended its last work."""
        self.host_prompts: list[TracePrompt] = []
        """What host memory holds, the oldest first."""
        self._limit = host_tokens
        self._total = 0

    def choose_slot(self, prompt: TracePrompt, free: list[int]) -> tuple[int, int]:
        """The slot, one of `free`, that takes a prompt, and the tokens of it that are there.

        The slot that has most of the prompt, if that is enough; else the one that idles longest.
        What it loses goes to host memory, from where a better one may come back. One token at
        least is always read.
        """
        size = prompt.tokens
        held = self.slot_prompts
        slot, best = -1, SLOT_SIMILARITY * size
        for candidate in free:
            common = common_tokens(held[candidate], prompt)
            if common > best:
                slot, best = candidate, common
        if slot < 0:
            used = self.slot_used_at
            slot = free[0]
            for candidate in free:
                if used[candidate] <= used[slot]:
                    slot = candidate
            swap = True
        else:
            swap = best < SLOT_KEPT_SHARE * held[slot].tokens
        if swap and self._limit:
            self._save(held[slot])
            self._take_back(slot, prompt)
        return slot, min(common_tokens(held[slot], prompt), size - 1)

    def save_idle(self, busy: list[bool]) -> None:
        """Save what idle slots hold, as llama.cpp does whenever work begins in another slot."""
        if not self._limit:
            return
        for held, works in zip(self.slot_prompts, busy, strict=True):
            if not works:
                self._save(held)

    def store(self, slot: int, prompt: TracePrompt, now: float) -> None:
        """A slot has ended its work and holds this."""
        self.slot_prompts[slot] = prompt
        self.slot_used_at[slot] = now

    def _save(self, prompt: TracePrompt) -> None:
        """Put a prompt into host memory, unless it is there; it stands for those it begins with."""
        tokens = prompt.tokens
        if not 0 < tokens <= self._limit:
            return
        part_of_it = False
        for one in self.host_prompts:
            common = common_tokens(one, prompt)
            if common == tokens:
                return
            if common == one.tokens:
                part_of_it = True
        if part_of_it:
            self.host_prompts = [
                one for one in self.host_prompts if common_tokens(one, prompt) != one.tokens
            ]
            self._total = sum([one.tokens for one in self.host_prompts])
        self.host_prompts.append(prompt)
        self._total += tokens
        while self._total > self._limit:
            self._total -= self.host_prompts.pop(0).tokens

    def _take_back(self, slot: int, prompt: TracePrompt) -> None:
        """Load an evicted prompt, if one is better in both: what is used of it, and what for."""
        old = self.slot_prompts[slot]
        gain = common_tokens(old, prompt)
        share = gain / old.tokens if old.tokens else -1.0
        found = -1
        for place, one in enumerate(self.host_prompts):
            common = common_tokens(one, prompt)
            if (
                common > gain
                and common >= HOST_LOADED_SHARE * one.tokens
                and common / one.tokens > share
            ):
                found, share, gain = place, common / one.tokens, common
        if found >= 0:
            self.slot_prompts[slot] = self.host_prompts.pop(found)
            self._total -= self.slot_prompts[slot].tokens
