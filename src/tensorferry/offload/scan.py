"""Prediction of a model's next forward pass from the last one, and the choice of weights that stay in memory.

A *step* is one use of a module, which needs some weights at the same time. A pass is a sequence of steps, and the next
pass is expected to repeat the last one. In such a cyclic scan the most recently used weight is needed last, so an LRU
cache would always evict what is needed next. Instead, a fixed part of the weights stays in memory, and all others
pass through a window. Each byte that stays saves reading one byte per pass, whichever byte it is. So the choice is
made to keep the window small (large weights stay first), to save requests (small weights stay), and to spread the
reads evenly over the pass, which keeps the drive busy. This module does no I/O.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A read request costs a drive a fixed time, in which it could transfer about this many bytes.
_SMALL_NBYTES = 256 << 10
# The least size of the window: this many bytes in flight keep a drive busy. It is at most a quarter of the budget.
_WINDOW_NBYTES = 64 << 20
# The most items that are considered for keeping because of their size.
_MAX_LARGE = 16
# The most steps of a pass that are recorded: a long loop within forward() must not fill memory.
_MAX_STEPS = 1 << 17


def kept(
    steps: Sequence[int],
    together: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    budget_nbytes: int,
) -> frozenset[int]:
    """Choose the items that stay in memory.

    Parameters
    ----------
    steps : sequence of int
        The items that a pass uses, in this order.
    together : sequence of sequences of int
        Items that must be in memory at the same time.
    nbytes : sequence of int
        The memory of each item.
    budget_nbytes : int
        Memory for all items, at least as much as the largest of ``together``.

    Returns
    -------
    frozenset of int
        The chosen items. The rest of the budget is the window for the others.
    """
    uses = Counter(steps)
    if sum(nbytes[item] for item in uses) <= budget_nbytes:
        return frozenset(uses)

    def window(staying: set[int]) -> int:
        """Return the bytes of the window: two of the largest needs, or more for the drive."""
        largest = max(sum(nbytes[w] for w in set(each) - staying) for each in together)
        return max(min(2 * largest, budget_nbytes), min(_WINDOW_NBYTES, budget_nbytes // 4))

    found: set[int] = set()
    free = budget_nbytes - window(found)

    def keep(items: Iterable[int]) -> None:
        nonlocal free
        for item in items:
            if item not in found and nbytes[item] <= free:
                found.add(item)
                free -= nbytes[item]

    # The window must have room for the largest items that do not stay, so keeping a large item may reduce the window.
    chosen: set[int] = set()
    best, best_nbytes = chosen, free
    for item in sorted(uses, key=lambda item: (-nbytes[item], item))[:_MAX_LARGE]:
        if nbytes[item] <= _WINDOW_NBYTES // 4:
            break
        chosen = chosen | {item}
        room = budget_nbytes - window(chosen)
        if sum(nbytes[each] for each in chosen) <= room and room > best_nbytes:
            best, best_nbytes = chosen, room
    free = best_nbytes
    keep(best)
    keep(sorted((each for each in uses if nbytes[each] <= _SMALL_NBYTES), key=lambda w: nbytes[w]))
    # Each use of an item that does not stay is a read.
    least = min(uses.values())
    keep(item for item, count in uses.most_common() if count > least)
    # Spread the items that stay evenly over the pass: `due` grows with each item, and an item stays if it fits.
    others = [item for item in uses if item not in found]  # in the order of the pass
    share = max(free, 0) / max(sum(nbytes[item] for item in others), 1)
    due = 0.0
    for item in others:
        due += share * nbytes[item]
        if nbytes[item] <= due:
            keep([item])
            due -= nbytes[item]
    keep(others)
    return frozenset(found)


class Order:
    """The expected order of steps: that of the last pass, with the position of the present pass in it.

    Parameters
    ----------
    default : sequence of int
        The expected steps before the first pass.

    Attributes
    ----------
    position : int
        The position of the next expected step; it grows with each expected step, across passes.
    learned : bool
        Whether a pass has been recorded.
    changed : bool
        Whether the last pass differed from the one before.
    """

    def __init__(self, default: Sequence[int]) -> None:
        self.position = 0
        self._learn(list(default))
        self._now: list[int] = []
        # The position behind the last step, if that step was one of the past; see used().
        self._went_back: int | None = None
        self.changed = False
        self.learned = False

    def begin_pass(self) -> None:
        """Begin a pass, and expect the steps of the last complete one (:meth:`abandon_pass` discards an incomplete)."""
        self.learned |= bool(self._now)
        self.changed = bool(self._now) and self._now != self._last
        if self.changed:
            self._learn(self._now)
        elif self._last and self.position % len(self._last):
            self.position = 0
        self._now = []
        self._went_back = None

    def abandon_pass(self) -> None:
        """Discard the steps recorded since the pass began: an incomplete pass is not a prediction."""
        self._now = []
        self._went_back = None
        self.position = 0

    def used(self, step: int) -> bool:
        """Record a step; return whether it was the expected one.

        A step that was expected now or soon moves the position behind it. A step of the past moves the position back
        only if its successor follows it; until then it may be a single step out of order.
        """
        if len(self._now) < _MAX_STEPS:
            self._now.append(step)
        went_back, self._went_back = self._went_back, None
        distance = self.distance(step)
        if distance is None:
            return False
        if distance > 0 and went_back is not None and self.expected(went_back) == step:
            self.position = went_back + 1
            return False
        if distance > len(self._last) // 2:
            self._went_back = self.position + distance - len(self._last) + 1
            return False
        self.position += distance + 1
        return distance == 0

    def expected(self, position: int) -> int:
        """Return the step at a position, which may be any number of passes ahead."""
        return self._last[position % len(self._last)]

    @property
    def length(self) -> int:
        """The number of steps of a pass."""
        return len(self._last)

    def pass_steps(self) -> list[int]:
        """Return the steps of a pass."""
        return list(self._last)

    def distance(self, step: int) -> int | None:
        """Return how many steps precede the next occurrence of a step; None if it is not expected at all."""
        places = self._places.get(step)
        if places is None:
            return None
        here = self.position % len(self._last)
        index = bisect.bisect_left(places, here)
        if index < len(places):
            return places[index] - here
        return places[0] + len(self._last) - here

    def _learn(self, steps: list[int]) -> None:
        self._last = steps
        self._places: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            self._places.setdefault(step, []).append(place)
        self.position = 0
