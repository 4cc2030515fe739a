"""How sure a figure is said to be, and whether it is."""

from __future__ import annotations

import itertools
import random

import pytest

from tensorferry.tuning.intervals import interval, ratio_interval


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 0, 0, 0.0), (3, 0, 2, 0.75), (7, 0, 6, 0.984), (9, 1, 7, 0.961), (20, 5, 14, 0.959)],
)
def test_interval_is_of_order_statistics(
    count: int, low: int, high: int, confidence: float
) -> None:
    found = interval([float(value) for value in range(count)])
    assert (found.low, found.high) == (low, high)
    assert found.confidence == pytest.approx(confidence, abs=0.001)


def test_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(8)
    held = 0
    for _ in range(2000):
        found = interval([generator.lognormvariate(0, 1) for _ in range(9)])
        held += found.low <= 1.0 <= found.high
    assert held / 2000 == pytest.approx(0.961, abs=0.02)


@pytest.mark.parametrize(("count", "wanted"), [(6, 0.9), (10, 0.95), (10, 0.99), (14, 0.995)])
def test_interval_of_ratios_is_that_of_signed_ranks(count: int, wanted: float) -> None:
    # All signs of the same differences are equally likely where there is no difference: those that would put the
    # interval beyond it are counted.
    sizes = [1.1 + 0.37**number for number in range(count)]
    beyond = 0
    for signs in itertools.islice(itertools.product((1, -1), repeat=count), 2 ** (count - 1)):
        found = ratio_interval(
            [size**sign for size, sign in zip(sizes, signs, strict=True)], wanted
        )
        beyond += not found.low < 1 < found.high
        if count > 10:
            break
    assert found.confidence >= wanted
    if count <= 10:
        assert 1 - beyond / 2 ** (count - 1) == pytest.approx(found.confidence)


def test_interval_of_ratios_is_narrower_than_one_of_order_statistics() -> None:
    generator = random.Random(9)
    narrower = held = 0
    for _ in range(200):
        ratios = [1.1 * generator.lognormvariate(0, 0.1) for _ in range(20)]
        narrow, wide = ratio_interval(ratios, 0.95), interval(ratios, 0.95)
        narrower += narrow.high - narrow.low < wide.high - wide.low
        held += narrow.low < 1.1 < narrow.high
    assert narrower > 130
    assert 180 <= held < 200


def test_a_single_pair_says_nothing() -> None:
    found = ratio_interval([1.5])
    assert (found.low, found.high, found.confidence) == (1.5, 1.5, 0.0)
