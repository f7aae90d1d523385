"""The rules of the cluster, each broken once. Every mutant must be found by the property.

Some rules need more luck than thousands of random scripts have, and are held by tests of their own
in `test_leadership.py` and `test_fencing.py`: looks and claims after long gaps, a new leader's wait
before it reads, what has not landed, the limit of being alone, what ran alone and its process died,
an edge that was told that it may not be alone and has not confirmed it, the list that a new leader
does not tell, and slots that a node comes to have before it is read.
"""

from __future__ import annotations

from tests.cluster.rules import Mutant

_ROW, _LEADER, _FENCE, _SENDER = "leader_row", "leadership", "fencing", "sending"

LEADERSHIP = (
    Mutant(
        "a claim does not care for the counter",
        _ROW,
        " AND counter = :old_counter",
        "",
        found_by=367,
    ),
    Mutant(
        "an update has no condition",
        _ROW,
        " AND holder = :old_holder AND epoch = :old_epoch",
        "",
        found_by=43,
    ),
    Mutant(
        "a claim after half a term",
        _LEADER,
        "now - self._since - max(self.term, held)",
        "now - self._since - max(self.term, held) / 2",
        found_by=19,
    ),
    Mutant(
        "a term counted from before the look",
        _LEADER,
        "            self._since = now\n        self.row = row\n",
        "            self._since = asked_at\n        self.row = row\n",
        found_by=647,
    ),
    Mutant(
        "a renewal is no change of the row",
        _LEADER,
        "if row != self.row or",
        "if self.row is None or row[:2] != self.row[:2] or",
        found_by=19,
    ),
    Mutant(
        "a leader counts from the answer",
        _LEADER,
        "self.lead_until = asked_at + self.term",
        "self.lead_until = now + self.term",
        found_by=71,
    ),
    Mutant(
        "a leader goes on after its term",
        _LEADER,
        "return now < self.lead_until",
        "return self.lead_until > -math.inf",
        found_by=39,
    ),
    Mutant(
        "a claim keeps the epoch",
        _LEADER,
        "LeaderRow(self.name, self.highest + 1, 0), is_claim",
        "LeaderRow(self.name, max(1, self.highest), 0), is_claim",
        found_by=39,
    ),
    Mutant(
        "a new leader grants before its claim is confirmed",
        _LEADER,
        "return self.leads(now) and self._confirmed",
        "return self.leads(now)",
        found_by=4723,
    ),
    Mutant(
        "a leader renews after its term",
        _LEADER,
        "        if self.leads(now):\n            # Edges",
        "        if self.lead_until > -math.inf:\n            # Edges",
        found_by=10323,
    ),
    Mutant(
        "time of day", _LEADER, "TERM_SECONDS = 2.0", "TERM_SECONDS = 2", clock="wall", found_by=43
    ),
    Mutant(
        "a clock that stops in suspend",
        _LEADER,
        "TERM_SECONDS = 2.0",
        "TERM_SECONDS = 2",
        clock="monotonic",
        found_by=19,
    ),
)

FENCING = (
    Mutant(
        "what an edge ran that is lost is read at once",
        _FENCE,
        "lose(edge, process, 1, now + SETTLE_SECONDS)",
        "lose(edge, process, 1, now)",
        found_by=3445,
    ),
    Mutant(
        "what comes too late is not given back",
        _SENDER,
        'return "give back"\n',
        'return "ignore"\n',
        found_by=34150,
    ),
    Mutant(
        "a grant of any age starts",
        _SENDER,
        "if not self.fence.obeys(epoch, session) or now - asked_at > GRANT_SECONDS:",
        "if not self.fence.obeys(epoch, session):",
        found_by=852,
    ),
    Mutant(
        "a lower epoch is obeyed",
        _FENCE,
        "return (epoch, session) == (self.epoch, self.session)",
        "return session == self.session",
        found_by=114,
    ),
    Mutant(
        "what was granted before a hello starts after it",
        _SENDER,
        "if not self.fence.obeys(epoch, session) or now",
        "if epoch < 0 or now",
        found_by=9,
    ),
    Mutant(
        "a grant that came twice starts twice",
        _SENDER,
        "asked_at = self._asked.pop(number, -math.inf)",
        "asked_at = self._asked.get(number, -math.inf)",
        found_by=116,
    ),
    Mutant(
        "a grant that came twice gives a running request's slot back",
        _SENDER,
        "if number in self.leases:\n                return",
        "if False:\n                return",
        found_by=116,
    ),
    Mutant(
        "a new leader does not read",
        _FENCE,
        "_Node(count, _Rest(count, now + SETTLE_SECONDS))",
        "_Node(count, _Rest(0, now + SETTLE_SECONDS))",
        found_by=590,
    ),
    Mutant(
        "a hello accounts for nothing",
        _FENCE,
        "known.leases, known.hello, known.present = leases, None, True",
        "leases = known.leases = {}; known.hello, known.present = None, True",
        found_by=8,
    ),
    Mutant(
        "what an edge ran that is lost is forgotten",
        _FENCE,
        "lose(edge, process, 1, now + SETTLE_SECONDS)",
        "lose(edge, process, 0, now + SETTLE_SECONDS)",
        found_by=9,
    ),
)

ALONE = (
    Mutant(
        "a leader lends a share on an unconfirmed word",
        _FENCE,
        "        known.number += 1\n",
        "        known.number += 1\n        known.lent_until = lead_until\n",
        found_by=493,
    ),
    Mutant(
        "alone at the end of the term",
        _FENCE,
        "ends_at + SETTLE_SECONDS if",
        "ends_at if",
        found_by=574,
    ),
    Mutant(
        "alone without reading the node",
        _FENCE,
        "busy, slots = self._busy.get(node), self.slots_of",
        "busy, slots = self._busy.get(node, frozenset()), self.slots_of",
        found_by=121,
    ),
    Mutant(
        "a reading from before it was alone counts",
        _FENCE,
        "if asked_at >= max(self._alone_from, self._reads_from):",
        "if asked_at >= self._alone_from - 3:",
        found_by=845,
    ),
    Mutant(
        "alone with all slots",
        _FENCE,
        "share = self.sharers.share(slots, node, self.edge)",
        "share = slots",
        found_by=17,
    ),
    Mutant(
        "what still runs does not count against the share",
        _FENCE,
        "slots - share + max(0, len(busy) - before)",
        "slots - share",
        found_by=8,
    ),
    Mutant("a leader keeps no shares", _FENCE, "+ lost + kept", "+ lost", found_by=32),
    Mutant(
        "a leader takes the share of the silent too early",
        _FENCE,
        "self._alone_seconds = alone_seconds * _CLOCKS_DIFFER",
        "self._alone_seconds = alone_seconds / 2",
        found_by=4320,
    ),
    Mutant(
        "shares are rounded up", _FENCE, "each + (edge in first)", "each + (rest > 0)", found_by=20
    ),
)

LISTS = (
    Mutant(
        "an edge that joins may be alone at once",
        _FENCE,
        "return edge not in self._joined",
        "return True",
        found_by=6158,
    ),
    Mutant(
        "an edge goes alone that may not",
        _FENCE,
        "SETTLE_SECONDS if term.may_be_alone else math.inf",
        "SETTLE_SECONDS",
        found_by=2070,
    ),
    Mutant(
        "an edge leaves that may be alone",
        _FENCE,
        "kept = {name for name in last.names if not self._edges[name].gone}",
        "kept = set[str]()",
        found_by=2398,
    ),
    Mutant(
        "an edge believes the list that was told last",
        _FENCE,
        "if one.version >= known.believes]",
        "if one is self.lists[-1]]",
        found_by=1384,
    ),
)

MUTANTS = (*LEADERSHIP, *FENCING, *ALONE, *LISTS)
