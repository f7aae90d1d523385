"""Counters, ledger and `x-ratelimit-*` headers are one sum, in all processes on one store."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.callers.reports import roll_up
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.http.heads import rate_limit_lines
from gateway.store.database import locate_store
from gateway.store.store import Store
from gateway.terms import Caller
from tests.callers.build import (
    NOW,
    Clocks,
    LimitedProcess,
    a_caller,
    a_lease_request,
    all_accounts,
    counted,
    read_rows,
    used,
)
from tests.callers.ledger_rows import DAY, a_row, add_rows
from tests.store.stores import opened

PART = 0.125
"""Seconds: no two additions at different times fall into one part of a window."""

GROUPS = {
    "team": {
        "limits": {"rpm": 12, "tpm": 3000, "tokens_per_day": 20_000, "budget": "10/day"},
        "user_limits": {"rpm": 4, "tpm": 900, "tokens_per_day": 4000, "budget": "4/month"},
    }
}

ALICE = a_caller("alice", group="team", limits={"rpm": 6, "tpm": 2000, "budget": "5/month"})

BOB = a_caller("bob", group="team", limits={"concurrency": 2, "tokens_per_day": 6000})

CHAT = a_caller("chat", group="team", trust_user_headers=True)

WHO = [(ALICE, None), (BOB, None), (CHAT, "ann"), (CHAT, "ben"), (CHAT, None)]


def total(rpm: int) -> Settings:
    limits = {"total": {"rpm": rpm, "concurrency": 9, "budget": "12/month"}}
    return Settings.model_validate({"groups": GROUPS, "limits": limits})


async def test_a_restart_counts_what_retention_has_summed_up(tmp_path: Path) -> None:
    clocks = Clocks(NOW)
    with opened(f"sqlite:///{tmp_path}/gateway.db") as store:
        ages = (0.001, 0.1, 5, 10, 40)  # days; the last one is of the month before
        rows = [
            a_row(number, ended_at=NOW - days * DAY, key="alice", group_name=group, cost=0.25)
            for number, (days, group) in enumerate((days, g) for days in ages for g in ("team", ""))
        ]
        await store.run(lambda connection: add_rows(connection, rows))
        found = []
        for name in ("before", "after"):
            process = LimitedProcess(name, store, clocks, total(15))
            await process.start([ALICE])
            key, team = process.account("key:alice"), process.account("group:team")
            found += [
                [(sum(one.cost_by_month.values()), sum(one.cost_by_day.values()),
                  sum(one.tokens_by_day.values())) for one in (key, team)]
            ]  # fmt: skip
            assert await store.run(partial(roll_up, before=NOW - DAY / 20)) == (
                8 if name == "before" else 0
            )
        before, after = found
        assert before == [(2.0, 1.0, 440), (1.0, 0.5, 220)]
        assert after == before


class SharedLimits(RuleBasedStateMachine):
    """Several processes that share a store admit, settle, restart, and are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="llama-gateway-limits-")
        self.runner = asyncio.Runner()
        self.clocks = Clocks()
        folder = Path(self.folder.name)
        self.store = Store(locate_store(f"sqlite:///{folder}/gateway.db", folder))
        self.settings = total(15)
        self.processes: list[LimitedProcess] = []
        self.started = 0

    @initialize()
    def open(self) -> None:
        self.store.start()
        assert self.runner.run(self.store.wait_opened(30.0))
        self.start_process()
        self.start_process()

    @precondition(lambda self: len(self.processes) < 3)
    @rule()
    def start_process(self) -> None:
        self.started += 1
        process = LimitedProcess(f"p{self.started}", self.store, self.clocks, self.settings)
        self.processes.append(process)
        self.runner.run(process.start([ALICE, BOB, CHAT]))

    @precondition(lambda self: len(self.processes) > 1)
    @rule(which=st.integers(0, 2))
    def kill_process(self, which: int) -> None:
        """With kill -9: what it had not written is lost, and its open requests are recovered."""
        self.processes.pop(which % len(self.processes))

    @rule(which=st.integers(0, 2), who=st.sampled_from(WHO), prompt=st.integers(0, 300),
          most=st.integers(0, 400) | st.none())  # fmt: skip
    def admit(
        self, which: int, who: tuple[Caller, str | None], prompt: int, most: int | None
    ) -> None:
        process = self.processes[which % len(self.processes)]
        refusal: GatewayError | None = None
        try:
            process.admit(who[0], a_lease_request(prompt, most), who[1])
        except GatewayError as error:
            refusal = error
        if refusal is not None and refusal.status == 429:
            assert refusal.code in {"rate_limit_exceeded", "insufficient_quota"}
            assert refusal.retry_after is not None
            assert 1 <= refusal.retry_after <= 31 * 86400
            assert refusal.retryable == (refusal.code == "rate_limit_exceeded")
        elif refusal is not None:
            assert refusal.code == "invalid_request"

    @rule(which=st.integers(0, 2), index=st.integers(0, 20), tokens=st.integers(0, 900),
          cents=st.integers(0, 200))  # fmt: skip
    def end(self, which: int, index: int, tokens: int, cents: int) -> None:
        process = self.processes[which % len(self.processes)]
        if process.open:
            process.end(index % len(process.open), tokens, cents / 128)

    @rule(parts=st.integers(1, 64), times=st.integers(1, 3))
    def pass_time(self, parts: int, times: int) -> None:
        for _ in range(times):
            self.clocks.advance(parts * PART)
            for process in self.processes:
                self.runner.run(process.step())

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.runner.run(self.processes[which % len(self.processes)].step())

    @rule(rpm=st.integers(5, 30))
    def reload(self, rpm: int) -> None:
        self.settings = total(rpm)
        for process in self.processes:
            process.book.configure(self.settings)

    @invariant()
    def nothing_is_negative(self) -> None:
        for process in self.processes:
            for account in all_accounts(process.book):
                now = self.clocks.clock()
                figures = [
                    account.running,
                    account.open,
                    account.reserved_tokens,
                    account.reserved_cost,
                    account.requests.value(now),
                    account.tokens.value(now),
                    account.others.running,
                    *account.tokens_by_day.values(),
                    *account.cost_by_month.values(),
                ]
                assert min(figures) >= 0, (account.subject, figures)
            for caller, user in WHO:
                limits = process.book.rate_limits(process.book.accounts(caller, user))
                assert all(one is None or 0 <= one.remaining <= one.limit for one in limits)

    def teardown(self) -> None:
        try:
            if self.processes:
                self.check_sums()
        finally:
            self.store.close(30.0)
            self.runner.close()
            self.folder.cleanup()

    def check_sums(self) -> None:
        for process in self.processes:
            while process.open:
                process.end(0, 17, 0.25)
        # Others that were killed are recovered after a while.
        for _ in range(20):
            self.clocks.advance(2.0)
            for process in self.processes:
                self.runner.run(process.step())
        for process in self.processes:
            self.runner.run(process.step())
        rows = self.runner.run(self.store.run(read_rows))
        wall = self.clocks.wall()
        for process in self.processes:
            for account in all_accounts(process.book):
                assert used(account, self.clocks) == counted(rows, account.subject, wall), (
                    process.name,
                    account.subject,
                )
                assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)
                assert account.reserved_cost == 0
                assert account.others.running == 0
            for caller, user in WHO:
                self.check_headers(process, caller, user, rows)

    def check_headers(
        self, process: LimitedProcess, caller: Caller, user: str | None, rows: list[dict[str, Any]]
    ) -> None:
        accounts = process.book.accounts(caller, user)
        lines = rate_limit_lines(*process.book.rate_limits(accounts), anthropic=False).decode()
        told = dict(line.split(": ") for line in lines.splitlines())
        sums = [(one, counted(rows, one.subject, self.clocks.wall())) for one in accounts.tracked]
        left = [one.spec.rpm - sum_.requests for one, sum_ in sums if one.spec.rpm is not None]
        assert told["x-ratelimit-remaining-requests"] == f"{max(0, min(left))}"
        left = [one.spec.tpm - sum_.tokens for one, sum_ in sums if one.spec.tpm is not None]
        left += [
            one.spec.tokens_per_day - sum_.day_tokens
            for one, sum_ in sums
            if one.spec.tokens_per_day is not None
        ]
        assert told["x-ratelimit-remaining-tokens"] == f"{max(0, min(left))}"


TestSharedLimits = SharedLimits.TestCase
TestSharedLimits.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
