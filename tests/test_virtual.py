from __future__ import annotations

import asyncio
import threading

from tests.virtual import BEGIN, VirtualLoop


def test_time_stands_still_while_a_thread_of_the_executor_ends() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)

    async def leave_a_thread() -> None:
        # Nobody waits for it any more, as for a thread that a busy machine has yet to end.
        left = asyncio.get_running_loop().run_in_executor(None, work)
        begun.wait(10)
        left.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        runner.run(leave_a_thread())
        timer = threading.Timer(0.1, may_end.set)
        timer.start()
    timer.join()
    assert may_end.is_set()
    assert loop.time() == BEGIN
