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
    from collections.abc import Iterator, Mapping, Sequence

# A read request costs a drive a fixed time, in which it could transfer about this many bytes.
_SMALL_NBYTES = 256 << 10
# The least size of the window: this many bytes in flight keep a drive busy. It is at most a quarter of the budget.
_WINDOW_NBYTES = 64 << 20
# The most steps of a pass that are recorded: a long loop within forward() must not fill memory.
_MAX_STEPS = 1 << 17


def needed_nbytes(steps: Sequence[Sequence[int]], nbytes: Mapping[int, int]) -> int:
    """Return the bytes of the weights that the largest step needs at the same time."""
    return max((sum(nbytes[weight] for weight in set(step)) for step in steps), default=0)


def kept(
    steps: Sequence[Sequence[int]], nbytes: Mapping[int, int], budget_nbytes: int
) -> frozenset[int]:
    """Choose the weights that stay in memory.

    Parameters
    ----------
    steps : sequence of sequences of int
        The weights that each step of a pass needs.
    nbytes : mapping of int to int
        The memory of each weight.
    budget_nbytes : int
        Memory for all weights, at least :func:`needed_nbytes`.

    Returns
    -------
    frozenset of int
        The chosen weights. The rest of the budget, two of the largest steps if possible, is the window for the others.
    """
    uses = Counter(weight for step in steps for weight in set(step))
    if sum(nbytes[weight] for weight in uses) <= budget_nbytes:
        return frozenset(uses)
    found: set[int] = set()
    free = budget_nbytes - _window(steps, nbytes, found, budget_nbytes)
    small = sorted((w for w in uses if nbytes[w] <= _SMALL_NBYTES), key=lambda w: nbytes[w])
    for weight in small:
        if free < nbytes[weight] or budget_nbytes < 4 * nbytes[weight]:
            break
        found.add(weight)
        free -= nbytes[weight]
    found |= _largest(steps, nbytes, found, uses, budget_nbytes)
    free = budget_nbytes - _window(steps, nbytes, found, budget_nbytes) - _sum(found, nbytes)
    for weight, count in uses.most_common():  # each use of a weight that does not stay is a read
        if count < 2:
            break
        if weight not in found and nbytes[weight] <= free:
            found.add(weight)
            free -= nbytes[weight]
    # Spread the weights that stay evenly over the pass: `due` grows with each weight, and a weight stays if it fits.
    others = [weight for weight in uses if weight not in found]  # in the order of the pass
    share = max(free, 0) / max(_sum(others, nbytes), 1)
    due = 0.0
    for weight in others:
        due += share * nbytes[weight]
        if nbytes[weight] <= min(due, free):
            found.add(weight)
            free -= nbytes[weight]
            due -= nbytes[weight]
    for weight in others:  # fill the remaining budget
        if weight not in found and nbytes[weight] <= free:
            found.add(weight)
            free -= nbytes[weight]
    return frozenset(found)


def _largest(
    steps: Sequence[Sequence[int]],
    nbytes: Mapping[int, int],
    already: set[int],
    uses: Mapping[int, int],
    budget_nbytes: int,
) -> set[int]:
    """Return as many of the largest weights as maximize the bytes that stay.

    The window must fit the largest weights that do not stay, so keeping a large weight may reduce the window.
    """
    chosen: list[int] = []
    best, best_nbytes = 0, budget_nbytes - _window(steps, nbytes, already, budget_nbytes)
    candidates = sorted((w for w in uses if w not in already), key=lambda w: (-nbytes[w], w))
    for weight in candidates:
        if nbytes[weight] <= _WINDOW_NBYTES // 4 or len(chosen) == 16:
            break
        chosen.append(weight)
        staying = already | set(chosen)
        room = budget_nbytes - _window(steps, nbytes, staying, budget_nbytes)
        if _sum(staying, nbytes) <= room and room > best_nbytes:
            best, best_nbytes = len(chosen), room
    return set(chosen[:best])


def _window(
    steps: Sequence[Sequence[int]], nbytes: Mapping[int, int], staying: set[int], budget_nbytes: int
) -> int:
    """Return the bytes of the window for weights that do not stay: two of the largest steps, or more for the drive."""
    largest = needed_nbytes([[w for w in step if w not in staying] for step in steps], nbytes)
    return max(min(2 * largest, budget_nbytes), min(_WINDOW_NBYTES, budget_nbytes // 4))


def _sum(weights: Iterator[int] | Sequence[int] | set[int], nbytes: Mapping[int, int]) -> int:
    return sum(nbytes[weight] for weight in weights)


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
