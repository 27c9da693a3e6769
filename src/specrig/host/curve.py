"""What a fan curve says, and whether it cools: [[°C, %], …], linear in between. Pure; the plan asks it, and the host again.

Below its first point a curve says nothing: the card's own control has the fans, and may stop them, which software may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Points = Sequence[Sequence[int]]

LOWEST_C, MOST_POINTS = 20, 16
# A card with its fans at full is as cool as it can be made, before it slows itself down.
FULL_BY_C = 85
# NVML does not tell how hot a GeForce's memory is. It is hotter than the chip, which a curve that rises only at its end would not see.
HALF_BY_C = 75
# The temperature must have fallen by this before a fan slows down: no speed that goes up and down every other second.
LAG_C = 3
# This far above its last point the curve is not enough, for whatever reason.
BEYOND_C = 5


def fault(points: Any) -> str:
    """Why `points` are no curve to be trusted; empty when they are."""
    if not isinstance(points, (list, tuple)) or not 2 <= len(points) <= MOST_POINTS:
        return f"a curve has 2 to {MOST_POINTS} points"
    for point in points:
        numbers = isinstance(point, (list, tuple)) and [type(value) for value in point] == [int, int]
        if not numbers or not (LOWEST_C <= point[0] <= FULL_BY_C and 0 <= point[1] <= 100):
            return f"{point} is no point: {LOWEST_C} to {FULL_BY_C} °C, then 0 to 100 %"
    for low, high in zip(points, points[1:]):
        if high[0] <= low[0] or high[1] < low[1]:
            return f"{list(high)} after {list(low)}: temperatures rise, and speeds do not fall"
    if points[-1][1] != 100:
        return f"it ends with {points[-1][1]} % at {points[-1][0]} °C; it must come to 100 % at {FULL_BY_C} °C at the latest"
    half = percent(points, HALF_BY_C)
    if half is not None and half < 50:
        return f"it is at {half} % at {HALF_BY_C} °C; there it must be at 50 % at least: a card's memory is hotter than its chip"
    return ""


def percent(points: Points, celsius: int) -> int | None:
    """The speed at this temperature, rounded up; None below the first point."""
    if celsius < points[0][0]:
        return None
    for (low_c, low), (high_c, high) in zip(points, points[1:]):
        if celsius <= high_c:
            return low - (low - high) * (celsius - low_c) // (high_c - low_c)
    return points[-1][1]


@dataclass
class Follower:
    """What one card's fans are to do, from one look at its temperature to the next."""

    points: Points
    hot_c: int  # from here on the curve is not enough
    least: int = 0  # what the card takes, in %
    most: int = 100
    hot: bool = False
    _held: int = -1000

    def wants(self, celsius: int) -> int | None:
        """The speed in %; None: automatic. Up at once, down with a lag."""
        self._held = max(celsius, min(self._held, celsius + LAG_C))
        self.hot = celsius >= self.hot_c or (self.hot and self._held >= self.points[-1][0])
        speed = None if self.hot else percent(self.points, self._held)
        return None if speed is None else max(self.least, min(self.most, speed))
