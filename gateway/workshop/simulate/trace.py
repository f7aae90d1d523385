"""The requests of a simulation, each with its result: read from a file, or generated.

Generated traffic is conversations of chat users, which share system prompts. Conversations begin as
a Poisson process and have a geometric number of turns. The prompt of a turn is the tenant's system
prompt, the conversation so far and a new question. A person reads the answer, thinks, and asks
again; if the answer is late, once it has come. So the load is the same under every policy, as long
as the fleet can bear it. Lengths of questions and answers are log-normal: most are short, a few
very long, as in public traces of such traffic.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

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
        there = streams.get(prompt.stream, 0)
        if prompt.prefix:
            if prompt.prefix in heads:
                there = max(there, prompt.prefix_tokens)
            heads.add(prompt.prefix)
        found[job.id] = max(1, prompt.tokens - there)
        held = job.final_prompt.tokens
        streams[prompt.stream] = max(streams.get(prompt.stream, 0), held)
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

    def arrive(self, now: float) -> None:
        """It reaches the front."""
        self.arrived = now

    def send_to(self, node: int, now: float) -> None:
        """The front sends it to a node."""
        self.sent, self.node = now, node

    def start(self, slot: int, cached: int, now: float) -> None:
        """It gets a slot that has `cached` tokens of its prompt."""
        self.began, self.slot, self.cached = now, slot, cached
        self.to_read = self.prompt.tokens - cached
        self.to_write = self.output

    def reset(self) -> None:
        """Clear its result, for another run."""
        self.arrived = 0.0
        self.sent = self.began = self.first = self.ended = -1.0
        self.node = self.slot = -1
        self.cached = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times; a job's id is its index."""

    jobs: Sequence[Job]
    next_turns: Mapping[int, int] = field(default_factory=dict)
    """By a job's id: that of the next turn of its conversation."""
    skipped: int = 0  # broken lines that were left out


MOST_TOKENS = 10_000_000
MOST_SECONDS = 1e9
# A file with more broken lines than this is read no further: it has another format.
MOST_PROBLEMS = 20
LONGEST_TRACE_LINE = 1_000_000

TRACE_KEYS = {
    "time",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "model",
    "class",
    "caller",
    "session",
    "pause",
    "prefix",
    "prefix_tokens",
}

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_CLASSES = [priority.label for priority in Priority]


class _Broken(Exception):  # noqa: N818 - a line's own mistake, caught by the reader
    def __init__(self, key: str, message: str, remedy: str, column: int = 0) -> None:
        super().__init__(message)
        self.key, self.message, self.remedy, self.column = key, message, remedy, column


def read_trace(path: Path, *, skip_broken: bool = False, limit: int | None = None) -> Trace:
    """Read a trace; `.csv` means the Azure layout, anything else JSON lines.

    `limit`: read only that many requests. With `skip_broken`, broken lines are left out and
    counted; else raises ConfigError with file, line and remedy. Raises OSError.
    """
    problems: list[Problem] = []
    skipped = 0
    jobs: list[Job] = []
    read = _Csv() if path.suffix.lower() == ".csv" else _Lines()
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, line in enumerate(_bounded(file), start=1):
            if limit is not None and len(jobs) >= limit:
                break
            try:
                job = read(line)
            except _Broken as wrong:
                # Without its head line a CSV file has no columns.
                hopeless = isinstance(read, _Csv) and not read.has_head
                if skip_broken and not hopeless:
                    skipped += 1
                    continue
                problems.append(
                    Problem(path, number, wrong.key, wrong.message, wrong.remedy, wrong.column)
                )
                if hopeless or len(problems) >= MOST_PROBLEMS:
                    break
                continue
            if job is not None:
                jobs.append(job)
    if problems:
        raise ConfigError(problems)
    if not jobs:
        raise ConfigError([Problem(path, 0, "", "holds no request", "write one a line")])
    start = min(job.time for job in jobs)
    for job in jobs:
        job.time -= start
    trace = build_trace(jobs)
    return Trace(trace.jobs, trace.next_turns, skipped)


def _bounded(file: io.TextIOBase) -> Iterator[str]:
    while line := file.readline(LONGEST_TRACE_LINE):
        yield line


@dataclass(slots=True)
class _Lines:
    """JSON lines, whose sessions and prefixes are numbered."""

    _streams: dict[str, int] = field(default_factory=dict)
    _heads: dict[str, int] = field(default_factory=dict)
    _single: int = 0
    _time: float = 0.0

    def __call__(self, text: str) -> Job | None:
        if not text.strip():
            return None
        line = _JsonLine(text)
        prompt = line.whole("prompt_tokens", 1, None)
        output = line.whole("output_tokens", 1, None)
        shared = line.whole("prefix_tokens", 0, 0)
        if shared > prompt:
            raise line.broken("prefix_tokens", "more than prompt_tokens", "it is a part of it")
        prefix, session = line.text("prefix"), line.text("session")
        klass = line.text("class") or "normal"
        if klass not in _CLASSES:
            raise line.broken("class", f"{klass!r} is no class", ", ".join(_CLASSES))
        time = line.seconds("time", self._time, -MOST_SECONDS)
        pause = line.seconds("pause", 0.0, 0.0)
        limit = line.whole("max_tokens", 1, MOST_TOKENS) if "max_tokens" in line.value else None
        self._time = time
        if session:
            stream = self._streams.setdefault(session, len(self._streams) + 1)
        else:
            self._single += 1
            stream = -1 - self._single
        head = self._heads.setdefault(prefix, len(self._heads) + 1) if prefix and shared else 0
        return Job(
            0,
            time,
            TracePrompt(stream, prompt, head, shared if head else 0),
            output if limit is None else min(output, limit),
            max_tokens=limit,
            priority_label=klass,
            caller=line.text("caller"),
            pause=pause,
            model=line.text("model"),
        )


class _JsonLine:
    """The JSON object of a line, whose values are checked as they are asked for."""

    def __init__(self, line: str) -> None:
        self.line = line
        try:
            self.value: dict[str, Any] = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise _Broken("", f"{error.msg}", "write one JSON object a line", error.colno) from None
        except (ValueError, RecursionError):
            raise _Broken("", "can't be read", "write one JSON object a line") from None
        if not isinstance(self.value, dict):
            raise _Broken("", "is no JSON object", 'write {"prompt_tokens": ...} on each line')
        unknown = next((key for key in self.value if key not in TRACE_KEYS), None)
        if unknown is not None:
            column = line.find(json.dumps(unknown)) + 1
            raise _Broken(unknown, "unknown key", f"known: {', '.join(sorted(TRACE_KEYS))}", column)

    def broken(self, key: str, message: str, remedy: str) -> _Broken:
        """The mistake of a key's value."""
        return _Broken(key, message, remedy, self.line.find(f'"{key}"') + 1)

    def _invalid(self, key: str, remedy: str) -> _Broken:
        text = json.dumps(self.value[key])
        shown = text if len(text) <= 40 else text[:40] + "..."
        return self.broken(key, f"{shown} is not valid", remedy)

    def whole(self, key: str, least: int, otherwise: int | None) -> int:
        """A whole number, at most MOST_TOKENS."""
        found = self.value.get(key, otherwise)
        if found is None:
            raise _Broken(key, "is missing", f"write a whole number, {least} or more")
        is_whole = isinstance(found, int) and not isinstance(found, bool)
        if not is_whole or not least <= found <= MOST_TOKENS:
            raise self._invalid(key, f"write a whole number from {least} to {MOST_TOKENS}")
        return int(found)

    def seconds(self, key: str, otherwise: float, least: float) -> float:
        """A number of seconds."""
        found = self.value.get(key, otherwise)
        sound = isinstance(found, int | float) and not isinstance(found, bool)
        if not sound or not math.isfinite(found) or not least <= found <= MOST_SECONDS * 10:
            raise self._invalid(key, "write seconds, such as 12.5")
        return float(found)

    def text(self, key: str) -> str:
        """A text; empty: not given."""
        found = self.value.get(key, "")
        if not isinstance(found, str):
            raise self._invalid(key, "write a text in quotes")
        return found


class _Csv:
    """The Azure layout: a few columns, no value with a line end in it."""

    def __init__(self) -> None:
        self._places: list[int] | None = None
        self._count = 0

    @property
    def has_head(self) -> bool:
        """Whether the head line has been read."""
        return self._places is not None

    def __call__(self, line: str) -> Job | None:
        if not line.strip():
            return None
        cells = next(csv.reader([line.strip("\r\n\ufeff")]), [])
        if self._places is None:
            names = [cell.strip() for cell in cells]
            missing = [name for name in _AZURE if name not in names]
            if missing:
                remedy = f"begin the file with {','.join(_AZURE)}, or name it .jsonl"
                raise _Broken("", f"the head line has no {', '.join(missing)}", remedy, 1)
            self._places = [names.index(name) for name in _AZURE]
            return None
        if len(cells) <= max(self._places):
            raise _Broken("", f"has {len(cells)} cells", "one for each column of the head line")
        self._count += 1
        time, prompt, output = (
            self._cell(cells, place, kind)
            for place, kind in zip(self._places, (_stamp, _count, _count), strict=True)
        )
        # A few requests of the public traces have no output; their prompt is read all the same.
        written = max(1, int(output))
        return Job(0, time, TracePrompt(-1 - self._count, max(1, int(prompt))), written)

    def _cell(self, cells: list[str], place: int, kind: Callable[[str], float]) -> float:
        try:
            return kind(cells[place].strip())
        except ValueError as error:
            name = _AZURE[(self._places or []).index(place)]
            column = sum(len(cell) + 1 for cell in cells[:place]) + 1
            raise _Broken(name, f"{cells[place]!r} is not valid", str(error), column) from None


def _stamp(text: str) -> float:
    try:
        # Seven digits of a second, which not every Python's fromisoformat accepts.
        head, _, fraction = text.partition(".")
        digits = ""
        while fraction[:1].isdigit():
            digits, fraction = digits + fraction[0], fraction[1:]
        stamp = datetime.fromisoformat(head + fraction)
        return stamp.replace(tzinfo=UTC).timestamp() + float(f"0.{digits or 0}")
    except (ValueError, OverflowError, OSError):
        raise ValueError("write it as 2023-11-16 18:15:46.6805900") from None


def _count(text: str) -> float:
    if not text.isdecimal() or int(text) > MOST_TOKENS:
        raise ValueError(f"write a whole number of tokens, at most {MOST_TOKENS}")
    return int(text)


def build_trace(jobs: list[Job]) -> Trace:
    """A trace of these jobs, sorted by time; the turns of a stream keep their order."""
    jobs.sort(key=lambda job: job.time)  # Stable.
    turns: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, job in enumerate(jobs):
        job.id = place
        stream = job.prompt.stream
        before = last.get(stream)
        if before is not None:
            turns[before] = place
            job.is_later_turn = True
        last[stream] = place
    return Trace(jobs, turns)


# Sigma of the logarithm of lengths: the 95th percentile is about 3.7 times the median.
LENGTH_SIGMA = 0.8
MOST_LENGTH_FACTOR = 8.0  # no length is more than this many times its mean: a context is finite
READ_TOKENS_PER_SECOND = 20.0  # tokens of an answer that a person reads per second as they come
# Mean durations of a conversation by which conversations begin before the trace does.
WARM_UP_DURATIONS = 3.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What to generate. Figures are means; tokens and seconds."""

    requests: int
    rate: float  # requests per second
    turns: float = 4.0  # turns of a conversation
    tenants: int = 6  # tenants, each with a system prompt; a few make most of the traffic
    system: int = 1500
    question: float = 120.0
    answer: float = 180.0
    pause: float = 20.0  # seconds between an answer and the next question
    limit: int = 2048
    """`max_tokens` of every request: far above the answers' lengths, as clients set it."""
    callers: int = 50
    burst: float = 1.0
    """During a burst this many times more conversations begin than between bursts."""
    every: float = 3600.0  # seconds from the start of a burst to that of the next
    lasting: float = 600.0  # seconds that a burst lasts
    urgent: float = 0.0  # share of the conversations that are of this class; the rest is `normal`
    premium: float = 0.0
    batch: float = 0.0
    zipf: float = 1.0
    """Of several models the one of rank n is asked for `1 / n**zipf` times as often as the first.
    What a burst adds is for one of them."""
    moves: float = 0.0  # seconds after which other models are the popular ones; 0: never

    def __post_init__(self) -> None:
        positive = (self.rate, self.question, self.answer)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ValueError("rate and lengths must be positive")
        if not (1 <= self.burst < math.inf and 0 < self.lasting < self.every < math.inf):
            raise ValueError("burst must be at least 1, and lasting shorter than every")
        counts = (self.requests, self.turns, self.tenants, self.callers)
        if not all(1 <= value < math.inf for value in counts):
            raise ValueError("requests, turns, tenants and callers must be at least 1")
        if not (0 <= self.zipf < math.inf and 0 <= self.moves < math.inf):
            raise ValueError("zipf and moves must not be negative")
        if self.system < 0 or not 0 <= self.pause < math.inf or self.limit < 1:
            raise ValueError("system prompt, pause and limit must not be negative")
        class_shares = (self.urgent, self.premium, self.batch)
        if not all(share >= 0 for share in class_shares) or not sum(class_shares) <= 1:
            raise ValueError("the shares of the classes must not be more than 1 in all")

    @classmethod
    def from_text(cls, text: str) -> Traffic:
        """From text such as `rate=2,requests=5000,turns=4`. Raises ValueError with the remedy."""
        kinds = {field.name: int if "int" in str(field.type) else float for field in fields(cls)}
        given = {"rate": 1.0, "requests": 5_000} | parse_figures(text, kinds)
        return cls(**given)  # type: ignore[arg-type]


def parse_figures(text: str, kinds: Mapping[str, type[int | float]]) -> dict[str, float]:
    """Numbers from text such as `rate=2,requests=5000`. Raises ValueError with the remedy."""
    found: dict[str, float] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"{name!r} is nothing to set; known: {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except (ValueError, OverflowError):
            number = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"{part!r}: write {number} behind the =") from None
    return found


def generate(
    traffic: Traffic, seed: int, models: Sequence[str] = (), shares: Sequence[float] = ()
) -> Trace:
    """Generate a trace, of several models where they are given; the same seed gives the same.

    `shares`: how often each model is asked for, beside the others; none: by `zipf` and `moves`.
    """
    rng = random.Random(seed)
    popularity = _Popularity(traffic, seed, models, shares)
    continue_share = 1.0 - 1.0 / traffic.turns
    weights = [1.0 / rank for rank in range(1, traffic.tenants + 1)]
    tenants = range(1, traffic.tenants + 1)
    classes = ("urgent", "premium", "batch", "normal")
    class_shares = [traffic.urgent, traffic.premium, traffic.batch]
    class_shares.append(1.0 - sum(class_shares))
    # Earlier conversations are under way, so that the rate is the same from the start.
    now = (
        -WARM_UP_DURATIONS
        * traffic.turns
        * (traffic.pause + traffic.answer / READ_TOKENS_PER_SECOND)
    )
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
        model = popularity.draw(now) if models else ""
        prompt_tokens = traffic.system
        time = now
        while True:
            prompt_tokens += random_length(rng, traffic.question)
            output = min(random_length(rng, traffic.answer), traffic.limit)
            if time >= 0:
                prompt = TracePrompt(
                    stream, prompt_tokens, tenant if traffic.system else 0, traffic.system
                )
                jobs.append(
                    Job(
                        0,
                        time,
                        prompt,
                        output,
                        max_tokens=traffic.limit,
                        priority_label=label,
                        caller=caller,
                        model=model,
                    )
                )
                heappush(later, time)
            if rng.random() >= continue_share:
                break
            prompt_tokens += output
            time += output / READ_TOKENS_PER_SECOND
            time += rng.expovariate(1.0 / traffic.pause) if traffic.pause else 0.0
    jobs.sort(key=lambda job: job.time)
    return build_trace(jobs[: traffic.requests])


class _Popularity:
    """Which model a conversation asks for: Zipf, bursts of one of them, ranks that change."""

    def __init__(
        self, traffic: Traffic, seed: int, models: Sequence[str], shares: Sequence[float]
    ) -> None:
        self._traffic = traffic
        self._seed = seed
        self._models = models
        self._rng = random.Random(f"models of {seed}")
        self._shares = shares
        self._weights = [rank**-traffic.zipf for rank in range(1, len(models) + 1)]

    def draw(self, now: float) -> str:
        """The model of a conversation that begins now."""
        traffic = self._traffic
        period = now / traffic.every + 0.5
        extra = 1.0 - 1.0 / traffic.burst
        if period % 1.0 < traffic.lasting / traffic.every and self._rng.random() < extra:
            return self._seeded("burst", math.floor(period)).choice(self._models)
        if self._shares:
            return self._rng.choices(self._models, self._shares)[0]
        ranked = list(self._models)
        self._seeded("ranks", math.floor(now / traffic.moves) if traffic.moves else 0).shuffle(
            ranked
        )
        return self._rng.choices(ranked, self._weights)[0]

    def _seeded(self, what: str, number: int) -> random.Random:
        return random.Random(f"{what} {number} of {self._seed}")


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
