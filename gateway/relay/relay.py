"""From a request to its reply: attempts under leases until one answers.

A function of no web framework: the web edge calls it, and so can jobs and batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gateway.errors import forget_trace
from gateway.relay.journey import AttemptFailed, Journey, Means
from gateway.relay.live import Live
from gateway.relay.prompts import Prompts
from gateway.relay.reply import Reply
from gateway.relay.retry import RetryBudget, retrying
from gateway.transport.taskless import in_task


@dataclass(slots=True, eq=False)
class Relay:
    """Relays requests, within one budget of retries."""

    means: Means
    budget: RetryBudget = field(default_factory=RetryBudget)

    async def __call__(self, live: Live) -> Reply:
        """The reply to a live request. Raises: GatewayError."""
        if live.request.several is not None:
            await in_task()
            return await Prompts(live, self, self.means).reply()
        self.budget.request(self.means.clock())
        journey = Journey(self.means, live)
        try:
            return await journey.attempt()
        except AttemptFailed as failure:
            return await self._again(journey, failure)

    async def _again(self, journey: Journey, first: AttemptFailed) -> Reply:
        """Once the first attempt has failed, tenacity takes over: it costs too much before."""

        def may_retry(error: BaseException) -> bool:
            # What repeats it holds it, and is held by the frames that it came through.
            forget_trace(error)
            return isinstance(error, AttemptFailed) and error.again

        await in_task()
        forget_trace(first)
        try:
            async for trial in retrying(self.means.settings.retries, may_retry, self._affordable):
                with trial:
                    if trial.retry_state.attempt_number == 1:
                        return await journey.across(first)
                    return await journey.again()
        except AttemptFailed as failure:
            if failure.answer is not None:
                return failure.answer
            raise failure.error from failure
        raise AssertionError("tenacity ends by a result or an exception")

    def retries_left(self) -> int:
        """Retries that could be made now."""
        share, least = self._allowed()
        return self.budget.left(self.means.clock(), share=share, least=least)

    def _affordable(self, failure: BaseException | None) -> bool:
        if isinstance(failure, AttemptFailed) and not failure.reached:
            return True
        share, least = self._allowed()
        return self.budget.spend(self.means.clock(), share=share, least=least)

    def _allowed(self) -> tuple[float, int]:
        """Retries within a minute: this share of its requests, or so many.

        All that runs on one host may have to go elsewhere at once.
        """
        retries = self.means.settings.retries
        hosts: Counter[str] = Counter()
        for node in self.means.fleet.nodes.values():
            hosts[node.spec.host] += node.slots_total
        return retries.budget, max(retries.budget_min, *hosts.values(), 0)
