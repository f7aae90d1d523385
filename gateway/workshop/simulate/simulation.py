"""The simulation: requests, and a model of llama.cpp servers that serves them through a front.

The requests of a trace are read from a file, or generated. Generated traffic is conversations of
chat users, which share system prompts. Conversations begin as a Poisson process and have a
geometric number of turns. The prompt of a turn is the tenant's system prompt, the conversation so
far and a new question. A person reads the answer, thinks, and asks again; if the answer is late,
once it has come. So the load is the same under every policy, as long as the fleet can bear it.
Lengths of questions and answers are log-normal: most are short, a few very long, as in public
traces of such traffic.

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
import random
from abc import ABC, abstractmethod
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from gateway.config.errors import ConfigError, Problem
from gateway.terms import Priority


class TracePrompt(NamedTuple):
    """The text of a prompt, as far as prefix caches matter.

    `stream` names the text; two prompts of one stream have all tokens of the shorter in common: a
    conversation is a stream, and each turn reads a little more of it. The first `prefix_tokens` are
    those of `prefix`, such as a system prompt, with which other streams may begin too. Numbers are
    names: equal means the same text; 0 as `prefix` means none.
    """

    stream: int
    tokens: int
    prefix: int = 0
    prefix_tokens: int = 0


def common_tokens(one: TracePrompt, other: TracePrompt) -> int:
    """Tokens of the longest common beginning of two prompts."""
    if one.stream == other.stream:
        return min(one.tokens, other.tokens)
    if one.prefix and one.prefix == other.prefix:
        return min(one.prefix_tokens, other.prefix_tokens, one.tokens, other.tokens)
    return 0


def unread_tokens(jobs: Iterable[Job]) -> list[int]:
    """Tokens of each prompt, by its job's id, that no earlier one of `jobs` can have read."""
    streams: dict[int, int] = {}
    heads: set[int] = set()
    found: dict[int, int] = {}
    for job in jobs:
        prompt = job.prompt
        there = known = streams.get(prompt.stream, 0)
        if prompt.prefix:
            if prompt.prefix in heads:
                there = max(there, prompt.prefix_tokens)
            heads.add(prompt.prefix)
        found[job.id] = max(1, prompt.tokens - there)
        streams[prompt.stream] = max(known, job.final_prompt.tokens)
    return [found[number] for number in sorted(found)]


@dataclass(slots=True, eq=False)
class Job:
    """One request of a trace, and its state while it is simulated. Seconds and tokens."""

    id: int  # its index in the trace
    time: float  # when it arrives, from the trace's start; a later turn waits for the one before
    prompt: TracePrompt
    output: int  # tokens of the answer, at least 1. No front knows them before they have come.
    max_tokens: int | None = None
    """`max_tokens` of the request, which fronts may know; None: not given."""
    priority_label: str = "normal"
    caller: str = ""
    pause: float = 0.0  # of a later turn: seconds from the end of the turn before to its arrival
    is_later_turn: bool = False
    """Whether it arrives only once the turn before in its session has ended."""
    model: str = ""  # only machines that serve it take it; empty: all do

    # Its result.
    arrived: float = field(default=0.0, init=False)
    sent: float = field(default=-1.0, init=False)  # when the front sent it to a node; -1: not yet
    began: float = field(default=-1.0, init=False)  # when it got a slot
    first: float = field(default=-1.0, init=False)  # when its first token came
    ended: float = field(default=-1.0, init=False)
    node: int = field(default=-1, init=False)
    cached: int = field(default=0, init=False)  # prompt tokens that the slot had cached

    # Its state on a node.
    slot: int = field(default=-1, init=False)
    to_read: int = field(default=0, init=False)
    to_write: int = field(default=0, init=False)

    @property
    def final_prompt(self) -> TracePrompt:
        """What its slot holds in the end: all but the last token, which is never read back."""
        return self.prompt._replace(tokens=self.prompt.tokens + self.output - 1)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times; a job's id is its index."""

    jobs: Sequence[Job]
    next_turns: Mapping[int, int] = field(default_factory=dict)
    """By a job's id: that of the next turn of its conversation."""
    skipped: int = 0  # broken lines that were left out


NO_REQUESTS = Trace(())

MOST_TOKENS = 10_000_000
MOST_SECONDS = 1e9
# A file with more broken lines than this is read no further: it has another format.
MOST_PROBLEMS = 20
LONGEST_TRACE_LINE = 1_000_000

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_CLASSES = "|".join(priority.label for priority in Priority)


class TraceLine(msgspec.Struct, forbid_unknown_fields=True, rename={"klass": "class"}):
    """What a line says of its request."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    time: Annotated[float, msgspec.Meta(ge=-MOST_SECONDS, le=MOST_SECONDS * 10)] | None = None
    max_tokens: _Tokens | None = None
    model: str = ""
    klass: Annotated[str, msgspec.Meta(pattern=f"^({_CLASSES})?$")] = ""
    caller: str = ""
    session: str = ""
    pause: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS * 10)] = 0.0
    prefix: str = ""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0

    def __post_init__(self) -> None:
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError("prefix_tokens is more than prompt_tokens: it is a part of it")


TRACE_KEYS = TraceLine.__struct_encode_fields__
_LINE_REMEDY = (
    f'write {{"prompt_tokens": 1800, "output_tokens": 120}}; keys: {", ".join(TRACE_KEYS)}'
)
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, *, skip_broken: bool = False, limit: int | None = None) -> Trace:
    """Read a trace; `.csv` means the Azure layout, anything else JSON lines.

    `limit`: read only that many requests. With `skip_broken`, broken lines are left out and
    counted; else raises ConfigError with file, line and remedy. Raises OSError.
    """
    problems: list[Problem] = []
    skipped = 0
    time = 0.0  # of the lines that have none: that of the one before
    jobs: list[Job] = []
    streams, heads = (defaultdict[str, int](count(1).__next__) for _ in range(2))
    singles = count(-2, -1)
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = enumerate(iter(partial(file.readline, LONGEST_TRACE_LINE), ""), start=1)
        read: Callable[[str], TraceLine] = msgspec.json.Decoder(TraceLine).decode
        remedy = _LINE_REMEDY
        if path.suffix.lower() == ".csv":
            names = [name.strip(' "\ufeff\n') for name in next(lines, (1, ""))[1].split(",")]
            remedy = f"begin the file with {','.join(_AZURE)}, or name it .jsonl"
            if missing := [name for name in _AZURE if name not in names]:
                message = f"the head line has no {', '.join(missing)}"
                raise ConfigError([Problem(path, 1, "", message, remedy)])
            read = partial(_read_azure, [names.index(name) for name in _AZURE])
            remedy = "write such as 2023-11-16 18:15:46.6805900,374,44"
        for number, text in lines:
            if len(jobs) == limit or len(problems) == MOST_PROBLEMS:
                break
            if not text.strip():
                continue
            try:
                line = read(text)
            except (msgspec.MsgspecError, ValueError) as error:
                if skip_broken:
                    skipped += 1
                else:
                    problems.append(Problem(path, number, "", str(error), remedy))
                continue
            time = time if line.time is None else line.time
            stream = streams[line.session] if line.session else next(singles)
            shared = line.prefix_tokens if line.prefix else 0
            head = heads[line.prefix] if shared else 0
            job = Job(
                0,
                time,
                TracePrompt(stream, line.prompt_tokens, head, shared),
                min(line.output_tokens, line.max_tokens or MOST_TOKENS),
                max_tokens=line.max_tokens,
                priority_label=line.klass or "normal",
                caller=line.caller,
                pause=line.pause,
                model=line.model,
            )
            jobs.append(job)
    if problems:
        raise ConfigError(problems)
    if not jobs:
        raise ConfigError([Problem(path, 0, "", "holds no request", "write one a line")])
    start = min(job.time for job in jobs)
    for job in jobs:
        job.time -= start
    return replace(build_trace(jobs), skipped=skipped)


def _read_azure(places: Sequence[int], text: str) -> TraceLine:
    """Read a line of the Azure layout, whose columns are at these places. Raises ValueError."""
    cells = text.strip().split(",")
    try:
        stamp, prompt, output = (cells[place].strip(' "') for place in places)
    except IndexError:
        raise ValueError(f"has {len(cells)} cells") from None
    time = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
    # A few requests of the public traces have no output; their prompt is read all the same.
    found = {"time": time, "prompt_tokens": int(prompt) or 1, "output_tokens": int(output) or 1}
    return msgspec.convert(found, TraceLine)


def build_trace(jobs: list[Job]) -> Trace:
    """A trace of these jobs, sorted by time; the turns of a stream keep their order."""
    jobs.sort(key=lambda job: job.time)  # Stable.
    turns: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, job in enumerate(jobs):
        job.id = place
        if (before := last.get(job.prompt.stream)) is not None:
            turns[before] = place
            job.is_later_turn = True
        last[job.prompt.stream] = place
    return Trace(jobs, turns)


# Sigma of the logarithm of lengths: the 95th percentile is about 3.7 times the median.
LENGTH_SIGMA = 0.8
MOST_LENGTH_FACTOR = 8.0  # no length is more than this many times its mean: a context is finite
READ_TOKENS_PER_SECOND = 20.0  # tokens of an answer that a person reads per second as they come
# Mean durations of a conversation by which conversations begin before the trace does.
WARM_UP_DURATIONS = 3.0


_Positive = Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)]
Count = Annotated[int, msgspec.Meta(ge=1)]
_FromOne = Annotated[float, msgspec.Meta(ge=1, le=MOST_SECONDS)]
FromZero = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to generate. Figures are means; tokens and seconds."""

    requests: Count = 5000
    rate: _Positive = 1.0  # requests per second
    turns: _FromOne = 4.0  # turns of a conversation
    tenants: Count = 6  # tenants, each with a system prompt; a few make most of the traffic
    system: Annotated[int, msgspec.Meta(ge=0)] = 1500
    question: _Positive = 120.0
    answer: _Positive = 180.0
    pause: FromZero = 20.0  # seconds between an answer and the next question
    limit: Count = 2048
    """`max_tokens` of every request: far above the answers' lengths, as clients set it."""
    callers: Count = 50
    burst: _FromOne = 1.0
    """During a burst this many times more conversations begin than between bursts."""
    every: _Positive = 3600.0  # seconds from the start of a burst to that of the next
    lasting: _Positive = 600.0  # seconds that a burst lasts
    urgent: _Share = 0.0  # share of the conversations that are of this class; the rest is `normal`
    premium: _Share = 0.0
    batch: _Share = 0.0
    zipf: FromZero = 1.0
    """Of several models the one of rank n is asked for `1 / n**zipf` times as often as the first.
    What a burst adds is for one of them."""
    moves: FromZero = 0.0  # seconds after which other models are the popular ones; 0: never

    def __post_init__(self) -> None:
        if self.lasting >= self.every:
            raise ValueError("lasting must be shorter than every")
        if self.urgent + self.premium + self.batch > 1:
            raise ValueError("the shares of the classes must not be more than 1 in all")


_Figures = TypeVar("_Figures", bound=msgspec.Struct)


def parse_figures(text: str, kind: type[_Figures]) -> _Figures:
    """Figures from text such as `rate=2,requests=5000`. Raises ValueError with the remedy."""
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",") if part]
    try:
        return msgspec.convert({name: value for name, _, value in pairs}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} (known: {', '.join(kind.__struct_fields__)})") from None


def generate(
    traffic: Traffic, seed: int, models: Sequence[str] = (), shares: Sequence[float] = ()
) -> Trace:
    """Generate a trace, of several models where they are given; the same seed gives the same.

    `shares`: how often each model is asked for, beside the others; none: by `zipf` and `moves`.
    """
    rng = random.Random(seed)
    draw_model = _popularity(traffic, seed, models, shares)
    continue_share = 1.0 - 1.0 / traffic.turns
    weights = [1.0 / rank for rank in range(1, traffic.tenants + 1)]
    tenants = range(1, traffic.tenants + 1)
    classes = ("urgent", "premium", "batch", "normal")
    class_shares = [traffic.urgent, traffic.premium, traffic.batch]
    class_shares.append(1.0 - sum(class_shares))
    # Earlier conversations are under way, so that the rate is the same from the start.
    of_a_turn = traffic.pause + traffic.answer / READ_TOKENS_PER_SECOND
    now = -WARM_UP_DURATIONS * traffic.turns * of_a_turn
    jobs: list[Job] = []
    stream = 0
    # A conversation's later turns may come after requests that are generated after it.
    later: list[float] = []
    settled = 0
    while settled < traffic.requests:
        now = _next_begin(rng, traffic, now)
        while later and later[0] <= now:
            heappop(later)
            settled += 1
        stream += 1
        (tenant,) = rng.choices(tenants, weights)
        (label,) = rng.choices(classes, class_shares)
        caller = f"caller-{rng.randrange(traffic.callers)}"
        model = draw_model(now) if models else ""
        prompt_tokens = traffic.system
        time = now
        while True:
            prompt_tokens += random_length(rng, traffic.question)
            output = min(random_length(rng, traffic.answer), traffic.limit)
            if time >= 0:
                head = tenant if traffic.system else 0
                prompt = TracePrompt(stream, prompt_tokens, head, traffic.system)
                job = Job(0, time, prompt, output, traffic.limit, label, caller, model=model)
                jobs.append(job)
                heappush(later, time)
            if rng.random() >= continue_share:
                break
            prompt_tokens += output
            time += output / READ_TOKENS_PER_SECOND
            time += rng.expovariate(1.0 / traffic.pause) if traffic.pause else 0.0
    jobs.sort(key=lambda job: job.time)
    return build_trace(jobs[: traffic.requests])


def _popularity(
    traffic: Traffic, seed: int, models: Sequence[str], shares: Sequence[float]
) -> Callable[[float], str]:
    """Draws the model of a conversation that begins at a time: Zipf, bursts, ranks that change."""
    rng = random.Random(f"models of {seed}")
    weights = [rank**-traffic.zipf for rank in range(1, len(models) + 1)]

    def draw(now: float) -> str:
        period = now / traffic.every + 0.5
        extra = 1.0 - 1.0 / traffic.burst
        if period % 1.0 < traffic.lasting / traffic.every and rng.random() < extra:
            return random.Random(f"burst {math.floor(period)} of {seed}").choice(models)
        if shares:
            return rng.choices(models, shares)[0]
        ranked = list(models)
        number = math.floor(now / traffic.moves) if traffic.moves else 0
        random.Random(f"ranks {number} of {seed}").shuffle(ranked)
        return rng.choices(ranked, weights)[0]

    return draw


def _next_begin(rng: random.Random, traffic: Traffic, now: float) -> float:
    """When the next conversation begins: drawn at the rate of bursts, thinned between them."""
    share = traffic.lasting / traffic.every
    quiet = traffic.rate / traffic.turns / (1.0 - share + share * traffic.burst)
    while True:
        now += rng.expovariate(quiet * traffic.burst)
        # The first burst begins half a period after the trace does.
        bursts = (now / traffic.every + 0.5) % 1.0 < share
        if traffic.burst == 1.0 or bursts or rng.random() * traffic.burst < 1.0:
            return now


def random_length(rng: random.Random, mean: float) -> int:
    """A log-normal length, at least 1 and at most `MOST_LENGTH_FACTOR` times its mean."""
    if mean <= 1:
        return 1
    drawn = rng.lognormvariate(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(1, round(min(drawn, MOST_LENGTH_FACTOR * mean)))


@dataclass(slots=True, eq=False)
class SimulatedServer:
    """One simulated node. Times are seconds of the simulation.

    The caller keeps time: it calls `take` for a job, `end_steps` when the time `next_end` has come,
    and reads `next_end` after each.
    """

    machine: SimulatedMachine
    queue: deque[Job] = field(default_factory=deque)
    """Jobs that arrived while every slot was busy: first in, first out."""
    next_end: float = -1.0  # when the current steps end; -1: it is idle
    # The current steps: when they began, seconds of each, how many equal ones.
    _steps_began: float = 0.0
    _step_seconds: float = 0.0
    _steps: int = 0
    _decoding: list[Job] = field(default_factory=list)
    _prefilling: list[Job] = field(default_factory=list)  # in the order of their slots
    _prompt_tokens: list[int] = field(default_factory=list)
    """Prompt tokens that one step reads of each of the first of them."""
    cache: SimulatedPromptCache = field(init=False)
    slots: list[Job | None] = field(init=False)

    def __post_init__(self) -> None:
        self.restart()
        self.slots = [None] * self.machine.slots

    def restart(self) -> None:
        """Its process is another now: the caches are empty."""
        self.cache = SimulatedPromptCache(self.machine.slots, self.machine.cache_tokens)

    def take(self, job: Job, now: float, wall: float) -> bool:
        """Take a job; whether `next_end` has changed.

        `wall`: the time that the job notes, as this server's own may run slower.
        """
        free = self._free_slots()
        if not free:
            self.queue.append(job)
            return False
        self._start_job(job, free, wall)
        if self.next_end < 0:
            self._begin_steps(now)
            return True
        # The job joins after the current step.
        done = int((now - self._steps_began) / self._step_seconds) + 1
        if done >= self._steps:
            return False
        self._steps = done
        self.next_end = self._steps_began + done * self._step_seconds
        return True

    def end_steps(self, now: float, wall: float) -> tuple[list[Job], list[Job]]:
        """End the current steps: the jobs that have their first token, and those that have ended.

        Slots that are free again take jobs from the queue, and the next steps begin. `wall` is as
        for `take`.
        """
        steps, decoding = self._steps, self._decoding
        for job in decoding:
            job.to_write -= steps
        first: list[Job] = []
        for job, read in zip(self._prefilling, self._prompt_tokens, strict=False):
            job.to_read -= read * steps
            if not job.to_read:
                # The step that reads the end of the prompt gives the first token.
                job.first = wall
                job.to_write -= 1
                first.append(job)
        if first:
            self._prefilling = [job for job in self._prefilling if job.to_read]
            decoding += first
        done = [job for job in decoding if not job.to_write]
        if done:
            self._decoding = [job for job in decoding if job.to_write]
            for job in done:
                job.ended = wall
                self.slots[job.slot] = None
                self.cache.store(job.slot, job.final_prompt, wall)
            while self.queue and (free := self._free_slots()):
                self._start_job(self.queue.popleft(), free, wall)
        self._begin_steps(now)
        return first, done

    def _free_slots(self) -> list[int]:
        return [number for number, held in enumerate(self.slots) if held is None]

    def _start_job(self, job: Job, free: list[int], now: float) -> None:
        slot, cached = self.cache.choose_slot(job.prompt, free)
        job.began, job.slot, job.cached = now, slot, cached
        job.to_read, job.to_write = job.prompt.tokens - cached, job.output
        self.slots[slot] = job
        position = bisect(self._prefilling, slot, key=lambda one: one.slot)
        self._prefilling.insert(position, job)
        # The current steps count their prefilling jobs by position, which must not shift.
        if position < len(self._prompt_tokens):
            self._prompt_tokens.insert(position, 0)

    def _begin_steps(self, now: float) -> None:
        """Begin the next steps, as many as are equal."""
        decoding, prefilling = self._decoding, self._prefilling
        base, step = self.machine.token_base, self.machine.token_step
        count, self._prompt_tokens = len(decoding), []
        if prefilling:
            room, read = self.machine.batch_tokens - count, 0
            for job in prefilling:
                part = min(job.to_read, room - read)
                if not part:
                    break
                self._prompt_tokens.append(part)
                read += part
            steps = max(1, prefilling[0].to_read // room)
            per_token = 1.0 / self.machine.prefill_tps
            seconds = max(base, read * per_token) + step * count
        elif count:
            steps = decoding[0].to_write
            seconds = base + step * (count - 1)
        else:
            self.next_end = -1.0
            return
        self._steps = min([steps, *[job.to_write for job in decoding]])
        self._steps_began, self._step_seconds = now, seconds
        self.next_end = now + self._steps * seconds


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


def tokens_in_host_memory(mib: int) -> int:
    """Tokens of evicted prompts that so much of a host's memory holds."""
    return mib * 1024 * 1024 // KV_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """One llama.cpp server. Speeds in tokens per second."""

    name: str
    slots: int
    prefill_tps: float  # prompt tokens per second
    decode_tps: float  # output tokens per second of one request alone
    batch_cost: float = BATCH_COST
    batch_tokens: int = BATCH_TOKENS
    cache_tokens: int = tokens_in_host_memory(CACHE_RAM_MIB)  # 0: it has no such cache
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

    __slots__ = ("_limit", "host_prompts", "slot_prompts", "slot_used_at")

    def __init__(self, slots: int, host_tokens: int) -> None:
        self.slot_prompts = [EMPTY_PROMPT] * slots  # the prompt that each slot has cached
        self.slot_used_at = [-1.0] * slots  # when each slot ended its last job
        self.host_prompts: list[TracePrompt] = []  # the prompts in host memory, the oldest first
        self._limit = host_tokens

    def choose_slot(self, prompt: TracePrompt, free: list[int]) -> tuple[int, int]:
        """The slot, one of `free`, that takes a prompt, and the tokens of it that it has cached.

        The slot that has most of the prompt, if that is enough; else the one that was idle longest.
        Its own prompt goes to host memory, from where a better one may be loaded; then those of the
        other free slots do, as in llama.cpp whenever a job starts. At least one token is always
        read.
        """
        size = prompt.tokens
        held = self.slot_prompts
        slot = max(free, key=lambda one: common_tokens(held[one], prompt))
        best = common_tokens(held[slot], prompt)
        is_like = best > SLOT_SIMILARITY * size
        if not is_like:
            slot = min(reversed(free), key=self.slot_used_at.__getitem__)
        if not is_like or best < SLOT_KEPT_SHARE * held[slot].tokens:
            self._save(held[slot])
            self._load(slot, prompt)
        for other in free:
            if other != slot:
                self._save(held[other])
        return slot, min(common_tokens(held[slot], prompt), size - 1)

    def store(self, slot: int, prompt: TracePrompt, now: float) -> None:
        """A slot has ended its job and has this prompt cached."""
        self.slot_prompts[slot] = prompt
        self.slot_used_at[slot] = now

    def _save(self, prompt: TracePrompt) -> None:
        """Save a prompt to host memory unless it is there; it replaces its own beginnings."""
        if not 0 < prompt.tokens <= self._limit:
            return
        if any(common_tokens(one, prompt) == prompt.tokens for one in self.host_prompts):
            return
        held = [one for one in self.host_prompts if common_tokens(one, prompt) != one.tokens]
        held.append(prompt)
        while sum([one.tokens for one in held]) > self._limit:
            del held[0]
        self.host_prompts = held

    def _load(self, slot: int, prompt: TracePrompt) -> None:
        """Load an evicted prompt that has more of `prompt`, as tokens and as a share of itself."""
        best = old = self.slot_prompts[slot]
        gain = common_tokens(old, prompt)
        share = gain / old.tokens if old.tokens else -1.0
        for one in self.host_prompts:
            common = common_tokens(one, prompt)
            used = common / one.tokens
            if common > gain and used >= HOST_LOADED_SHARE and used > share:
                best, share, gain = one, used, common
        if best is not old:
            self.slot_prompts[slot] = best
            self.host_prompts.remove(best)


PROGRESS_EVERY = 2000  # ended requests between two calls of `progress`


class SimulatedFleet:
    """The simulated nodes, to which a front sends the jobs of a trace, in which results are noted.

    `routers`: by server, the number of its router. Those of one router that compute at the same
    time share its speed in equal parts. None: each server has a machine of its own. `loaded`: the
    servers that take jobs from the start; None: all.
    """

    def __init__(
        self,
        machines: Sequence[SimulatedMachine],
        trace: Trace,
        routers: Sequence[int] | None = None,
        loaded: Collection[int] | None = None,
    ) -> None:
        self.machines, self.trace, self.jobs = machines, trace, trace.jobs
        self.servers = [SimulatedServer(machine) for machine in machines]
        self.loaded = set(range(len(machines)) if loaded is None else loaded)
        self.loads, self.load_seconds = 0, 0.0  # of models on demand
        self.now = 0.0
        self.routers = range(len(machines)) if routers is None else routers
        count = max(self.routers, default=-1) + 1
        self._active: list[set[int]] = [set() for _ in range(count)]  # the servers that compute
        self._able: dict[str, list[int]] = {}
        # A router's own clock runs slower the more of its servers compute: by how much it is late,
        # and at which time that was.
        self._lags = [0.0] * count
        self._lags_of = [0.0] * count
        # Ends of steps: time, router, version; void if the router has another version by now.
        self._ends: list[tuple[float, int, int]] = []
        self._versions = [0] * count

    @property
    def began(self) -> float:
        """The first arrival."""
        return min((job.arrived for job in self.jobs), default=0.0)

    @property
    def ended(self) -> float:
        """The last end."""
        return max((job.ended for job in self.jobs), default=0.0)

    def able(self, model: str) -> list[int]:
        """The servers that serve a model, if they are loaded."""
        if model not in self._able:
            serving = [index for index, one in enumerate(self.machines) if one.serves(model)]
            self._able[model] = serving
        return self._able[model]

    def send(self, job: Job, node: int) -> None:
        """Send a job to a node, now. A node without a free slot queues it."""
        now, router = self.now, self.routers[node]
        job.sent, job.node = now, node
        active = self._active[router]
        if len(active) > 1:
            self._lags[router] += (now - self._lags_of[router]) * (1.0 - 1.0 / len(active))
        self._lags_of[router] = now
        if self.servers[node].take(job, now - self._lags[router], now):
            active.add(node)
            self._note_end(router)

    def next_step_end(self) -> float:
        """When the next steps end; infinity while every node is idle."""
        ends = self._ends
        while ends:
            time, router, version = ends[0]
            if version == self._versions[router]:
                return time
            heappop(ends)
        return math.inf

    def end_steps(self) -> tuple[list[Job], list[Job]]:
        """End those steps, now: the jobs that have their first token, and those that have ended."""
        _, router, _ = heappop(self._ends)
        active = self._active[router]
        node = min(active, key=lambda index: (self.servers[index].next_end, index))
        server = self.servers[node]
        # Without the error of its floats.
        self._lags[router], self._lags_of[router] = self.now - server.next_end, self.now
        ended = server.end_steps(server.next_end, self.now)
        if server.next_end < 0:
            active.discard(node)
        self._note_end(router)
        return ended

    def _note_end(self, router: int) -> None:
        """The steps of a router end at another time than before."""
        self._versions[router] += 1
        if active := self._active[router]:
            end = min([self.servers[index].next_end for index in active]) + self._lags[router]
            if len(active) > 1:
                end = self.now + max(0.0, end - self.now) * len(active)
            heappush(self._ends, (end, router, self._versions[router]))


class Front(ABC):
    """Places requests on the nodes of a fleet: a proxy in front of them."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet = fleet
        self.alarm = math.inf  # when it is to be woken if nothing else happens; infinity: never

    @abstractmethod
    def arrive(self, job: Job) -> None:
        """Send a request that has arrived, or queue it."""

    def started(self, job: Job) -> None:  # noqa: B027 - most don't care
        """Take note of its first token."""

    @abstractmethod
    def ended(self, job: Job) -> None:
        """Take note of its last token: the slot is free."""

    def wake(self) -> None:  # noqa: B027 - where no alarm is set
        """Act at the time of the alarm. Must set a later one."""


class StuckError(Exception):
    """A front never sent some requests, though nothing else was to happen."""


def simulate(front: Front, progress: Callable[[int], None] | None = None) -> SimulatedFleet:
    """Play the trace of a front's fleet through the front. Returns the fleet.

    Read the results before the trace is played again. `progress` is called now and then with the
    number of requests that have ended. Raises StuckError if the front leaves requests unsent when
    nothing more can happen.
    """
    fleet, jobs, next_turns = front.fleet, front.fleet.jobs, front.fleet.trace.next_turns
    # First turns at their times; later ones once the turn before has ended, and before others.
    arrivals = [(job.time, True, job.id) for job in jobs if not job.is_later_turn]
    ended = 0
    while True:
        step = fleet.next_step_end()
        next_arrival = arrivals[0][0] if arrivals else math.inf
        now = min(step, next_arrival, front.alarm)
        if now == math.inf:
            break
        fleet.now = now
        if step <= now:
            first, done = fleet.end_steps()
            for job in first:
                front.started(job)
            for job in done:
                if (place := next_turns.get(job.id)) is not None:
                    turn = jobs[place]
                    heappush(arrivals, (max(turn.time, job.ended + turn.pause), False, place))
                front.ended(job)
                ended += 1
                if progress is not None and not ended % PROGRESS_EVERY:
                    progress(ended)
        elif next_arrival <= now:
            job = jobs[heappop(arrivals)[2]]
            job.arrived, job.sent = now, -1.0  # its results are of this run from now on
            front.arrive(job)
        else:
            front.wake()
            if front.alarm <= now:
                raise StuckError(f"the front would be woken for ever at {now:g} s")
    if ended != len(jobs):
        raise StuckError(f"{len(jobs) - ended} of {len(jobs)} requests were never served")
    return fleet
