"""What the server is, and prompts of a wanted length in its own tokens.

A prompt is random ordinary words: its first words are those of a common prefix, the rest is its
own. The same seed gives the same texts, and no two requests of a run have a longer beginning in
common than they should, so that a server's prompt cache helps as much as is wanted, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from gateway.transport.errors import ConnectFailed, ConnectTimedOut, UpstreamError
from gateway.transport.pool import NodeAddress
from gateway.workshop.bench.exchange import ExchangeError, RequestResult, RequestSender, read_object
from gateway.workshop.simulate.trace import TracePrompt

_TEXT = """
    the river ran under an old bridge where people used to meet and talk about work weather music
    trade letters from far away what their children had learnt that year while boats went by with
    stone wood salt wool for towns along coast which nobody here seen before one day some of them
    would go there find small house near water then come back home tell how long it was light rain
    fell over green fields every morning men women walked down into city market bread fish were sold
    new road made travel easy but many still took slow way because they liked open sky high hill
"""

WORDS = tuple(dict.fromkeys(_TEXT.split()))
KEPT_PREFIXES = 64  # texts of prefixes that are kept; others are made again
# Tokens of a prompt: about a megabyte of text, for each request that is under way.
MOST_PROMPT_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the server counts for words: `overhead + words * tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0  # tokens of a prompt without words: of the chat template
    source: str = "guessed: one token a word"

    def words(self, tokens: int) -> int:
        """Words of a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts."""

    seed: int
    calibration: Calibration

    def write(self, text: TracePrompt) -> str:
        """Write a prompt."""
        whole = self.calibration.words(text.tokens)
        shared = 0
        if text.prefix:
            shared = min(whole, round(text.prefix_tokens / self.calibration.tokens_per_word))
        if not shared:
            return random_words(f"{self.seed} stream {text.stream}", whole)
        prefix = _prefix_words(f"{self.seed} prefix {text.prefix}", shared)
        if shared == whole:
            return prefix
        return f"{prefix} {random_words(f'{self.seed} stream {text.stream}', whole - shared)}"


def random_words(seed: str, count: int) -> str:
    """So many words; the same seed and a larger count only add words.

    Each run of `len(WORDS)` words has each word once, so that two texts of a length hardly differ
    in tokens.
    """
    rng = random.Random(seed)
    words: list[str] = []
    while len(words) < count:
        words += rng.sample(WORDS, len(WORDS))
    return " ".join(words[:count])


_prefix_words = lru_cache(maxsize=KEPT_PREFIXES)(random_words)


def fit(short: tuple[int, int], long: tuple[int, int], source: str) -> Calibration:
    """Calibrate by two prompts, each as (words, tokens that the server counted).

    Raises ValueError where the longer one has not more tokens.
    """
    (few, few_tokens), (many, many_tokens) = short, long
    if many <= few or many_tokens <= few_tokens:
        raise ValueError("the longer prompt has not more tokens")
    per_word = (many_tokens - few_tokens) / (many - few)
    return Calibration(per_word, few_tokens - few * per_word, source)


QUESTION_SECONDS = 15.0  # limit of a question that costs the server nothing
MOST_ANSWER_BYTES = 4 << 20
ROUND_TRIPS = 5  # questions by which the distance is measured
# Words of the shorter prompt of a calibration, in which each word is once; the longer one has each
# twice.
PROBE_WORDS = len(WORDS)
PROBE_TOKENS = 4  # tokens asked for by a calibration: a first one may be special and empty
MOST_MODELS_NAMED = 5
MOST_ADDRESSES = 8


class TargetError(Exception):
    """The server can't be measured. The text says why, and the remedy."""


@dataclass(slots=True)
class ServerDescription:
    """What the server says of itself. None: it does not."""

    model: str | None = None
    slots: int | None = None
    context: int | None = None  # tokens of one slot
    round_trip: float | None = None
    """Seconds of the fastest of a few trivial requests, while the server was idle."""
    ignores_eos: bool = False  # whether it knows `ignore_eos`, as llama.cpp and vLLM do
    notes: list[str] = field(default_factory=list)


def server_address(url: str, key: str | None, tls: ssl.SSLContext | None) -> NodeAddress:
    """Where the server of a URL is; without `/v1`. `tls`: for https."""
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    authority = parts.netloc
    lines = f"host: {authority}\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
    return NodeAddress(
        host=host,
        port=parts.port or (443 if secure else 80),
        path_prefix=parts.path.rstrip("/").encode(),
        header_lines=lines.encode(),
        tls=tls if secure else None,
        server_name=host,
    )


def is_this_machine(host: str) -> bool:
    """Whether an address of this name is one of this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found[:MOST_ADDRESSES]:
        # Only an address of its own can be bound.
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind(address)
            return True
    return False


async def describe_server(sender: RequestSender, model: str | None) -> ServerDescription:
    """Ask the server for its models and its slots. Raises TargetError if there is none."""
    found = ServerDescription(model=model)
    try:
        status, models, first_trip = await _ask_json(sender, b"/v1/models")
    except (ConnectFailed, ConnectTimedOut) as error:
        raise TargetError(f"can't be reached: {error}. Is the server running?") from None
    except (UpstreamError, TimeoutError, ExchangeError) as error:
        reason = str(error) or f"no answer within {_question_seconds(sender):g} s"
        found.notes.append(f"/v1/models does not answer ({reason}).")
        return found
    if status in {401, 403}:
        raise TargetError(
            f"it refuses us ({status}). Remedy: --key-file FILE, or the key in LLAMA_GATEWAY_KEY"
        )
    _choose_model(found, status, models)
    listed = _objects(models.get("data"))
    found.round_trip = first_trip
    try:
        for _ in range(ROUND_TRIPS - 1):
            found.round_trip = min(found.round_trip, (await _ask_json(sender, b"/v1/models"))[2])
        status, props, _ = await _ask_json(sender, b"/props")
    except (UpstreamError, TimeoutError, ExchangeError):
        status, props = 0, {}
    if status == 200:
        slots, settings = props.get("total_slots"), props.get("default_generation_settings")
        found.slots = slots if isinstance(slots, int) and 0 < slots < 1_000_000 else None
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        found.context = context if isinstance(context, int) and context > 0 else None
    owners = {str(one.get("owned_by")) for one in listed}
    found.ignores_eos = found.slots is not None or bool(owners & {"llamacpp", "vllm"})
    return found


def _choose_model(found: ServerDescription, status: int, reply: Mapping[str, Any]) -> None:
    names = [one["id"] for one in _objects(reply.get("data")) if isinstance(one.get("id"), str)]
    if not names:
        if found.model is None:
            found.notes.append(
                f"/v1/models names no model (status {status}): requests name none. --model NAME"
            )
        return
    if found.model is None:
        found.model = names[0]
        if len(names) > 1:
            shown = ", ".join(names[:MOST_MODELS_NAMED])
            more = ", ..." if len(names) > MOST_MODELS_NAMED else ""
            found.notes.append(f"Of several models ({shown}{more}) the first: --model chooses.")
    elif found.model not in names:
        found.notes.append(f"/v1/models does not list {found.model}.")


@dataclass(slots=True)
class Probe:
    """What a few first requests have shown."""

    calibration: Calibration
    extra: dict[str, Any]  # fields that every body gets
    notes: list[str] = field(default_factory=list)


async def probe_server(
    sender: RequestSender,
    server: ServerDescription,
    extra: dict[str, Any],
    ignore_eos: bool,  # noqa: FBT001 - one of the settings
    seed: int,
) -> Probe:
    """Find by a few short requests which fields the server takes, and how it counts tokens.

    `extra`: fields that the user wants in every body; they are never left out. Raises TargetError
    where the server takes no such request at all.
    """
    endpoint = sender.endpoint

    async def ask(words: int, fields: dict[str, Any]) -> RequestResult:
        body = endpoint.body(server.model, _probe_prompt(seed, words), PROBE_TOKENS, fields)
        result = RequestResult(-1, sender.clock())
        await sender.send(result, json.dumps(body).encode(), PROBE_TOKENS)
        return result

    # Fields that help are tried, and left out where they are refused.
    variants: list[dict[str, Any]] = [{}]
    if endpoint.is_stream:
        variants.insert(0, {"stream_options": {"include_usage": True}})
        if ignore_eos:
            variants.insert(0, {**variants[0], "ignore_eos": True})
    short, accepted = RequestResult(0, 0.0), extra
    for fields in variants:
        accepted = {**fields, **extra}
        short = await ask(PROBE_WORDS, accepted)
        if short.error not in {"http_400", "http_422"}:
            break
    if short.error in {"connect_failed", "connect_timeout"}:
        raise TargetError(f"can't be reached: {short.detail}")
    if short.error in {"http_401", "http_403", "http_404", "http_405", "http_501"}:
        remedy = (
            "--key-file FILE, or the key in LLAMA_GATEWAY_KEY"
            if short.error in {"http_401", "http_403"}
            else "--endpoint and --model name others"
        )
        raise TargetError(
            f"it refuses POST /v1{endpoint.path.decode()} ({_shown(short)}). Remedy: {remedy}"
        )
    if short.error not in {None, "empty"}:
        note = f"The server fails from the first request on ({_shown(short)})"
        return Probe(Calibration(), accepted, [f"{note}: prompts are not calibrated."])
    notes = []
    if endpoint.is_stream and short.server.completion_tokens is None:
        notes.append("The server sends no usage: each event is counted as one token.")
    few, many = short.server.prompt_tokens, None
    if few is not None:
        many = (await ask(2 * PROBE_WORDS, accepted)).server.prompt_tokens
    source = "the server's usage"
    try:
        if few is None or many is None:
            few = await _tokenized(sender, _probe_prompt(seed, PROBE_WORDS))
            many = await _tokenized(sender, _probe_prompt(seed, 2 * PROBE_WORDS))
            source = "/tokenize, without the chat template"
        return Probe(fit((PROBE_WORDS, few), (2 * PROBE_WORDS, many), source), accepted, notes)
    except (UpstreamError, TimeoutError, ExchangeError, ValueError):
        notes.append(
            "The server tells no token counts: prompts are taken to have one token a word."
        )
        return Probe(Calibration(), accepted, notes)


def _probe_prompt(seed: int, words: int) -> str:
    return random_words(f"{seed} calibration {words}", words)


async def _tokenized(sender: RequestSender, text: str) -> int:
    _, reply, _ = await _ask_json(sender, b"/tokenize", {"content": text})
    tokens = reply.get("tokens")
    if not isinstance(tokens, list):
        raise ExchangeError("no_tokens")
    return len(tokens)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A request that is alone on the server; medians, in seconds. None: not measured."""

    ttft: float | None = None
    inter_token: float | None = None
    requests: int = 0

    @classmethod
    def of(cls, results: list[RequestResult]) -> Baseline:
        """Of requests sent one after the other; the first of several has only warmed up."""
        sound = [one for one in results if one.error is None]
        counted = sound[1:] or sound
        ttft = [one.ttft for one in counted if one.ttft is not None]
        gaps = [one.inter_token for one in counted if one.inter_token is not None]
        return cls(
            statistics.median(ttft) if ttft else None,
            statistics.median(gaps) if gaps else None,
            len(counted),
        )


def _question_seconds(sender: RequestSender) -> float:
    return min(sender.timeout, QUESTION_SECONDS)


async def _ask_json(
    sender: RequestSender, path: bytes, value: object = None
) -> tuple[int, dict[str, Any], float]:
    """Status, object (empty if it is none), and seconds from sending to the head.

    A GET; with a value a POST of it.
    """
    method, headers, body = b"GET", _HEADERS, b""
    if value is not None:
        method, body = b"POST", json.dumps(value).encode()
        headers += b"content-type: application/json\r\n"
    sent = [0.0]
    async with (
        asyncio.timeout(_question_seconds(sender)),
        sender.pool.response(
            sender.pool.address.request_head(method, path, headers, len(body) if body else None),
            body,
            connect_timeout=sender.connect_timeout,
            on_connected=lambda _: sent.__setitem__(0, sender.clock()),
        ) as connection,
    ):
        trip = sender.clock() - sent[0]
        content = await connection.read_all(MOST_ANSWER_BYTES)
    try:
        return connection.status, read_object(content), trip
    except ExchangeError:
        return connection.status, {}, trip


_HEADERS = b"accept: application/json\r\naccept-encoding: identity\r\n"


def _shown(result: RequestResult) -> str:
    return f"{result.error}: {result.detail}" if result.detail else str(result.error)


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
