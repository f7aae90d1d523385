"""Steady load for a fleet, through its edge, during a change."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from tests.chaos.response_reader import read_stream
from tests.deploy.control import wait_for

CHAT = "/v1/chat/completions"
LIMIT = 120.0  # seconds for one answer
TOKENS = 120
PAUSE = 1.0  # seconds between the requests of a client


@dataclass(slots=True)
class DeployLoad:
    """Clients that don't retry, so `failures` has every request that failed.

    Every second one requests streams.
    """

    url: str
    headers: dict[str, str]
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_for(self, more: int) -> None:
        """Wait until `more` further requests have been answered."""
        wanted = self.answered + more
        wait_for(lambda: self.answered >= wanted)

    def run_client(self, number: int) -> None:
        with httpx.Client(verify=False, timeout=LIMIT, headers=self.headers) as client:
            for count in itertools.count(1):
                text = f"client {number} request {count}"
                failure = self._send(client, text, stream=number % 2 == 0)
                with self._lock:
                    self.failures += [failure] if failure else []
                    self.answered += not failure
                if self.over.wait(PAUSE):
                    return

    def _send(self, client: httpx.Client, text: str, *, stream: bool) -> str:
        """Send a request. Returns its failure, or an empty text."""
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": TOKENS, "stream": stream}
        try:
            answer = client.post(f"{self.url}{CHAT}", json=body)
        except httpx.HTTPError as error:
            return f"{time.strftime('%X')} {type(error).__name__}: {error}"
        if answer.status_code != 200:
            return f"{time.strftime('%X')} {answer.status_code}: {answer.text[:300]}"
        if stream:
            read = read_stream(CHAT, answer.content)
            whole = read.ends and read.error is None
            return "" if whole else f"cut: {answer.text[-300:]}"
        reason = answer.json()["choices"][0]["finish_reason"]
        return "" if reason in {"stop", "length"} else f"ended by {reason}"


@contextlib.contextmanager
def nothing_fails(url: str, headers: dict[str, str], answers: int) -> Iterator[DeployLoad]:
    """Load a fleet; so many requests are answered before and after, and none fails."""
    load = DeployLoad(url, headers)
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(load.run_client, number) for number in range(3)]
        try:
            load.wait_for(answers)
            yield load
            load.wait_for(answers)
        finally:
            load.over.set()
        for client in clients:
            client.result()
    assert load.failures == []
