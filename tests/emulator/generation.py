"""One request's way through slot, prefill and decode, at the node's speeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tests.emulator.dialects import DIALECTS, Answer, Dialect, Told
from tests.emulator.dialects.answer import data, dump
from tests.emulator.prompts import RefusedError, Work, written_tokens
from tests.emulator.reply import GoneError, Reply
from tests.emulator.slots import Slot, SlotPool
from tests.emulator.words import count_tokens, next_words

_YIELD = 16  # tokens after which an unpaced answer lets others run
_FAILURE = {"code": 500, "message": "Compute error.", "type": "server_error"}


@dataclass(slots=True)
class Writing:
    """One answer being written on one slot."""

    answer: Answer
    slot: Slot
    words: Iterator[str]
    limit: int  # tokens that were asked for or fit
    natural: int | None  # tokens after which the model ends by itself


@dataclass(slots=True, kw_only=True)
class Engine:
    """What works on the slots of one node. Speeds in tokens/s; `inf` takes no time at all."""

    pool: SlotPool
    model: str
    context: int  # tokens of one slot
    prefill_tps: float
    decode_tps: float
    answer_tokens: int  # where the model ends by itself
    batch: int  # prompt tokens between two signs of progress
    prefill_stalls: bool  # prompts are read one at a time, and nothing is written meanwhile
    ping_interval: float  # seconds of silent prefill before a comment
    clock: Callable[[], float]
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    reading: int = 0  # prompts being read
    _reader: asyncio.Lock = field(default_factory=asyncio.Lock)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)  # no prompt is being read

    def check(self, tokens: int) -> None:
        if tokens >= self.context:
            raise RefusedError(
                400,
                "exceed_context_size_error",
                f"request ({tokens} tokens) exceeds the available context size "
                f"({self.context} tokens), try increasing it",
                n_prompt_tokens=tokens,
                n_ctx=self.context,
            )

    async def generate(self, work: Work, reply: Reply) -> None:
        """Answers one request. Raises `RefusedError` while the reply has not begun."""
        counts = [count_tokens(prompt) for prompt in work.prompts]
        for count in counts:
            self.check(count)
        self.requests += 1
        told = Told(work=work, model=self.model, created=int(time.time()), serial=self.requests)
        slots = await self.pool.take(len(work.prompts))
        try:
            running: list[Writing] = []
            for i, (prompt, count) in enumerate(zip(work.prompts, counts, strict=True)):
                slot = slots[i % len(slots)]
                answer = Answer(index=i, prompt=prompt, prompt_tokens=count, slot=slot.id)
                told.answers.append(answer)
                room = self.context - count
                limit = room if work.max_tokens is None else min(work.max_tokens, room)
                slot.begin(count, limit)
                natural = None if work.ignore_eos else self.answer_tokens - written_tokens(prompt)
                running.append(Writing(answer, slot, next_words(prompt), limit, natural))
            dialect = DIALECTS[work.dialect](told)
            if work.stream:
                await self._stream(dialect, running, work, reply)
            else:
                await self._prefill(running, work, None, dialect)
                await self._decode(running, work, None, dialect)
                await reply.plain(200, dump(dialect.plain()))
        finally:
            self.pool.give_back(slots)

    async def _stream(
        self, dialect: Dialect, running: list[Writing], work: Work, reply: Reply
    ) -> None:
        named = work.dialect == "messages"
        error = b"event: error\n" + data(_FAILURE) if named else data({"error": _FAILURE})
        reply.error_event = error
        await reply.open_stream()
        if first := dialect.head():
            await reply.events(first)
        await self._prefill(running, work, reply, dialect)
        if reply.link.gone:
            raise GoneError  # in prefill the server does not look; it does now
        reply.interruptible = True
        await self._decode(running, work, reply, dialect)
        await reply.end_stream(dialect.end())

    async def occupy(self, tokens: int) -> None:
        """Reads a prompt for work that writes nothing (embeddings, reranking)."""
        slots = await self.pool.take(1)
        try:
            slots[0].begin(tokens, 0)
            async with self._read():
                await self._wait(self.clock() + tokens / self.prefill_tps, None)
            self.prompt_tokens += tokens
        finally:
            self.pool.give_back(slots)

    async def _prefill(
        self, running: list[Writing], work: Work, reply: Reply | None, dialect: Dialect
    ) -> None:
        start = self.clock()
        # The copies of `n` share one reading of their prompt.
        total = sum({s.answer.prompt: s.answer.prompt_tokens for s in running}.values())
        progress = work.return_progress and reply is not None
        step = self.batch if progress else total
        async with self._read():
            begin = self.clock()
            for done in range(0, total + step, step):
                processed = min(done, total)
                await self._wait(begin + processed / self.prefill_tps, reply)
                for writing in running:
                    writing.slot.processed = min(processed, writing.answer.prompt_tokens)
                if progress and reply is not None:
                    if reply.link.gone:
                        raise GoneError
                    seconds = self.clock() - begin
                    await reply.events(dialect.progress(running[0].answer, processed, seconds))
        self.prompt_tokens += total
        for writing in running:
            writing.answer.prefill = self.clock() - start

    async def _decode(
        self, running: list[Writing], work: Work, reply: Reply | None, dialect: Dialect
    ) -> None:
        begin = self.clock()
        step = 0
        live = list(running)
        while live:
            if step:
                await self._pace(begin + step / self.decode_tps, step)
                begin += await self._stalled()
            for writing in list(live):
                answer = writing.answer
                first = answer.tokens == 0
                answer.decode = self.clock() - begin
                word = self._next_word(writing, work)
                ended = word is None or bool(answer.stopping_word)
                if not ended and answer.tokens >= writing.limit:
                    answer.finish, ended = "length", True
                if ended:
                    live.remove(writing)
                if reply is not None:
                    events = dialect.start(answer) if first else []
                    if word is not None:
                        events.append(dialect.delta(answer, word))
                    if events:
                        await reply.events(events)
                    if ended:
                        await reply.events(dialect.finish(answer))
            step += 1

    def _next_word(self, writing: Writing, work: Work) -> str | None:
        """Writes one more token; None when the model has ended."""
        answer = writing.answer
        if writing.natural is not None and answer.tokens >= writing.natural:
            return None
        word = next(writing.words)
        answer.tokens += 1
        writing.slot.decoded += 1
        self.tokens += 1
        before = len(answer.text)
        answer.text += word
        for stop in work.stop:
            at = answer.text.find(stop)
            if at >= 0:
                answer.finish, answer.stopping_word = "word", stop
                answer.text = answer.text[: max(at, before)]
                return answer.text[before:]
        return word

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[None]:
        """Holds the others up, where prefill does."""
        async with AsyncExitStack() as stack:
            if self.prefill_stalls:
                await stack.enter_async_context(self._reader)
            self.reading += 1
            self._quiet.clear()
            try:
                yield
            finally:
                self.reading -= 1
                if not self.reading:
                    self._quiet.set()

    async def _stalled(self) -> float:
        """Stands still while a prompt is read; seconds that took."""
        if not (self.prefill_stalls and self.reading):
            return 0.0
        since = self.clock()
        await self._quiet.wait()
        return self.clock() - since

    async def _pace(self, due: float, step: int) -> None:
        delay = due - self.clock()
        if delay > 0:
            await asyncio.sleep(delay)
        elif step % _YIELD == 0:
            await asyncio.sleep(0)

    async def _wait(self, due: float, reply: Reply | None) -> None:
        while (left := due - self.clock()) > 0:
            nap = left if reply is None else min(left, self.ping_interval)
            await asyncio.sleep(nap)
            if reply is not None and nap < left:
                await reply.comment()
