"""Windows of time over which use is summed: sliding ones, and the days and months of UTC.

And classes of times, in which it is counted how long requests took.
"""

from __future__ import annotations

import math
import time
from calendar import timegm
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime

WINDOW_PARTS = 512  # parts of a window: additions that fall into one part leave the window together


class SlidingSum:
    """The sum of what was added within the last `span` seconds, in bounded memory.

    Exact while no two additions fall into one part of the window. Where they do, they leave
    together: with the last of them (`overestimate`: never too low) or the first (never too high).
    """

    __slots__ = ("_latest", "_newest", "_overestimate", "_part_span", "_sum", "parts", "span")

    def __init__(self, span: float, *, overestimate: bool) -> None:
        self.span = span
        self._part_span = span / WINDOW_PARTS
        self._overestimate = overestimate
        self.parts: deque[tuple[float, float]] = deque()
        """About `WINDOW_PARTS` at most. Of each the time of its last or first addition, by which it
        leaves, and its sum."""
        self._newest = self._latest = -math.inf
        """When the newest part began, and when the last addition was."""
        self._sum: float = 0  # an integer as long as all amounts were

    def add(self, now: float, amount: float) -> None:
        """Add `amount` at `now`; a time before the last addition's counts as that one."""
        if now < self._latest:
            now = self._latest
        else:
            self._latest = now
        parts = self.parts
        if parts and parts[0][0] <= now - self.span:
            self.value(now)
        if parts and now - self._newest < self._part_span:
            when, before = parts[-1]
            parts[-1] = (now if self._overestimate else when, before + amount)
        else:
            parts.append((now, amount))
            self._newest = now
        self._sum += amount

    def add_late(self, when: float, amount: float) -> None:
        """Add what happened at `when`, though later additions are counted already."""
        if when >= self._latest:
            self.add(when, amount)
            return
        parts = self.parts
        index = len(parts)
        while index and parts[index - 1][0] >= when:
            index -= 1
        # The first part that ends no earlier; one that ends far later would keep it too long.
        end, before = parts[index] if index < len(parts) else (math.inf, 0.0)
        if end - when < self._part_span:
            parts[index] = (end, before + amount)
        else:
            parts.insert(index, (when, amount))
        self._sum += amount

    def value(self, now: float) -> float:
        """The sum over the window that ends now."""
        parts = self.parts
        if parts and parts[0][0] <= now - self.span:
            begins = now - self.span
            left: float = 0
            while parts and parts[0][0] <= begins:
                left += parts.popleft()[1]
            if type(self._sum) is int:
                # Exact, and soon done: where little happens, each request finds one part to drop.
                self._sum -= int(left)
            else:
                # Summed anew, so that no rounding error stays.
                self._sum = math.fsum(amount for _, amount in parts)
        return self._sum

    def seconds_until_left(self, now: float, amount: float) -> float:
        """Seconds until so much of the sum has left the window; infinity: it holds less."""
        if amount <= 0:
            return 0.0
        for when, part in self.parts:
            amount -= part
            if amount <= 0:
                return max(0.0, when + self.span - now)
        return math.inf

    def seconds_until_empty(self, now: float) -> float:
        """Seconds until all has left the window."""
        if not self.parts:
            return 0.0
        left = self.parts[-1][0] + self.span - now
        return max(0.0, left)

    def resize(self, span: float) -> None:
        """Another span from now on; what has left a shorter window does not come back."""
        self.span = span
        self._part_span = span / WINDOW_PARTS


SHORTEST = 0.001  # seconds; what took less is told as 0
# Of the bounds of two classes of times. The middle of a class is no more than 5 % from its bounds.
CLASS_RATIO = 1.1
_LOG_RATIO = math.log(CLASS_RATIO)


def time_class(seconds: float) -> int:
    """The number of the class in which such a time is counted."""
    return 0 if seconds < SHORTEST else 1 + int(math.log(seconds / SHORTEST) / _LOG_RATIO)


def percentile(counts: Iterable[tuple[int, int]], share: float) -> float | None:
    """The time in seconds that this share of the counted ones does not exceed; None: there is none.

    `counts`: classes, in order, and how many times are of each.
    """
    counted = [one for one in counts if one[1]]
    left = share * sum(count for _, count in counted)
    for number, count in counted:
        left -= count
        if left <= 1e-9:
            return SHORTEST * CLASS_RATIO ** (number - 0.5) if number else 0.0
    return None


DAY = 86400.0


class Calendar:
    """The day and month of a Unix time in UTC, as running numbers.

    Remembers the day of the last question, since nearly all questions are about today.
    """

    __slots__ = ("_day_starts", "day", "day_ends", "month", "month_ends")

    def __init__(self) -> None:
        self.day = self.month = 0  # of the last question
        self._day_starts = self.day_ends = self.month_ends = 0.0

    def look_up(self, when: float) -> None:
        """Set `day`, `month` and their ends to those of `when`."""
        if self._day_starts <= when < self.day_ends:
            return
        self.day = int(when // DAY)
        self._day_starts = self.day * DAY
        self.day_ends = self._day_starts + DAY
        date = time.gmtime(self._day_starts)
        self.month = date.tm_year * 12 + date.tm_mon - 1
        self.month_ends = month_start(self.month + 1)


def month_start(month: int) -> float:
    """Unix time at which the month of this running number begins."""
    return float(timegm((month // 12, month % 12 + 1, 1, 0, 0, 0)))


# Days or months that a `PeriodSums` keeps, so that a clock that was set wrong for a while does not
# lose the sums of the right day.
MOST_PERIODS = 4


class PeriodSums(dict[int, float]):
    """Sums by the running number of a day or month; of many, those begun first are dropped."""

    __slots__ = ()

    def add(self, period: int, amount: float) -> None:
        """Add `amount` to the sum of the period."""
        if period in self:
            self[period] += amount
            return
        if len(self) >= MOST_PERIODS:
            del self[next(iter(self))]
        self[period] = amount

    def raise_to(self, period: int, least: float) -> None:
        """Let the period's sum be no less than this."""
        if least > self.get(period, 0.0):
            self.add(period, least - self.get(period, 0.0))


def time_text(moment: float, timespec: str = "seconds") -> str:
    """A time in the form of RFC 3339, in UTC, to the second or as `isoformat` takes it."""
    try:
        text = datetime.fromtimestamp(moment, UTC).isoformat(timespec=timespec)
    except (ValueError, OverflowError, OSError):
        return str(moment)
    return text.replace("+00:00", "Z")


def date_of(moment: float) -> str:
    """The day of a time, in UTC: `2026-11-23`."""
    return time_text(moment)[:10]
