"""How much is tried of what may be repeated at will: examples that are drawn, combinations of parameters.

TENSORFERRY_TEST_EFFORT is a factor. Suites that run again for another engine have a part of it; with 2 or more, tests
marked `in_turn` meet every engine in every combination.
"""

from __future__ import annotations

import os

VARIABLE = "TENSORFERRY_TEST_EFFORT"
EFFORT = float(os.environ.get(VARIABLE, "1"))
EVERY_COMBINATION = EFFORT >= 2


def examples(count: int) -> int:
    """Return how many examples to draw where usually count are."""
    return max(5, round(count * EFFORT))
