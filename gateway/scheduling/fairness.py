"""Fairness between the callers of one class: virtual token counters.

Each caller has a counter of the work it was served; the lowest counter goes first. A caller that
was idle starts at the lowest counter of those that wait, so no caller saves up credit (Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024). Among callers within a small slack of
the lowest counter, the one whose request fits the free node goes (Cao et al., "Locality-aware Fair
Scheduling in LLM Serving", 2025); the slack bounds what that costs the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gateway.scheduling.node_slots import FairnessAccount

LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT = 1.0, 32.0
"""Bounds of an output token's price, in prompt tokens."""

COUNTER_SLACK = 2.0
"""By how many mean charges of a request a caller may be above the lowest counter and still go."""

MOST_ACCOUNTS = 4096
"""Accounts; when there are more, those of idle callers are dropped."""

CounterKey = tuple[float, int, FairnessAccount]
"""Sorts accounts: counter, serial number, the account."""


@dataclass(slots=True, eq=False)
class VirtualTokenCounters:
    """The accounts of one class."""

    accounts: dict[str, FairnessAccount] = field(default_factory=dict)
    by_counter: list[CounterKey] = field(default_factory=list)
    """Accounts with waiting requests, the least served first."""
    start_counter: float = 0.0
    """Where a caller starts while nobody waits: at the counter of the one served last."""
    mean_charge: float = 1.0
    """The mean charge of a request."""
    _serial: int = 0

    def account(self, fairness_key: str) -> FairnessAccount:
        """The account of a caller, which has just sent a request."""
        account = self.accounts.get(fairness_key)
        if account is None:
            if len(self.accounts) >= MOST_ACCOUNTS:
                self._drop_idle()
            self._serial += 1
            account = self.accounts[fairness_key] = FairnessAccount(fairness_key, self._serial)
        if not account.fifos:
            least = self.by_counter[0][0] if self.by_counter else self.start_counter
            if account.counter < least:
                account.raise_to(least)
        return account

    def add_waiting(self, account: FairnessAccount) -> None:
        """The account has waiting requests now."""
        insort(self.by_counter, (account.counter, account.serial, account))

    def remove_waiting(self, account: FairnessAccount) -> None:
        """The account has no waiting requests any more."""
        del self.by_counter[bisect_left(self.by_counter, (account.counter, account.serial))]

    def started(self, account: FairnessAccount, charge: float) -> None:
        """Charge the account for a request that has started."""
        self.start_counter = self.by_counter[0][0] if self.by_counter else account.counter
        self.mean_charge += (charge - self.mean_charge) / 32
        if account.fifos:
            self.remove_waiting(account)
            account.started(charge)
            self.add_waiting(account)
        else:
            account.started(charge)

    def settled(self, account: FairnessAccount, correction: float) -> None:
        """A request has ended; its real price differs from its charge by `correction`."""
        if account.fifos:
            self.remove_waiting(account)
            account.settled(correction)
            self.add_waiting(account)
        else:
            account.settled(correction)

    def _drop_idle(self) -> None:
        """Drop the lower half of the idle accounts: they would start anew at the same counter."""
        idle = [one for one in self.accounts.values() if not one.fifos and not one.running]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: max(len(idle) // 2, 1)]:
            del self.accounts[account.fairness_key]
