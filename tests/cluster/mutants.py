"""The rules of the cluster, each broken once. Every mutant must be found by the property."""

from __future__ import annotations

from tests.cluster.rules import Mutant

_ROW, _LEADER, _FENCE = "leader_row", "leadership", "fencing"

LEADERSHIP = (
    Mutant("a claim does not care for the counter", _ROW, " AND counter = :old_counter", ""),
    Mutant(
        "an update has no condition", _ROW, " AND holder = :old_holder AND epoch = :old_epoch", ""
    ),
    Mutant(
        "a claim after half a term",
        _LEADER,
        "now - self._since < self.term or",
        "now - self._since < self.term / 2 or",
    ),
    Mutant(
        "a term counted from before the look",
        _LEADER,
        "            self._since = now\n        self.row = row\n",
        "            self._since = asked_at\n        self.row = row\n",
    ),
    Mutant(
        "a renewal is no change of the row",
        _LEADER,
        "if row != self.row or",
        "if self.row is None or row[:2] != self.row[:2] or",
    ),
    Mutant(
        "a leader counts from the answer",
        _LEADER,
        "self.lead_until = asked_at + self.term",
        "self.lead_until = now + self.term",
    ),
    Mutant(
        "a leader goes on after its term",
        _LEADER,
        "return now < self.lead_until",
        "return self.lead_until > -math.inf",
    ),
    Mutant(
        "a claim keeps the epoch",
        _LEADER,
        "LeaderRow(self.name, self.highest + 1, 0), is_claim",
        "LeaderRow(self.name, max(1, self.highest), 0), is_claim",
    ),
    Mutant(
        "looks at long intervals count",
        _LEADER,
        "if row != self.row or now - self._looked_at > self.gap:",
        "if row != self.row:",
    ),
    Mutant(
        "a claim long after the look counts",
        _LEADER,
        "if step.is_claim and now - self._looked_at > self.gap:",
        "if False:",
    ),
    Mutant(
        "a new leader grants before its claim is confirmed",
        _LEADER,
        "return self.leads(now) and self._confirmed",
        "return self.leads(now)",
    ),
    Mutant(
        "a leader renews after its term",
        _LEADER,
        "        if self.leads(now):\n            # Edges",
        "        if self.lead_until > -math.inf:\n            # Edges",
    ),
    Mutant("time of day", _LEADER, "TERM_SECONDS = 2.0", "TERM_SECONDS = 2", clock="wall"),
    Mutant(
        "a clock that stops in suspend",
        _LEADER,
        "TERM_SECONDS = 2.0",
        "TERM_SECONDS = 2",
        clock="monotonic",
    ),
)

FENCING = (
    Mutant(
        "a grant of any age starts",
        _FENCE,
        "if node is None or now - asked_at > GRANT_SECONDS:",
        "if node is None:",
    ),
    Mutant(
        "a lower epoch is obeyed",
        _FENCE,
        "return (epoch, session) == (self.epoch, self.session)",
        "return session == self.session",
    ),
    Mutant(
        "what was granted before a hello starts after it",
        _FENCE,
        "        self._greets = False\n        self._granted.clear()\n",
        "        self._greets = False\n",
    ),
    Mutant(
        "a grant that came twice starts twice",
        _FENCE,
        "asked_at = self._asked.pop(number, -math.inf)",
        "asked_at = self._asked.get(number, -math.inf)",
    ),
    Mutant(
        "a grant that came twice gives a running request's slot back",
        _FENCE,
        "if number in self.leases:\n                return",
        "if False:\n                return",
    ),
    Mutant(
        "what comes too late is not given back",
        _FENCE,
        'return "give back"\n',
        'return "ignore"\n',
    ),
    Mutant(
        "a new leader does not wait",
        _FENCE,
        "_Node(count, _Rest(count, won_at + SETTLE_SECONDS))",
        "_Node(count, _Rest(count, won_at))",
    ),
    Mutant(
        "a new leader does not read",
        _FENCE,
        "_Node(count, _Rest(count, won_at + SETTLE_SECONDS))",
        "_Node(count, _Rest(0, won_at + SETTLE_SECONDS))",
    ),
    Mutant(
        "a hello accounts for nothing",
        _FENCE,
        "known.leases, known.hello, known.present = leases, None, True",
        "leases = known.leases = {}; known.hello, known.present = None, True",
    ),
    Mutant(
        "a request that has not landed is taken for one that was read",
        _FENCE,
        "is_early = now + LANDING_SECONDS <= account.strangers.reads_from",
        "is_early = account.strangers.busy is None",
    ),
    Mutant(
        "what an edge ran that is lost is forgotten",
        _FENCE,
        "lose(edge, process, 1, now + SETTLE_SECONDS)",
        "lose(edge, process, 0, now + SETTLE_SECONDS)",
    ),
    Mutant(
        "what an edge ran that is lost is read at once",
        _FENCE,
        "lose(edge, process, 1, now + SETTLE_SECONDS)",
        "lose(edge, process, 1, now)",
    ),
)

ALONE = (
    Mutant(
        "alone at the end of the term",
        _FENCE,
        "self._alone_from = now + left + SETTLE_SECONDS",
        "self._alone_from = now + left",
    ),
    Mutant(
        "alone without reading the node",
        _FENCE,
        "busy = self._busy.get(node)\n",
        "busy = self._busy.get(node, frozenset())\n",
    ),
    Mutant(
        "a reading from before it was alone counts",
        _FENCE,
        "if asked_at >= self._alone_from:",
        "if asked_at >= self._alone_from - 3:",
    ),
    Mutant(
        "alone with all slots",
        _FENCE,
        "share = shares(self._slots[node], node, self._edges)[self.edge]",
        "share = self._slots[node]",
    ),
    Mutant(
        "what still runs does not count against the share",
        _FENCE,
        "own + max(len(here) - own, len(busy)) >= share",
        "len(here) >= share",
    ),
    Mutant("an edge that greets stays alone", _FENCE, "return not self._greets and ", "return "),
    Mutant(
        "alone for ever",
        _FENCE,
        "self._alone_from <= now < self._alone_until",
        "self._alone_from <= now",
    ),
    Mutant("a leader keeps no shares", _FENCE, "- taken - lost - kept", "- taken - lost"),
    Mutant(
        "a leader lends a share on an unconfirmed word",
        _FENCE,
        "        known.number += 1\n",
        "        known.number += 1\n        known.lent_until = lead_until\n",
    ),
    Mutant(
        "a leader takes the share of the silent too early",
        _FENCE,
        "self._alone_seconds = alone_seconds * _CLOCKS_DIFFER",
        "self._alone_seconds = alone_seconds / 3",
    ),
    Mutant(
        "what ran alone is forgotten with its process",
        _FENCE,
        "            if now >= known.lent_until and not known.gone:\n",
        "            if False:\n",
    ),
    Mutant(
        "shares are rounded up",
        _FENCE,
        "each + (edge in first)",
        "each + (rest > 0)",
    ),
)

MUTANTS = (*LEADERSHIP, *FENCING, *ALONE)
