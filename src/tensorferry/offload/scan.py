"""What a model's next forward pass will want, by its last one, and what of it should stay in memory: no I/O here.

A *step* is one use of a module: it wants some weights at the same time. A pass is a sequence of steps, and the next
pass is expected to be the same. Such a scan goes round: what was used last is wanted last again, so that keeping what
was used last (LRU) would keep nothing that is wanted next. Instead a fixed part of the weights stays, and all others go
through a window. Each byte that stays saves one byte of reading in every pass, whichever it is; so the choice is free
to leave the window small (large weights stay first), to save requests (small ones do), and to spread what is read
evenly, so that the drive is busy all the time.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A request more costs a drive about as much as so many bytes.
_SMALL_NBYTES = 256 << 10
# What is on its way to keep a drive busy, where the budget allows.
_WINDOW_NBYTES = 64 << 20
# Steps of a pass that are remembered: a loop within forward() must not fill memory.
_MAX_STEPS = 1 << 17


def needed_nbytes(steps: Sequence[Sequence[int]], nbytes: Mapping[int, int]) -> int:
    """Return how much the largest step takes."""
    return max((sum(nbytes[weight] for weight in set(step)) for step in steps), default=0)


def kept(
    steps: Sequence[Sequence[int]], nbytes: Mapping[int, int], budget_nbytes: int
) -> frozenset[int]:
    """Return the weights that should stay in memory.

    Parameters
    ----------
    steps : sequence of sequences of int
        The weights that each step of a pass wants.
    nbytes : mapping of int to int
        How much memory each weight takes.
    budget_nbytes : int
        What there is for all: at least :func:`needed_nbytes`.

    Returns
    -------
    frozenset of int
        The others have a window of what remains: two of the largest steps, where the budget has room for these.
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
    for weight, count in uses.most_common():  # each use is a read
        if count < 2:
            break
        if weight not in found and nbytes[weight] <= free:
            found.add(weight)
            free -= nbytes[weight]
    others = [weight for weight in uses if weight not in found]  # in the order of the pass
    share = max(free, 0) / max(_sum(others, nbytes), 1)
    due = 0.0
    for weight in others:
        due += share * nbytes[weight]
        if nbytes[weight] <= min(due, free):
            found.add(weight)
            free -= nbytes[weight]
            due -= nbytes[weight]
    for weight in others:  # what the sizes have left over
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
    """Return so many of the largest weights that most is kept: with each of them the window may become smaller."""
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
    largest = max(
        (sum(nbytes[w] for w in set(step) if w not in staying) for step in steps), default=0
    )
    return max(min(2 * largest, budget_nbytes), min(_WINDOW_NBYTES, budget_nbytes // 4))


def _sum(weights: Iterator[int] | Sequence[int] | set[int], nbytes: Mapping[int, int]) -> int:
    return sum(nbytes[weight] for weight in weights)


class Order:
    """Which steps come next: those of the last pass, from where the present one is in it.

    Parameters
    ----------
    default : sequence of int
        What is expected as long as there was no pass.

    Attributes
    ----------
    position : int
        How many steps the expected ones are ahead of the first one; it grows with each step that was expected.
    learned : bool
        Whether there was a pass.
    changed : bool
        Whether the last pass was another one than that before.
    """

    def __init__(self, default: Sequence[int]) -> None:
        self.position = 0
        self._learn(list(default))
        self._now: list[int] = []
        self._went_back: int | None = None
        self.changed = False
        self.learned = False

    def begin_pass(self) -> None:
        """Expect what the pass before had, if there was one: it went through to its end."""
        self.learned |= bool(self._now)
        self.changed = bool(self._now) and self._now != self._last
        if self.changed:
            self._learn(self._now)
        elif self._last and self.position % len(self._last):
            self.position = 0
        self._now = []
        self._went_back = None

    def abandon_pass(self) -> None:
        """Forget what has been seen since the last pass began: it is no example."""
        self._now = []
        self._went_back = None
        self.position = 0

    def used(self, step: int) -> bool:
        """Take note of a step; return whether it was expected.

        One that comes in its turn or a little early moves the position behind it. One from behind does so only when
        the step that follows it comes next: until then it may be a single one out of order.
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
        """How many steps a pass has."""
        return len(self._last)

    def pass_(self) -> list[int]:
        """Return the steps of a pass."""
        return list(self._last)

    def distance(self, step: int) -> int | None:
        """Return how many steps come before one; None where it is not expected at all."""
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
