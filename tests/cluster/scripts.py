"""Plays random scripts of a cluster: `python -m tests.cluster.scripts [--scripts N] [--first N]`.

`--mutants` breaks each rule in turn, and plays until the property fails. Exit status: 0 the
property held, or all mutants were found; 1 it did not.

Some rules need more luck than thousands of random scripts have, and are held by tests of their own
in `test_leadership.py` and `test_fencing.py`: looks and claims after long gaps, a new leader's wait
before it reads, what has not landed, the limit of being alone, what ran alone and its process died,
an edge that was told that it may not be alone and has not confirmed it, the list that a new leader
does not tell, and slots that a node comes to have before it is read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.cluster.model import Broken, Rules, Script

ROW, LEADER, FENCE, SENDER = "leader_row", "leadership", "fencing", "sending"
MODULES = {
    LEADER: "gateway.cluster.leadership",
    ROW: "gateway.cluster.tables",
    FENCE: "gateway.cluster.fencing",
    SENDER: "tests.cluster.sending",
}
"""In the order of their imports."""


class Mutant(NamedTuple):
    """A rule that is broken by changing a text of a module."""

    module: str
    found_by: int  # a script that finds it, or one shortly before that
    name: str
    rule: str  # the text, which is there once
    broken: str
    clock: str = "boot"  # the clock that members and edges use


MUTANTS = [Mutant(*one) for one in (
    (ROW, 367, "a claim does not care for the counter", " AND counter = :old_counter", ""),
    (ROW, 43, "an update has no condition", " AND holder = :old_holder AND epoch = :old_epoch", ""),
    (LEADER, 19, "a claim after half a term",
     "now - self._since - max(self.term, held)", "now - self._since - max(self.term, held) / 2"),
    (LEADER, 647, "a term counted from before the look",
     "            self._since = now\n        self.row = row\n",
     "            self._since = asked_at\n        self.row = row\n"),
    (LEADER, 19, "a renewal is no change of the row",
     "if row != self.row or", "if self.row is None or row[:2] != self.row[:2] or"),
    (LEADER, 71, "a leader counts from the answer",
     "self.lead_until = asked_at + self.term", "self.lead_until = now + self.term"),
    (LEADER, 39, "a leader goes on after its term",
     "return now < self.lead_until", "return self.lead_until > -math.inf"),
    (LEADER, 39, "a claim keeps the epoch",
     "LeaderRow(self.name, self.highest + 1, 0), is_claim",
     "LeaderRow(self.name, max(1, self.highest), 0), is_claim"),
    (LEADER, 4723, "a new leader grants before its claim is confirmed",
     "return self.leads(now) and self._confirmed", "return self.leads(now)"),
    (LEADER, 10323, "a leader renews after its term",
     "        if self.leads(now):\n            # Edges",
     "        if self.lead_until > -math.inf:\n            # Edges"),
    (LEADER, 43, "time of day", "TERM_SECONDS = 2.0", "TERM_SECONDS = 2", "wall"),
    (LEADER, 19, "a clock that stops in suspend",
     "TERM_SECONDS = 2.0", "TERM_SECONDS = 2", "monotonic"),
    (FENCE, 3445, "what an edge ran that is lost is read at once",
     "lose(edge, process, 1, now + SETTLE_SECONDS)", "lose(edge, process, 1, now)"),
    (SENDER, 34150, "what comes too late is not given back",
     'return "give back"\n', 'return "ignore"\n'),
    (SENDER, 852, "a grant of any age starts",
     "if not self.fence.obeys(epoch, session) or now - asked_at > GRANT_SECONDS:",
     "if not self.fence.obeys(epoch, session):"),
    (FENCE, 114, "a lower epoch is obeyed",
     "return (epoch, session) == (self.epoch, self.session)", "return session == self.session"),
    (SENDER, 9, "what was granted before a hello starts after it",
     "if not self.fence.obeys(epoch, session) or now", "if epoch < 0 or now"),
    (SENDER, 116, "a grant that came twice starts twice",
     "asked_at = self._asked.pop(number, -math.inf)",
     "asked_at = self._asked.get(number, -math.inf)"),
    (SENDER, 116, "a grant that came twice gives a running request's slot back",
     "if number in self.leases:\n                return", "if False:\n                return"),
    (FENCE, 590, "a new leader does not read",
     "_Node(count, _Rest(count, now + SETTLE_SECONDS))",
     "_Node(count, _Rest(0, now + SETTLE_SECONDS))"),
    (FENCE, 8, "a hello accounts for nothing",
     "known.leases, known.hello, known.present = leases, None, True",
     "leases = known.leases = {}; known.hello, known.present = None, True"),
    (FENCE, 9, "what an edge ran that is lost is forgotten",
     "lose(edge, process, 1, now + SETTLE_SECONDS)",
     "lose(edge, process, 0, now + SETTLE_SECONDS)"),
    (FENCE, 493, "a leader lends a share on an unconfirmed word",
     "        known.number += 1\n",
     "        known.number += 1\n        known.lent_until = lead_until\n"),
    (FENCE, 574, "alone at the end of the term", "ends_at + SETTLE_SECONDS if", "ends_at if"),
    (FENCE, 121, "alone without reading the node",
     "busy, slots = self._busy.get(node), self.slots_of",
     "busy, slots = self._busy.get(node, frozenset()), self.slots_of"),
    (FENCE, 845, "a reading from before it was alone counts",
     "if asked_at >= max(self._alone_from, self._reads_from):",
     "if asked_at >= self._alone_from - 3:"),
    (FENCE, 17, "alone with all slots",
     "share = self.sharers.share(slots, node, self.edge)", "share = slots"),
    (FENCE, 8, "what still runs does not count against the share",
     "slots - share + max(0, len(busy) - before)", "slots - share"),
    (FENCE, 32, "a leader keeps no shares", "+ lost + kept", "+ lost"),
    (FENCE, 4320, "a leader takes the share of the silent too early",
     "self._alone_seconds = alone_seconds * _CLOCKS_DIFFER",
     "self._alone_seconds = alone_seconds / 2"),
    (FENCE, 20, "shares are rounded up", "each + (edge in first)", "each + (rest > 0)"),
    (FENCE, 6158, "an edge that joins may be alone at once",
     "return edge not in self._joined", "return True"),
    (FENCE, 2070, "an edge goes alone that may not",
     "SETTLE_SECONDS if term.may_be_alone else math.inf", "SETTLE_SECONDS"),
    (FENCE, 2398, "an edge leaves that may be alone",
     "kept = {name for name in last.names if not self._edges[name].gone}", "kept = set[str]()"),
    (FENCE, 1384, "an edge believes the list that was told last",
     "if one.version >= known.believes]", "if one is self.lists[-1]]"),
)]  # fmt: skip


def load(mutant: Mutant | None = None) -> Rules:
    """Run the modules' sources anew, with the mutant's change. Raises: ValueError."""
    made = {}
    kept = {name: importlib.import_module(name) for name in MODULES.values()}
    try:
        for name, full in MODULES.items():
            path = Path(str(sys.modules[full].__file__))
            text = path.read_text()
            if mutant is not None and mutant.module == name:
                if text.count(mutant.rule) != 1:
                    raise ValueError(f"{mutant.name}: not once in {name}:\n{mutant.rule}")
                text = text.replace(mutant.rule, mutant.broken)
            sys.modules[full] = made[name] = ModuleType(full)
            exec(compile(text, str(path), "exec"), made[name].__dict__)
    finally:
        sys.modules.update(kept)
    return Rules(**made, clock=mutant.clock if mutant else "boot")


def play(rules: Rules, seeds: Iterable[int]) -> str | None:
    """Play these scripts; what broke the property in the first of them that did, or None."""
    for seed in seeds:
        try:
            Script(rules, seed).play(heal=seed % 10 == 0)
        except Broken as error:
            return f"script {seed}: {error}"
    return None


def find(mutant: Mutant, most: int) -> str | None:
    """Play scripts from the one on that is known to find the mutant; None: none of them did."""
    return play(load(mutant), range(mutant.found_by, mutant.found_by + most))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.scripts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scripts", type=int, default=100_000, help="how many; default: 100,000")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--mutants", action="store_true", help="find each mutant")
    options = parser.parse_args(arguments)
    began = time.process_time()
    if options.mutants:
        missed = 0
        for mutant in MUTANTS:
            found = find(mutant, options.scripts)
            missed += found is None
            print(f"{mutant.name}: {found or 'NOT FOUND'}", flush=True)
        print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants found")
        return int(missed > 0)
    broken = play(load(), range(options.first, options.first + options.scripts))
    print(f"{broken or 'the property held'}, {time.process_time() - began:.0f} s of CPU")
    return int(broken is not None)


if __name__ == "__main__":
    sys.exit(main())
