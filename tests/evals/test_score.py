"""Wilson's interval against the test it inverts and against published values."""

from __future__ import annotations

import math

import pytest

from turnout.evals.score import Accuracy


def by_bisection(correct: int, total: int) -> tuple[float, float]:
    """The proportions p at which |x/n - p| is exactly 1.96 standard errors of p."""

    def excess(p: float) -> float:
        return abs(correct / total - p) - 1.959963984540054 * math.sqrt(p * (1 - p) / total)

    def cross(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if excess(middle) <= 0 else (inside, middle)
        return inside

    share = correct / total
    low = cross(share, 0.0) if share > 0 else 0.0
    high = cross(share, 1.0) if share < 1 else 1.0
    return low, high


@pytest.mark.parametrize(
    ("correct", "total"), [(1, 2), (5, 10), (193, 200), (1, 200), (199, 200), (7, 13), (950, 1000)]
)
def test_the_interval_inverts_the_score_test(correct, total):
    assert Accuracy(correct, total).interval == pytest.approx(by_bisection(correct, total), abs=1e-9)


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_values(correct, total, low, high):
    assert Accuracy(correct, total).interval == pytest.approx((low, high), abs=5e-5)


def test_extremes_stay_within_bounds_and_mirror_each_other():
    low, high = Accuracy(20, 20).interval
    assert (low, high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert high <= 1


def test_no_answer_tells_nothing():
    assert Accuracy(0, 0).value == 0.0
    assert Accuracy(0, 0).interval == (0.0, 1.0)


def test_text():
    assert str(Accuracy(15, 148)) == "10.1 % (15 of 148; 95 % interval 6.2 to 16.0)"
