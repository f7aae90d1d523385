"""Generates answers: slot, prefill and decode of one request, at the node's speeds.

The slots of one node may share its computation, batch after batch.
As in llama.cpp's `update_slots`, a batch holds one token of every decoding slot, and then as many
prompt tokens as fit (`--batch-size`), first come, first served. It takes

    prompt tokens / prefill_tps + base + step * (decoding - 1)      seconds

where `base` is the time of a token alone and `step` is added by each further decoding slot. So
prompts are read one after the other, and meanwhile each decoding slot gets one token a batch.

The times at which batches are due add up: a late timer delays one batch, but does not make the
node slower.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field

from tests.emulator.apis import APIS, Answer, Api, ResponseState, data_event, to_json
from tests.emulator.language_model import BEGIN_TOKEN, count_tokens, next_words, tokenize
from tests.emulator.prompt_cache import TOKEN_BYTES, Tokens, pack
from tests.emulator.request_body import GenerationRequest, RefusedError, open_answer_tokens
from tests.emulator.response import ClientGoneError, Response
from tests.emulator.slots import PoolFullError, Slot, SlotPool

_YIELD_EVERY = 16  # tokens after which an answer without delays yields to other tasks
_COMPUTE_ERROR = "Compute error."
_POOL_FULL = "Context size has been exceeded."


@dataclass(slots=True, eq=False)
class _BatchShare:
    """The share of one request in the batches: a prompt in prefill, or answers in decode."""

    left: int = 0  # prompt tokens still to be read
    begun: float = 0.0  # time of the first batch with some of them
    width: int = 0  # answers being decoded
    asked: bool = False  # whether it waits for its next tokens
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Compute:
    """One node's computation. Speeds in tokens/s, `step` in seconds."""

    prefill_tps: float
    decode_tps: float  # of a slot that decodes alone
    step: float
    batch: int  # tokens
    clock: Callable[[], float]
    busy_seconds: float = 0.0
    _reading: list[_BatchShare] = field(default_factory=list)
    _writing: list[_BatchShare] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def read(self, tokens: int) -> AsyncGenerator[tuple[int, float], None]:
        """Read a prompt. Yields after each batch the tokens read and the time of their first
        batch (0: not yet).
        """
        share = _BatchShare(left=tokens)
        self._reading.append(share)
        try:
            while share.left:
                self._run()
                await share.wake.wait()
                share.wake.clear()
                yield tokens - share.left, share.begun
        finally:
            if share in self._reading:
                self._reading.remove(share)

    @contextmanager
    def writing(self, width: int) -> Iterator[BatchWriter]:
        share = _BatchShare(width=width)
        self._writing.append(share)
        try:
            yield BatchWriter(share, self._run)
        finally:
            self._writing.remove(share)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _run(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._batches())

    async def _batches(self) -> None:
        due = self.clock()
        while self._reading or any(share.asked for share in self._writing):
            begun = self.clock()
            writers = [share for share in self._writing if share.asked]
            width = sum(share.width for share in writers)
            taken = self._prompt_tokens_of_batch(max(self.batch - width, 1), begun)
            seconds = sum(taken.values()) / self.prefill_tps
            if width:
                seconds += 1 / self.decode_tps + self.step * (width - 1)
            due += seconds
            self.busy_seconds += seconds
            await asyncio.sleep(max(due - self.clock(), 0))
            for share, tokens in taken.items():
                share.left -= tokens
            for share in self._reading:
                share.wake.set()
            self._reading = [share for share in self._reading if share.left]
            for share in writers:
                share.asked = False
                share.wake.set()
            await asyncio.sleep(0)  # lets requests that are done leave or go on to decode

    def _prompt_tokens_of_batch(self, room: int, now: float) -> dict[_BatchShare, int]:
        taken = {}
        for share in self._reading:
            taken[share] = min(room, share.left)
            if not share.begun:
                share.begun = now
                share.wake.set()
            room -= taken[share]
            if not room:
                break
        return taken


@dataclass(slots=True)
class BatchWriter:
    """The answers of one request while they are decoded."""

    share: _BatchShare
    run: Callable[[], None]

    async def next(self, width: int) -> None:
        """Wait for the batch that brings the next token of each of the answers that go on."""
        self.share.width, self.share.asked = width, True
        self.run()
        await self.share.wake.wait()
        self.share.wake.clear()


@dataclass(slots=True)
class TokenTally:
    """What a node did for the requests of one tag, in all their attempts."""

    attempts: int = 0
    prompt_tokens: int = 0  # of their prompts, read or cached
    read_tokens: int = 0  # that were read by now
    cached_tokens: int = 0
    tokens: int = 0  # that were generated
    begun_at: float = math.inf  # Unix time when the first of them came


@dataclass(slots=True)
class ActiveAnswer:
    answer: Answer
    slot: Slot
    tokens: Tokens  # of the prompt; empty if nothing is cached
    words: Iterator[str]
    limit: int  # tokens that were requested, or that fit
    natural_end: float  # tokens after which the model ends the answer
    prompt_read: bool = False

    def store_contents(self) -> None:
        """Store in the slot what it has cached when a request ends, in whichever phase."""
        answer, slot = self.answer, self.slot
        if slot.failed:
            slot.contents = b""
        elif not self.prompt_read:
            slot.contents = self.tokens[: (answer.cached + slot.processed) * TOKEN_BYTES]
        elif self.tokens:
            # The last token was never read back.
            slot.contents = self.tokens + pack(tokenize(answer.text))[:-TOKEN_BYTES]


@dataclass(slots=True)
class Work:
    request: GenerationRequest
    response: Response
    tally: TokenTally
    api: Api
    running: list[ActiveAnswer] = field(default_factory=list)

    @property
    def stream(self) -> Response | None:
        return self.response if self.request.stream else None

    def error_event(self, message: str) -> bytes:
        """The event by which a stream of this API tells that it has failed."""
        error = {"code": 500, "message": message, "type": "server_error"}
        if self.request.api == "messages":
            return b"event: error\n" + data_event(error)
        return data_event({"error": error})


@dataclass(slots=True, kw_only=True)
class Engine:
    """Works on the slots of one node. Speeds in tokens/s; with `inf` work takes no time.

    Each request has these speeds to itself, unless all share `compute`.
    """

    pool: SlotPool
    model: str
    context: int  # tokens of one slot
    prefill_tps: float
    decode_tps: float
    answer_tokens: int | Callable[[str], int]  # length of the model's own answer to a prompt
    batch: int  # prompt tokens between two progress events
    compute: Compute | None
    ping_interval: float  # seconds of silent prefill before a comment
    clock: Callable[[], float]
    requests: int = 0
    prompt_tokens: int = 0  # prompt tokens that were read
    cached_tokens: int = 0  # prompt tokens that were cached
    tokens: int = 0
    reading: int = 0  # prompts being read
    tallies: dict[str, TokenTally] = field(default_factory=dict)  # by the requests' tags

    def tally(self, tag: str) -> TokenTally:
        return self.tallies.setdefault(tag, TokenTally())

    def check_context(self, tokens: int) -> None:
        if tokens >= self.context:
            size = f"({self.context} tokens), try increasing it"
            message = f"request ({tokens} tokens) exceeds the available context size {size}"
            kind, counts = "exceed_context_size_error", {"n_prompt_tokens": tokens}
            raise RefusedError(400, kind, message, **counts, n_ctx=self.context)

    async def generate(
        self, request: GenerationRequest, response: Response, tally: TokenTally | None = None
    ) -> None:
        """Answers one request. Raises `RefusedError` before the response has begun."""
        counts = [count_tokens(prompt) for prompt in request.prompts]
        for count in counts:
            self.check_context(count)
        tally = tally or TokenTally()
        tally.attempts += 1
        tally.begun_at = min(tally.begun_at, time.time())
        tally.prompt_tokens += sum(counts)
        self.requests += 1
        state = ResponseState(request, self.model, int(time.time()), self.requests)
        cache = self.pool.cache is not None
        packed = [pack([BEGIN_TOKEN, *tokenize(p)]) if cache else b"" for p in request.prompts]
        wanted = int(request.body.get("id_slot", -1))
        slots = await self.pool.acquire(len(request.prompts), packed[0], wanted)
        work = Work(request, response, tally, APIS[request.api](state))
        try:
            for i, (prompt, count) in enumerate(zip(request.prompts, counts, strict=True)):
                slot = slots[i % len(slots)]
                cached = self.pool.cached(slot, packed[i])
                answer = Answer(i, prompt, count, slot.id, cached)
                state.answers.append(answer)
                room = self.context - count
                limit = room if request.max_tokens is None else min(request.max_tokens, room)
                slot.begin(count, limit, cached)
                words = next_words(prompt + slot.foreign)
                natural = math.inf if request.asks("ignore_eos") else self._natural_end(prompt)
                work.running.append(ActiveAnswer(answer, slot, packed[i], words, limit, natural))
                tally.cached_tokens += cached
            if request.stream:
                await self._stream(work)
            else:
                await self._prefill(work)
                await self._decode(work)
                await response.plain(200, to_json(work.api.plain()))
        except PoolFullError:
            if not request.stream:
                raise RefusedError(500, "server_error", _POOL_FULL) from None
            await response.end_stream([work.error_event(_POOL_FULL)])
        finally:
            for active in work.running:
                active.store_contents()
            self.pool.release(slots)

    def _natural_end(self, prompt: str) -> int:
        """Tokens after which the model ends the answer."""
        ends = self.answer_tokens
        return (ends if isinstance(ends, int) else ends(prompt)) - open_answer_tokens(prompt)

    async def _stream(self, work: Work) -> None:
        response, api = work.response, work.api
        response.error_event = work.error_event(_COMPUTE_ERROR)
        await response.open_stream()
        if first := api.head():
            await response.events(first)
        await self._prefill(work)
        if response.connection.gone:
            raise ClientGoneError  # the server notices it only after the prefill
        response.interruptible = True
        await self._decode(work)
        await response.end_stream(api.end())

    async def read_only(self, tokens: int) -> None:
        """Reads a prompt without generating an answer (embeddings, reranking)."""
        slots = await self.pool.acquire(1)
        try:
            slots[0].begin(tokens, 0)
            slots[0].contents = b""
            async with aclosing(self._read_prompt(tokens, tokens, None)) as reading:
                async for _ in reading:
                    pass
            self.prompt_tokens += tokens
        finally:
            self.pool.release(slots)

    async def _prefill(self, work: Work) -> None:
        start, stream = self.clock(), work.stream
        # With `n` > 1 the prompt is read once.
        answers = {active.answer.prompt: active.answer for active in work.running}.values()
        total = sum(answer.prompt_tokens - answer.cached for answer in answers)
        progress = work.request.asks("return_progress") and stream is not None
        step, counted = self.batch if progress else total, 0
        async with aclosing(self._read_prompt(total, step, stream)) as reading:
            async for processed, begun in reading:
                start = begun or start
                work.tally.read_tokens += processed - counted
                counted = processed
                for active in work.running:
                    answer = active.answer
                    active.slot.processed = min(processed, answer.prompt_tokens - answer.cached)
                    self.pool.check_room(active.slot)
                if progress and begun and stream is not None:
                    if stream.connection.gone:
                        raise ClientGoneError
                    seconds, first = self.clock() - begun, work.running[0].answer
                    told = work.api.progress(first, first.cached + processed, seconds)
                    await stream.events(told)
        self.prompt_tokens += total
        self.cached_tokens += sum(answer.cached for answer in answers)
        for active in work.running:
            active.answer.prefill = self.clock() - start
            active.prompt_read = True

    async def _decode(self, work: Work) -> None:
        unfinished = list(work.running)
        with ExitStack() as stack:
            writer = None
            if self.compute is not None:
                writer = stack.enter_context(self.compute.writing(len(unfinished)))
            begin = self.clock()
            step = 0
            while unfinished:
                if step and writer is not None:
                    await writer.next(len(unfinished))
                elif step:
                    await self._sleep_until(begin + step / self.decode_tps, step)
                for active in list(unfinished):
                    active.answer.decode = self.clock() - begin
                    if await self._step(work, active):
                        unfinished.remove(active)
                step += 1

    async def _step(self, work: Work, active: ActiveAnswer) -> bool:
        """Decodes an answer's next token, if there is one. Returns whether the answer has ended."""
        answer, api = active.answer, work.api
        first = answer.tokens == 0
        word = self._next_word(work, active)
        ended = word is None or bool(answer.stopping_word)
        if not ended and answer.tokens >= active.limit:
            answer.finish, ended = "length", True
        if (stream := work.stream) is not None:
            events = api.start(answer) if first else []
            if word is not None:
                events.append(api.delta(answer, word))
            if events:
                await stream.events(events)
            if ended:
                await stream.events(api.finish(answer))
        return ended

    def _next_word(self, work: Work, active: ActiveAnswer) -> str | None:
        """Decodes one more token; None at the end of the model's answer."""
        answer = active.answer
        if answer.tokens >= active.natural_end:
            return None
        word = next(active.words)
        answer.tokens += 1
        active.slot.decoded += 1
        self.pool.check_room(active.slot)
        work.tally.tokens += 1
        self.tokens += 1
        before = len(answer.text)
        answer.text += word
        for stop in work.request.stop:
            at = answer.text.find(stop)
            if at >= 0:
                answer.finish, answer.stopping_word = "word", stop
                answer.text = answer.text[: max(at, before)]
                return answer.text[before:]
        return word

    async def _read_prompt(
        self, tokens: int, step: int, response: Response | None
    ) -> AsyncGenerator[tuple[int, float], None]:
        """Reads a prompt. Yields now and then the tokens read and the time of the beginning."""
        self.reading += 1
        try:
            begin = last_ping = self.clock()
            if self.compute is None:
                for done in range(0, tokens + step, step):
                    processed = min(done, tokens)
                    await self._sleep_with_pings(begin + processed / self.prefill_tps, response)
                    yield processed, begin
                return
            async with aclosing(self.compute.read(tokens)) as reading:
                async for figures in reading:
                    if response is not None and self.clock() - last_ping > self.ping_interval:
                        last_ping = self.clock()
                        await response.comment()
                    yield figures
        finally:
            self.reading -= 1

    async def _sleep_until(self, due: float, step: int) -> None:
        delay = due - self.clock()
        if delay > 0:
            await asyncio.sleep(delay)
        elif step % _YIELD_EVERY == 0:
            await asyncio.sleep(0)

    async def _sleep_with_pings(self, due: float, response: Response | None) -> None:
        if self.clock() > due and self.prefill_tps < math.inf:
            # A node that is late learns as well, between two batches, that its client has left.
            await asyncio.sleep(0)
        while (left := due - self.clock()) > 0:
            seconds = left if response is None else min(left, self.ping_interval)
            await asyncio.sleep(seconds)
            if response is not None and seconds < left:
                await response.comment()
