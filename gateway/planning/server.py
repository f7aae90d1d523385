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

from collections import deque

from gateway.planning.job import Job
from gateway.planning.machine import Machine
from gateway.planning.prompt_cache import PromptCache


class Server:
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
        "ends",
        "machine",
        "queue",
        "slots",
        "version",
    )

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cache = PromptCache(machine.slots, machine.cache_tokens)
        self.slots: list[Job | None] = [None] * machine.slots
        self.queue: deque[Job] = deque()
        """What came while every slot was busy: first in, first out."""
        self.ends = -1.0
        """When the steps under way end; -1: it idles."""
        self.version = 0
        """Counts the changes of `ends`, so that an event for an older one is known as void."""
        self.busy_seconds = 0.0
        """Seconds in which it computed."""
        self._base = machine.token_base
        self._step = machine.token_step
        self._per_prompt_token = 1.0 / machine.prefill
        self._batch = machine.batch
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
        if self.ends < 0:
            self._compose(now)
            return True
        if self._alike > 1:
            # It joins after the step under way.
            done = int((now - self._began) / self._seconds) + 1
            if done < self._alike:
                self._alike = done
                self.ends = self._began + done * self._seconds
                self.version += 1
                return True
        return False

    def step_ended(self, now: float) -> tuple[list[Job], list[Job]]:
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
        slot, cached = self.cache.choose(job.prompt, free)
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
        self.cache.keep(job.slot, job.whole, now)

    def _compose(self, now: float) -> None:
        """Begin the next steps, as many as are alike."""
        writers = self._writers
        readers = self._readers
        count = len(writers)
        self.version += 1
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
            self.ends = -1.0
            return
        for job in writers:
            steps = min(steps, job.to_write)
        self._began = now
        self._seconds = seconds
        self._alike = steps
        self.ends = now + steps * seconds
