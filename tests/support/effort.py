"""The effort of tests that can repeat any number of times: drawn examples, and combinations of parameters.

TENSORFERRY_TEST_EFFORT is a factor. Suites that run again for another engine use a fraction of it. With 2 or more,
tests marked `in_turn` run with every engine in every combination.
"""

from __future__ import annotations

import os

VARIABLE = "TENSORFERRY_TEST_EFFORT"
EFFORT = float(os.environ.get(VARIABLE, "1"))
EVERY_COMBINATION = EFFORT >= 2


def examples(count: int) -> int:
    """Return the number of examples to draw; count is the number with an effort of 1."""
    return max(5, round(count * EFFORT))
