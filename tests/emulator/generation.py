"""One request's way through slot, prefill and decode, at the node's speeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from tests.emulator.cache import WIDTH, Tokens, pack
from tests.emulator.compute import Compute, Writer
from tests.emulator.dialects import DIALECTS, Answer, Dialect, Told
from tests.emulator.dialects.answer import data, dump
from tests.emulator.prompts import RefusedError, Work, written_tokens
from tests.emulator.reply import GoneError, Reply
from tests.emulator.slots import Slot, SlotPool
from tests.emulator.words import BEGIN, count_tokens, next_words, tokenize

_YIELD = 16  # tokens after which an unpaced answer lets others run
_FAILURE = {"code": 500, "message": "Compute error.", "type": "server_error"}


@dataclass(slots=True)
class Writing:
    """One answer being written on one slot."""

    answer: Answer
    slot: Slot
    tokens: Tokens  # of the prompt; empty where nothing is cached
    words: Iterator[str]
    limit: int  # tokens that were asked for or fit
    natural: int | None  # tokens after which the model ends by itself
    read: bool = False  # the prompt


@dataclass(slots=True, kw_only=True)
class Engine:
    """What works on the slots of one node. Speeds in tokens/s; `inf` takes no time at all.

    Every request has these speeds to itself, unless `compute` is what they share.
    """

    pool: SlotPool
    model: str
    context: int  # tokens of one slot
    prefill_tps: float
    decode_tps: float
    answer_tokens: int | Callable[[str], int]  # where the model ends by itself, after a prompt
    batch: int  # prompt tokens between two signs of progress
    compute: Compute | None
    ping_interval: float  # seconds of silent prefill before a comment
    clock: Callable[[], float]
    requests: int = 0
    prompt_tokens: int = 0  # that were read
    cached_tokens: int = 0  # that need not be
    tokens: int = 0
    reading: int = 0  # prompts being read

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
        cache = self.pool.cache is not None
        packed = [pack([BEGIN, *tokenize(p)]) if cache else b"" for p in work.prompts]
        slots = await self.pool.take(len(work.prompts), packed[0])
        running: list[Writing] = []
        try:
            for i, (prompt, count) in enumerate(zip(work.prompts, counts, strict=True)):
                slot = slots[i % len(slots)]
                cached = self.pool.cached(slot, packed[i])
                answer = Answer(
                    index=i, prompt=prompt, prompt_tokens=count, slot=slot.id, cached=cached
                )
                told.answers.append(answer)
                room = self.context - count
                limit = room if work.max_tokens is None else min(work.max_tokens, room)
                slot.begin(count, limit, cached)
                words = next_words(prompt)
                natural = None if work.ignore_eos else self._natural(prompt)
                running.append(Writing(answer, slot, packed[i], words, limit, natural))
            dialect = DIALECTS[work.dialect](told)
            if work.stream:
                await self._stream(dialect, running, work, reply)
            else:
                await self._prefill(running, work, None, dialect)
                await self._decode(running, work, None, dialect)
                await reply.plain(200, dump(dialect.plain()))
        finally:
            for writing in running:
                _keep(writing)
            self.pool.give_back(slots)

    def _natural(self, prompt: str) -> int:
        """Tokens after which the model ends by itself."""
        ends = self.answer_tokens
        return (ends if isinstance(ends, int) else ends(prompt)) - written_tokens(prompt)

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
            slots[0].contents = b""
            async with aclosing(self._read(tokens, tokens, None)) as reading:
                async for _ in reading:
                    pass
            self.prompt_tokens += tokens
        finally:
            self.pool.give_back(slots)

    async def _prefill(
        self, running: list[Writing], work: Work, reply: Reply | None, dialect: Dialect
    ) -> None:
        start = self.clock()
        # The copies of `n` share one reading of their prompt.
        answers = {writing.answer.prompt: writing.answer for writing in running}.values()
        total = sum(answer.prompt_tokens - answer.cached for answer in answers)
        progress = work.return_progress and reply is not None
        step = self.batch if progress else total
        async with aclosing(self._read(total, step, reply)) as reading:
            async for processed, begun in reading:
                start = begun or start
                for writing in running:
                    answer = writing.answer
                    writing.slot.processed = min(processed, answer.prompt_tokens - answer.cached)
                if progress and begun and reply is not None:
                    if reply.link.gone:
                        raise GoneError
                    seconds, first = self.clock() - begun, running[0].answer
                    await reply.events(dialect.progress(first, first.cached + processed, seconds))
        self.prompt_tokens += total
        self.cached_tokens += sum(answer.cached for answer in answers)
        for writing in running:
            writing.answer.prefill = self.clock() - start
            writing.read = True

    async def _decode(
        self, running: list[Writing], work: Work, reply: Reply | None, dialect: Dialect
    ) -> None:
        live = list(running)
        with ExitStack() as stack:
            writer: Writer | None = None
            if self.compute is not None:
                writer = stack.enter_context(self.compute.writing(len(live)))
            begin = self.clock()
            step = 0
            while live:
                if step:
                    if writer is None:
                        await self._pace(begin + step / self.decode_tps, step)
                    else:
                        writer.narrow(len(live))
                        await writer.next()
                for writing in list(live):
                    writing.answer.decode = self.clock() - begin
                    if await self._step(writing, work, reply, dialect):
                        live.remove(writing)
                step += 1

    async def _step(
        self, writing: Writing, work: Work, reply: Reply | None, dialect: Dialect
    ) -> bool:
        """Writes an answer's next token, if there is one; whether the answer has ended."""
        answer = writing.answer
        first = answer.tokens == 0
        word = self._next_word(writing, work)
        ended = word is None or bool(answer.stopping_word)
        if not ended and answer.tokens >= writing.limit:
            answer.finish, ended = "length", True
        if reply is not None:
            events = dialect.start(answer) if first else []
            if word is not None:
                events.append(dialect.delta(answer, word))
            if events:
                await reply.events(events)
            if ended:
                await reply.events(dialect.finish(answer))
        return ended

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

    async def _read(
        self, tokens: int, step: int, reply: Reply | None
    ) -> AsyncGenerator[tuple[int, float], None]:
        """Reads prompt tokens; tells now and then how many have been read, and since when."""
        self.reading += 1
        try:
            begin = said = self.clock()
            if self.compute is None:
                for done in range(0, tokens + step, step):
                    processed = min(done, tokens)
                    await self._wait(begin + processed / self.prefill_tps, reply)
                    yield processed, begin
                return
            async with aclosing(self.compute.read(tokens)) as reading:
                async for figures in reading:
                    if reply is not None and self.clock() - said > self.ping_interval:
                        said = self.clock()
                        await reply.comment()
                    yield figures
        finally:
            self.reading -= 1

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


def _keep(writing: Writing) -> None:
    """What the slot holds of a request when it ends, wherever that is."""
    answer, slot = writing.answer, writing.slot
    if not writing.read:
        slot.contents = writing.tokens[: (answer.cached + slot.processed) * WIDTH]
    elif writing.tokens:
        # The last token was never put back in.
        slot.contents = writing.tokens + pack(tokenize(answer.text))[:-WIDTH]
