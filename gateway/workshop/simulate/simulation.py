"""The simulation: a model of llama.cpp servers, and a trace played on them through a front.

A server's slots share one computation, step by step. Every step is one batch, as in llama.cpp's
`update_slots`: a token for each decoding slot, then prompt tokens of the prefilling slots, in the
order of the slots, until the batch is full. So while one slot prefills its neighbours decode one
token a step, and such a step is long.

    seconds of a step = max(token_base, prompt tokens / prefill_tps) + token_step x decoding slots
    without a prompt  = token_base + token_step x (decoding slots - 1)

A step reads all weights once, whatever it holds, so it is never shorter than `token_base`. Equal
steps are taken together: the model has events only when a job begins or ends its prefill or its
decoding, and is exact all the same. A job that arrives during a step starts at its end.

Time is the trace's; nothing waits for the clock. The same trace, fleet, front and seed give the
same result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gateway.workshop.simulate.trace import Job, Trace, TracePrompt, common_tokens


class SimulatedServer:
    """One simulated node. Times are seconds of the simulation.

    The caller keeps time: it calls `take` for a job, `end_steps` when the time `next_end` has come,
    and reads `next_end` after each.
    """

    __slots__ = (
        "_batch_tokens",
        "_decoding",
        "_per_prompt_token",
        "_prefilling",
        "_prompt_tokens",
        "_step_seconds",
        "_steps",
        "_steps_began",
        "_token_base",
        "_token_step",
        "busy_seconds",
        "cache",
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
        """Jobs that arrived while every slot was busy: first in, first out."""
        self.next_end = -1.0  # when the current steps end; -1: it is idle
        self.busy_seconds = 0.0  # seconds in which it computed
        self._token_base = machine.token_base
        self._token_step = machine.token_step
        self._per_prompt_token = 1.0 / machine.prefill_tps
        self._batch_tokens = machine.batch_tokens
        # The current steps: when they began, seconds of each, how many equal ones.
        self._steps_began = 0.0
        self._step_seconds = 0.0
        self._steps = 0
        self._decoding: list[Job] = []
        self._prefilling: list[Job] = []  # jobs that prefill, in the order of their slots
        self._prompt_tokens: list[int] = []
        """Prompt tokens that one step reads of each of the first of them."""

    def restart(self) -> None:
        """Its process is another now: the caches are empty."""
        self.cache = SimulatedPromptCache(self.machine.slots, self.machine.cache_tokens)

    def take(self, job: Job, now: float, wall: float | None = None) -> bool:
        """Take a job; whether `next_end` has changed.

        `wall`: the time that the job notes, where this server's own runs slower.
        """
        free = [number for number, held in enumerate(self.slots) if held is None]
        if not free:
            self.queue.append(job)
            return False
        self._start_job(job, free, now if wall is None else wall)
        if self.next_end < 0:
            self._begin_steps(now)
            return True
        if self._steps > 1:
            # The job joins after the current step.
            done = int((now - self._steps_began) / self._step_seconds) + 1
            if done < self._steps:
                self._steps = done
                self.next_end = self._steps_began + done * self._step_seconds
                return True
        return False

    def end_steps(self, now: float, wall: float | None = None) -> tuple[list[Job], list[Job]]:
        """End the current steps: the jobs that have their first token, and those that have ended.

        Slots that are free again take jobs from the queue, and the next steps begin. `wall` is as
        for `take`.
        """
        noted = now if wall is None else wall
        steps = self._steps
        decoding = self._decoding
        self.busy_seconds += now - self._steps_began
        done: list[Job] = []
        for job in decoding:
            job.to_write -= steps
            if not job.to_write:
                done.append(job)
        first: list[Job] = []
        if self._prompt_tokens:
            for job, read in zip(self._prefilling, self._prompt_tokens, strict=False):
                job.to_read -= read * steps
                if not job.to_read:
                    # The step that reads the end of the prompt gives the first token.
                    job.first = noted
                    job.to_write -= 1
                    first.append(job)
                    if not job.to_write:
                        done.append(job)
            if first:
                self._prefilling = [job for job in self._prefilling if job.to_read]
                decoding += [job for job in first if job.to_write]
        if done:
            self._decoding = [job for job in decoding if job.to_write]
            for job in done:
                self._release(job, noted)
            while self.queue and None in self.slots:
                free = [number for number, held in enumerate(self.slots) if held is None]
                self._start_job(self.queue.popleft(), free, noted)
        self._begin_steps(now)
        return first, done

    def _start_job(self, job: Job, free: list[int], now: float) -> None:
        slot, cached = self.cache.choose_slot(job.prompt, free)
        job.start(slot, cached, now)
        self.slots[slot] = job
        self.cache.save_idle([held is not None for held in self.slots])
        prefilling = self._prefilling
        position = len(prefilling)
        while position and prefilling[position - 1].slot > slot:
            position -= 1
        # The current steps count their prefilling jobs by position, which must not shift.
        self._prefilling = [*prefilling[:position], job, *prefilling[position:]]
        if position < len(self._prompt_tokens):
            self._prompt_tokens.insert(position, 0)

    def _release(self, job: Job, now: float) -> None:
        job.ended = now
        self.slots[job.slot] = None
        self.cache.store(job.slot, job.final_prompt, now)

    def _begin_steps(self, now: float) -> None:
        """Begin the next steps, as many as are equal."""
        decoding = self._decoding
        prefilling = self._prefilling
        count = len(decoding)
        if prefilling:
            room = self._batch_tokens - count
            left = prefilling[0].to_read
            if left >= room:
                steps = left // room
                read = room
                self._prompt_tokens = [room]
            else:
                steps = 1
                read = 0
                self._prompt_tokens = []
                for job in prefilling:
                    part = min(job.to_read, room - read)
                    if not part:
                        break
                    self._prompt_tokens.append(part)
                    read += part
            seconds = (
                max(self._token_base, read * self._per_prompt_token) + self._token_step * count
            )
        elif count:
            self._prompt_tokens = []
            steps = decoding[0].to_write
            seconds = self._token_base + self._token_step * (count - 1)
        else:
            self.next_end = -1.0
            return
        for job in decoding:
            steps = min(steps, job.to_write)
        self._steps_began = now
        self._step_seconds = seconds
        self._steps = steps
        self.next_end = now + steps * seconds


# Tokens of one step (`n_batch`): what `llama-gateway up` and its advice to operators set.
BATCH_TOKENS = 512
# By how much one more busy slot prolongs a decoding step, as a share of the step of one slot.
# Reading the weights dominates a step on a CPU; another token costs little beside it.
BATCH_COST = 0.15
CACHE_RAM_MIB = 8192  # MiB of evicted prompts in host memory: llama.cpp's default (`--cache-ram`)
# Bytes of a token's keys and values: 32 layers, 8 heads of 128, F16, as in Mistral 7B.
KV_BYTES_PER_TOKEN = 131_072
# Share of a prompt that a slot must have cached to be chosen (`--slot-prompt-similarity`).
SLOT_SIMILARITY = 0.1


ModelSpeed = tuple[float, float]  # tokens per second of prompts, and of answers


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """One llama.cpp server. Speeds in tokens per second."""

    name: str
    slots: int
    prefill_tps: float  # prompt tokens per second
    decode_tps: float  # output tokens per second of one request alone
    batch_cost: float = BATCH_COST
    batch_tokens: int = BATCH_TOKENS
    cache_tokens: int = CACHE_RAM_MIB * 1024 * 1024 // KV_BYTES_PER_TOKEN
    """Tokens of evicted prompts that the host-memory cache holds; 0: it has none."""
    host: str = ""
    """Machines of one host are calibrated one at a time, and routers of one share its memory;
    empty: it has its own."""
    calibrated: bool = True  # whether it is calibrated while idle
    models: frozenset[str] = frozenset()  # the models that it serves, or can load; empty: all
    memory: int = 0  # of a router's host, for models: bytes; 0: it is a plain server
    model_speeds: Mapping[str, ModelSpeed] = field(default_factory=dict, hash=False)
    """Of a router: by model what was measured. `prefill_tps` and `decode_tps` are those of a model
    of `routers.SPEED_MEMORY`."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.batch_tokens <= self.slots or self.cache_tokens < 0:
            raise ValueError("a node needs a slot, and a batch larger than its slots")
        for speed in (self.prefill_tps, self.decode_tps):
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError("speeds must be positive")
        if not (math.isfinite(self.batch_cost) and self.batch_cost >= 0):
            raise ValueError("the cost of a busy slot more must not be negative")

    def serves(self, model: str) -> bool:
        """Whether it serves the model, or can load it; an empty name stands for any."""
        return not (model and self.models) or model in self.models

    @property
    def token_base(self) -> float:
        """Seconds of a step that writes one token."""
        return 1.0 / self.decode_tps

    @property
    def token_step(self) -> float:
        """Seconds that each further busy slot adds to a step."""
        return self.batch_cost / self.decode_tps


# A slot that would keep less than this share of its prompt saves it to host memory first.
SLOT_KEPT_SHARE = 0.5
# An evicted prompt is loaded back only if at least this share of it is used.
HOST_LOADED_SHARE = 0.25
EMPTY_PROMPT = TracePrompt(-1, 0)


class SimulatedPromptCache:
    """The cached prompts of one server. A slot has `EMPTY_PROMPT` before its first use."""

    __slots__ = ("_limit", "_total", "host_prompts", "slot_prompts", "slot_used_at")

    def __init__(self, slots: int, host_tokens: int) -> None:
        self.slot_prompts = [EMPTY_PROMPT] * slots  # the prompt that each slot has cached
        self.slot_used_at = [-1.0] * slots  # when each slot ended its last job
        self.host_prompts: list[TracePrompt] = []  # the prompts in host memory, the oldest first
        self._limit = host_tokens
        self._total = 0

    def choose_slot(self, prompt: TracePrompt, free: list[int]) -> tuple[int, int]:
        """The slot, one of `free`, that takes a prompt, and the tokens of it that it has cached.

        The slot that has most of the prompt, if that is enough; else the one that was idle longest.
        Its own prompt goes to host memory, from where a better one may be loaded. At least one
        token is always read.
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
            evicts = True
        else:
            evicts = best < SLOT_KEPT_SHARE * held[slot].tokens
        if evicts and self._limit:
            self._save(held[slot])
            self._load(slot, prompt)
        return slot, min(common_tokens(held[slot], prompt), size - 1)

    def save_idle(self, busy: list[bool]) -> None:
        """Save the prompts of idle slots, as llama.cpp does whenever a job starts in another."""
        if not self._limit:
            return
        for held, works in zip(self.slot_prompts, busy, strict=True):
            if not works:
                self._save(held)

    def store(self, slot: int, prompt: TracePrompt, now: float) -> None:
        """A slot has ended its job and has this prompt cached."""
        self.slot_prompts[slot] = prompt
        self.slot_used_at[slot] = now

    def _save(self, prompt: TracePrompt) -> None:
        """Save a prompt to host memory unless it is there; it replaces its own beginnings."""
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

    def _load(self, slot: int, prompt: TracePrompt) -> None:
        """Load an evicted prompt that has more of `prompt`, as tokens and as a share of itself."""
        old = self.slot_prompts[slot]
        gain = common_tokens(old, prompt)
        share = gain / old.tokens if old.tokens else -1.0
        best_index = -1
        for position, one in enumerate(self.host_prompts):
            common = common_tokens(one, prompt)
            if (
                common > gain
                and common >= HOST_LOADED_SHARE * one.tokens
                and common / one.tokens > share
            ):
                best_index, share, gain = position, common / one.tokens, common
        if best_index >= 0:
            self.slot_prompts[slot] = self.host_prompts.pop(best_index)
            self._total -= self.slot_prompts[slot].tokens


PROGRESS_EVERY = 2000  # ended requests between two calls of `progress`


class SimulatedFleet:
    """The simulated nodes, to which a front sends jobs."""

    __slots__ = ("_ends", "_versions", "jobs", "now", "servers")

    def __init__(self, machines: Sequence[SimulatedMachine], jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.servers = [SimulatedServer(machine) for machine in machines]
        self.now = 0.0
        # Ends of steps: time, node, version; void if the node has another version by now.
        self._ends: list[tuple[float, int, int]] = []
        self._versions = [0] * len(machines)

    def send(self, job: Job, node: int) -> None:
        """Send a job to a node, now. A node without a free slot queues it."""
        now = self.now
        job.send_to(node, now)
        if self.servers[node].take(job, now):
            self._note_end(node)

    def next_step_end(self) -> float:
        """When the next steps end; infinity while every node is idle."""
        ends, versions = self._ends, self._versions
        while ends:
            time, node, version = ends[0]
            if version == versions[node]:
                return time
            heappop(ends)
        return math.inf

    def end_steps(self) -> tuple[list[Job], list[Job]]:
        """End those steps, now: the jobs that have their first token, and those that have ended."""
        _, node, _ = heappop(self._ends)
        ended = self.servers[node].end_steps(self.now)
        self._note_end(node)
        return ended

    def _note_end(self, node: int) -> None:
        """The steps of a node end at another time than before."""
        self._versions[node] += 1
        if (end := self.servers[node].next_end) >= 0:
            heappush(self._ends, (end, node, self._versions[node]))


class Arrivals:
    """Arrivals: first turns at their times, later turns once the turn before has ended."""

    __slots__ = ("_first_turns", "_jobs", "_later", "_next_turns", "next_time")

    def __init__(self, trace: Trace) -> None:
        self._jobs = trace.jobs
        self._next_turns = trace.next_turns
        self._first_turns = [job for job in reversed(trace.jobs) if not job.is_later_turn]
        self._later: list[tuple[float, int]] = []
        self.next_time = self._first_turns[-1].time if self._first_turns else math.inf

    def pop(self) -> Job:
        """The job that arrives at `next_time`."""
        if self._later and self._later[0][0] <= self.next_time:
            job = self._jobs[heappop(self._later)[1]]
        else:
            job = self._first_turns.pop()
        self._set_next_time()
        return job

    def schedule_next_turn(self, job: Job) -> None:
        """A job has ended: schedule the next turn of its conversation."""
        place = self._next_turns.get(job.id)
        if place is not None:
            turn = self._jobs[place]
            heappush(self._later, (max(turn.time, job.ended + turn.pause), place))
            self._set_next_time()

    def _set_next_time(self) -> None:
        first = self._first_turns[-1].time if self._first_turns else math.inf
        later = self._later[0][0] if self._later else math.inf
        self.next_time = min(first, later)


class Front(ABC):
    """Places requests on nodes: a proxy in front of them."""

    alarm: float  # when it is to be woken if nothing else happens; infinity: never

    @abstractmethod
    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """Send a request that has arrived, or queue it."""

    def started(self, job: Job, fleet: SimulatedFleet) -> None:  # noqa: B027 - most don't care
        """Take note of its first token."""

    @abstractmethod
    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Take note of its last token: the slot is free."""

    def wake(self, fleet: SimulatedFleet) -> None:  # noqa: B027 - where no alarm is set
        """Act at the time of the alarm. Must set a later one."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run; the details are in the trace's jobs."""

    jobs: Sequence[Job]
    servers: Sequence[SimulatedServer]
    began: float  # the first arrival
    ended: float  # the last end


class StuckError(Exception):
    """A front never sent some requests, though nothing else was to happen."""


def simulate(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    front: Front,
    progress: Callable[[int], None] | None = None,
    fleet: SimulatedFleet | None = None,
) -> SimulationResult:
    """Play a trace through a front on a fleet.

    Results are written into the jobs: read them before the trace is played again. `progress` is
    called now and then with the number of requests that have ended. `fleet`: one that was made of
    these jobs, instead of `machines`. Raises StuckError if the front leaves requests unsent when
    nothing more can happen.
    """
    jobs = trace.jobs
    for job in jobs:
        job.reset()
    fleet = fleet or SimulatedFleet(machines, jobs)
    arrivals = Arrivals(trace)
    ended = 0
    while True:
        step = fleet.next_step_end()
        now = min(step, arrivals.next_time, front.alarm)
        if now == math.inf:
            break
        fleet.now = now
        if step <= now:
            first, done = fleet.end_steps()
            for job in first:
                front.started(job, fleet)
            for job in done:
                arrivals.schedule_next_turn(job)
                front.ended(job, fleet)
                ended += 1
                if progress is not None and not ended % PROGRESS_EVERY:
                    progress(ended)
        elif arrivals.next_time <= now:
            job = arrivals.pop()
            job.arrive(now)
            front.arrive(job, fleet)
        else:
            front.wake(fleet)
            if front.alarm <= now:
                raise StuckError(f"the front would be woken for ever at {now:g} s")
    if ended != len(jobs):
        raise StuckError(f"{len(jobs) - ended} of {len(jobs)} requests were never served")
    return SimulationResult(
        jobs,
        fleet.servers,
        min((job.arrived for job in jobs), default=0.0),
        max((job.ended for job in jobs), default=0.0),
    )
