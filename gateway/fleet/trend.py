"""A straight line through noisy measurements, which forgets, and which one odd one moves little."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST_STEP = 4.0
"""One measurement counts as at most so many times more or less than the line says."""
SURPRISE = 1.5
"""A measurement that differs by this factor is unexpected."""
BELIEVED = 3
"""So many unexpected ones in a row, all to the same side, are a change and no accident."""
DOUBTED = 0.25
"""What counts of the weight of an unexpected measurement until others agree with it."""
FORGET = 0.25
"""What is left of earlier evidence when a change is believed."""
MOST_AT_ONCE = 0.25
"""One measurement weighs at most this share of the memory."""
WIDEST = 1 / 32
"""An interval whose ends differ more than that is no measurement to begin with."""


@dataclass(slots=True)
class Trend:
    """`y = level + slope * x` for positive y and x >= 0, by decayed weighted least squares.

    `prior` is the slope to begin with as a share of the level, worth `strength` (weight times x
    squared); the slope stays between 0 and `steepest` levels. Evidence of `memory` weight makes
    all that came before count half.
    """

    memory: float
    prior: float
    strength: float
    steepest: float
    level: float = 0.0
    """0: nothing is known."""
    slope: float = 0.0
    _w: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _surprises: int = 0
    """Unexpected measurements in a row; negative: on the lower side."""

    def at(self, x: float) -> float:
        """What the line says; 0 while nothing is known."""
        return self.level + self.slope * x

    def learn(self, x: float, low: float, high: float, weight: float) -> bool:
        """Take in that y lies between `low` and `high` (0 < low <= high); whether it was used.

        What is certain moves the line by its whole weight. A wide interval moves it little: to its
        nearer end, and slowly on to the lower one, since what makes an interval wide (others'
        work) mostly did cost time.
        """
        weight = min(weight, self.memory * MOST_AT_ONCE) * low / high
        expected = self.at(x)
        left = 1.0
        if expected:
            least, most = expected / LARGEST_STEP, expected * LARGEST_STEP
            y = min(max(min(max(expected, low), high), least), most)
            surprise = (y > expected * SURPRISE) - (y < expected / SURPRISE)
            if surprise:
                same = surprise * self._surprises > 0
                self._surprises = self._surprises + surprise if same else surprise
                if abs(self._surprises) < BELIEVED:
                    weight *= DOUBTED
                else:
                    left = FORGET
            else:
                self._surprises = 0
            if low < y:
                y = math.sqrt(y * max(low, least))
        elif low < high * WIDEST:
            return False
        else:
            y = math.sqrt(low * high)
        kept = left * 0.5 ** (weight / self.memory)
        self._w = self._w * kept + weight
        self._x = self._x * kept + weight * x
        self._y = self._y * kept + weight * y
        self._xx = self._xx * kept + weight * x * x
        self._xy = self._xy * kept + weight * x * y
        self._fit()
        return True

    def _fit(self) -> None:
        x, y = self._x / self._w, self._y / self._w
        spread = max(0.0, self._xx - self._x * x)
        usual = self.prior * y / (1 + self.prior * x)
        slope = (self._xy - self._x * y + self.strength * usual) / (spread + self.strength)
        self.slope = min(max(slope, 0.0), y / (x + 1 / self.steepest))
        self.level = y - self.slope * x
