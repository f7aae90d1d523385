"""Where the conversations went that their clients name by a header.

What a conversation's next prompt shares with the last one is mostly found in the memory of prompts.
Where it is not (a client has shortened its history, say), its node may still know more of it than
another, and who looks for it later finds it in one place.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Board, Row

MOST_CONVERSATIONS = 65_536
"""The one that was quiet longest is forgotten first."""

PULL = 1 / 3
"""Share of what a request takes alone by which another node must be quicker to get it: one and a
half times as quick, as far as measured speeds can be told apart."""


@dataclass(slots=True, eq=False)
class Homes:
    """The node of each conversation's last request, one for each model it speaks to."""

    _rows: OrderedDict[tuple[str, str], Row] = field(default_factory=OrderedDict)

    def placed(self, session: str, model: str, row: Row) -> None:
        """A request of it goes there."""
        key = session, model
        self._rows[key] = row
        self._rows.move_to_end(key)
        if len(self._rows) > MOST_CONVERSATIONS:
            self._rows.popitem(last=False)

    def doubts(self, session: str, model: str, ask: Ask, board: Board) -> Mapping[int, float]:
        """The doubts of `ask`, and a trust in its conversation's node."""
        row = self._rows.get((session, model))
        if row is None or board.by_name.get(row.name) is not row:
            return ask.doubts
        alone = ask.prompt / row.prefill + ask.completion * row.token_base
        doubt = ask.doubts.get(row.index, 0.0)
        return {**ask.doubts, row.index: doubt - PULL * alone}
