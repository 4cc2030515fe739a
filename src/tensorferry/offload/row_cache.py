"""Rows of a table that are wanted often, in a number of bytes: for batches of ids, without a loop over them in Python.

The policy is that of S3-FIFO, in sets: an id belongs to one set of 16 places, a quarter of which are for newcomers. Who
was wanted again when its place is taken goes on to the others, where the one that was wanted least often goes, and of
several the one that was wanted longest ago. Of those that were not, the id is remembered for a while, and if it is
wanted once more it is no newcomer. So rows that are wanted once, as a scan wants them, displace few that are not.
``docs/offload-tables.md`` has hit rates beside other policies and the ideal.

An interruption, by Ctrl-C say, may leave a cache half changed. Its user sets :attr:`RowCache.changing` before a call
and clears it afterwards, and gives up a cache in which it is still set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]
    Rows = npt.NDArray[np.uint8]

_WAYS = 16  # places of a set
_NEWCOMERS = 4  # as one in so many of them
_REMEMBERED = 2  # ids for each place
_MOST = 3  # a row that is wanted more often counts as often as this

# A place takes a row, its id, when and how often it was wanted, and ids that are remembered.
_OVERHEAD_NBYTES = 8 + 8 + 1 + 4 * _REMEMBERED

# Odd multipliers: the upper bits of a product depend on all bits of an id.
_TO_SET = np.uint64(0x9E3779B97F4A7C15)
_TO_MEMORY = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)


class RowCache:
    """Some rows of a table, for one thread at a time.

    Parameters
    ----------
    nbytes : int
        Memory for all of it.
    row_nbytes : int
        Bytes of a row.

    Attributes
    ----------
    changing : bool
        Whether somebody is at it, or was interrupted.
    """

    def __init__(self, nbytes: int, row_nbytes: int) -> None:
        places = nbytes // (row_nbytes + _OVERHEAD_NBYTES)
        self._ways = max(1, min(_WAYS, places))
        shape = places // self._ways, self._ways
        self._newcomers = slice(0, max(1, self._ways // _NEWCOMERS))
        self._others = slice(self._newcomers.stop, self._ways)
        self.changing = False
        self._ids = np.full(shape, -1, np.int64)
        self._when = np.zeros(shape, np.int64)
        self._wanted = np.zeros(shape, np.uint8)
        self._rows = np.empty((*shape, row_nbytes), np.uint8)
        self._remembered = np.full(_REMEMBERED * self._ids.size, -1, np.int64).astype(np.uint32)
        self._now = 0

    def look_up(self, ids: Ids, out: Rows) -> Mask:
        """Copy rows that are here to where their ids stand, and return which are."""
        if not self._ids.size:
            return np.zeros(len(ids), np.bool_)
        self._now += 1
        sets, ways, here = self._find(ids)
        if here.all():
            flat = self._rows.reshape(self._ids.size, -1)
            flat.take(sets * self._ways + ways, axis=0, out=out, mode="clip")
        else:
            sets, ways = sets[here], ways[here]
            out[here] = self._rows[sets, ways]
        self._when[sets, ways] = self._now
        # Once for all of a batch that are the same.
        self._wanted[sets, ways] = np.minimum(self._wanted[sets, ways] + 1, _MOST)
        return here

    def offer(self, ids: Ids, rows: Rows) -> None:
        """Keep rows that were not here, as far as they are worth it."""
        if not self._ids.size or not len(ids):
            return
        ids, first = np.unique(ids, return_index=True)
        sets, _, here = self._find(ids)
        known = self._remembered[self._memory_of(ids)] == ids.astype(np.uint32)
        known |= (self._ids[sets, self._others] < 0).any(axis=1)
        new, known = ~here & ~known, ~here & known
        gone, wanted, gone_rows = self._put(self._newcomers, ids[new], rows[first[new]])
        again = wanted > 0
        self._remembered[self._memory_of(gone[~again])] = gone[~again].astype(np.uint32)
        self._put(
            self._others,
            np.concatenate([ids[known], gone[again]]),
            np.concatenate([rows[first[known]], gone_rows[again]]),
        )

    def _put(self, ways: slice, ids: Ids, rows: Rows) -> tuple[Ids, Rows, Rows]:
        """Place rows in some ways of their sets; return who was there: ids, how often wanted, and rows."""
        sets = _spread(ids, _TO_SET, len(self._ids))
        order = np.argsort(sets, kind="stable")
        rank = _ranks(sets[order])
        fits = rank < ways.stop - ways.start  # more than a set has places for are passed over
        order, rank = order[fits], rank[fits]
        sets = sets[order]
        ids_here, worth = self._ids[sets, ways], self._when[sets, ways]
        worth = worth + (self._wanted[sets, ways].astype(np.int64) << 48)
        worth[ids_here < 0] = -1
        at = worth.argsort(axis=1, kind="stable")[np.arange(len(sets)), rank] + ways.start
        gone, wanted, gone_rows = (each[sets, at] for each in (self._ids, self._wanted, self._rows))
        # What stays was wanted so much more often than what goes, no more: so it goes, too, if it is not wanted again.
        least = np.zeros(len(self._ids), np.uint8)
        np.maximum.at(least, sets, wanted)
        changed = np.unique(sets)
        stay = self._wanted[changed, ways]
        self._wanted[changed, ways] = stay - np.minimum(stay, least[changed, None])
        self._ids[sets, at] = ids[order]
        self._rows[sets, at] = rows[order]
        self._when[sets, at], self._wanted[sets, at] = self._now, 0
        was_there = gone >= 0
        return gone[was_there], wanted[was_there], gone_rows[was_there]

    def _find(self, ids: Ids) -> tuple[Ids, Ids, Mask]:
        """Return the sets of ids, where in these they are, and whether they are."""
        sets = _spread(ids, _TO_SET, len(self._ids))
        equal = self._ids[sets] == ids[:, None]
        ways: Any = equal.argmax(axis=1)
        return sets, ways, equal[np.arange(len(ids)), ways]

    def _memory_of(self, ids: Ids) -> Ids:
        return _spread(ids, _TO_MEMORY, len(self._remembered))


def _spread(ids: Ids, multiplier: np.uint64, count: int) -> Ids:
    """Return a number below ``count`` for each id."""
    upper = (ids.astype(np.uint64) * multiplier) >> _HALF
    found: Ids = ((upper * np.uint64(count)) >> _HALF).astype(np.int64)
    return found


def _ranks(groups: Ids) -> Ids:
    """Return the place of each element within its group, of groups that follow each other."""
    place = np.arange(len(groups))
    first = np.ones(len(groups), np.bool_)
    first[1:] = groups[1:] != groups[:-1]
    ranks: Ids = place - np.maximum.accumulate(np.where(first, place, 0))
    return ranks
