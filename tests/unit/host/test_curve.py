"""Which curves are let pass, and what a card's fans are told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from specrig.host.curve import FULL_BY_C, HALF_BY_C, LAG_C, Follower, fault, percent

GOOD = [[40, 30], [60, 50], [75, 80], [83, 100]]


def test_between_points_it_is_a_line_rounded_up_and_below_them_it_is_silent() -> None:
    said = [percent(GOOD, celsius) for celsius in (39, 40, 41, 50, 60, 61, 75, 79, 83, 99)]
    assert not fault(GOOD) and said == [None, 30, 31, 40, 50, 52, 80, 90, 100, 100]


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ([[83, 100]], "2 to 16 points"),
        ([[c, 100] for c in range(30, 50)], "2 to 16 points"),
        ("40:30", "2 to 16 points"),
        ([[40, 30], [60]], "[60] is no point"),
        ([[40, 30], [60, True]], "is no point"),
        ([[40, 30], [60, "50"]], "is no point"),
        ([[19, 30], [83, 100]], "[19, 30] is no point: 20 to 85 °C"),
        ([[40, 30], [86, 100]], "[86, 100] is no point"),
        ([[40, 30], [83, 101]], "[83, 101] is no point"),
        ([[40, -1], [83, 100]], "[40, -1] is no point"),
        ([[60, 30], [50, 60], [83, 100]], "[50, 60] after [60, 30]"),
        ([[60, 30], [60, 60], [83, 100]], "[60, 60] after [60, 30]"),
        ([[40, 60], [60, 50], [83, 100]], "[60, 50] after [40, 60]"),
        ([[40, 30], [80, 90]], "it ends with 90 % at 80 °C; it must come to 100 % at 85 °C"),
        ([[40, 30], [84, 30], [85, 100]], "it is at 30 % at 75 °C"),
    ],
)
def test_a_curve_that_does_not_cool_is_told_why(curve: Any, words: str) -> None:
    assert words in fault(curve)


@given(some.lists(some.lists(some.integers(0, 120), min_size=2, max_size=2), max_size=6), some.integers(0, 130))
def test_whatever_is_let_pass_cools(curve: list[list[int]], celsius: int) -> None:
    if fault(curve):
        return
    speed = percent(curve, celsius)
    assert percent(curve, FULL_BY_C) == 100
    if speed is None:
        assert celsius < curve[0][0]
    else:
        assert 0 <= speed <= 100 and (celsius < HALF_BY_C or speed >= 50)


def test_up_at_once_and_down_with_a_lag() -> None:
    fans = Follower(GOOD, 88, 30, 100)
    assert [fans.wants(c) for c in (39, 60, 70, 69, 67, 66, 68, 60)] == [None, 50, 70, 70, 70, 68, 68, 56]
    # On its way down it crosses the first point as late.
    assert [fans.wants(c) for c in (40, 38, 37, 36, 39, 40)] == [33, 31, 30, None, None, 30]


def test_a_card_that_is_too_hot_for_its_curve_has_its_own_control_until_it_is_cool() -> None:
    fans = Follower(GOOD, 88, 30, 100)
    assert [fans.wants(c) for c in (87, 88, 90)] == [100, None, None] and fans.hot
    assert [fans.wants(c) for c in (83, 81, 80)] == [None, None, None]
    assert fans.wants(83 - LAG_C - 1) == 98 and not fans.hot


def test_the_cards_own_bounds_hold() -> None:
    assert [Follower([[40, 10], [80, 100]], 85, 30, 90).wants(c) for c in (40, 80)] == [30, 90]
