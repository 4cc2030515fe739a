"""A cache for frequently used rows of a table, within a number of bytes; batches of ids need no loop in Python.

The policy is S3-FIFO within sets. An id belongs to one set of 16 ways; each way has memory for one row. A quarter of
the ways are for new rows, and the others for proven rows, which have been used again. A new row that is replaced moves
to the proven ways if it was used since it came. Otherwise only its id is remembered for a while, and if the row is read
again in that time, it goes directly to the proven ways. In both kinds of ways the row with the fewest uses is replaced,
and among rows with equally few uses the one with the oldest use. So rows that are used once, as in a scan, replace few
others.

An interruption, for example by Ctrl-C, may leave a cache half changed. The caller sets :attr:`RowCache.changing` before
a call and clears it afterwards, and discards a cache in which it is still set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]
    Rows = npt.NDArray[np.uint8]

_WAYS = 16  # per set
_NEW_ONE_IN = 4  # one in this many ways is for new rows
_REMEMBERED = 2  # remembered ids per way
_MAX_COUNT = 3  # the counter of uses saturates here

# A cached row needs its bytes, its id, the time and the number of uses, and remembered ids.
_OVERHEAD_NBYTES = 8 + 8 + 1 + 4 * _REMEMBERED

# Odd multipliers for hashing: the upper bits of the product depend on all bits of an id.
_TO_SET = np.uint64(0x9E3779B97F4A7C15)
_TO_MEMORY = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)


class RowCache:
    """Some rows of a table, for one thread at a time.

    Parameters
    ----------
    nbytes : int
        Memory for rows and bookkeeping.
    row_nbytes : int
        Bytes of a row.

    Attributes
    ----------
    changing : bool
        Whether a call is in progress or was interrupted; set by the caller.
    """

    def __init__(self, nbytes: int, row_nbytes: int) -> None:
        places = nbytes // (row_nbytes + _OVERHEAD_NBYTES)
        self._ways = max(1, min(_WAYS, places))
        shape = places // self._ways, self._ways
        self._new_ways = slice(0, max(1, self._ways // _NEW_ONE_IN))
        self._proven_ways = slice(self._new_ways.stop, self._ways)
        self.changing = False
        self._ids = np.full(shape, -1, np.int64)
        self._when = np.zeros(shape, np.int64)
        self._uses = np.zeros(shape, np.uint8)
        self._rows = np.empty((*shape, row_nbytes), np.uint8)
        self._remembered = np.full(_REMEMBERED * self._ids.size, -1, np.int64).astype(np.uint32)
        self._now = 0

    def look_up(self, ids: Ids, out: Rows) -> Mask:
        """Copy cached rows to the positions of their ids in ``out``, and return a mask of these positions."""
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
        # An id that occurs several times in a batch counts once.
        self._uses[sets, ways] = np.minimum(self._uses[sets, ways] + 1, _MAX_COUNT)
        return here

    def offer(self, ids: Ids, rows: Rows) -> None:
        """Offer rows that were just read; rows that the policy admits replace other rows."""
        if not self._ids.size or not len(ids):
            return
        ids, first = np.unique(ids, return_index=True)
        sets, _, here = self._find(ids)
        known = self._remembered[self._remembered_slots(ids)] == ids.astype(np.uint32)
        # Remembered ids go to the proven ways; so do all ids of a set in which such ways are still empty.
        known |= (self._ids[sets, self._proven_ways] < 0).any(axis=1)
        new, known = ~here & ~known, ~here & known
        gone, wanted, gone_rows = self._insert(self._new_ways, ids[new], rows[first[new]])
        again = wanted > 0
        self._remembered[self._remembered_slots(gone[~again])] = gone[~again].astype(np.uint32)
        self._insert(
            self._proven_ways,
            np.concatenate([ids[known], gone[again]]),
            np.concatenate([rows[first[known]], gone_rows[again]]),
        )

    def _insert(self, ways: slice, ids: Ids, rows: Rows) -> tuple[Ids, Rows, Rows]:
        """Insert rows into some ways of their sets; return the replaced ids, their numbers of uses and their rows."""
        sets = _spread(ids, _TO_SET, len(self._ids))
        order = np.argsort(sets, kind="stable")
        rank = _ranks(sets[order])
        fits = rank < ways.stop - ways.start  # skip rows in excess of a set's ways
        order, rank = order[fits], rank[fits]
        sets = sets[order]
        # Rows with a low worth are replaced first: its upper bits are the number of uses, the lower ones the time of
        # the last use. Empty ways have the lowest worth.
        ids_here, worth = self._ids[sets, ways], self._when[sets, ways]
        worth = worth + (self._uses[sets, ways].astype(np.int64) << 48)
        worth[ids_here < 0] = -1
        at = worth.argsort(axis=1, kind="stable")[np.arange(len(sets)), rank] + ways.start
        gone, wanted, gone_rows = (each[sets, at] for each in (self._ids, self._uses, self._rows))
        # Aging: subtract the uses of the replaced row from those that stay, so unused rows are replaced eventually.
        least = np.zeros(len(self._ids), np.uint8)
        np.maximum.at(least, sets, wanted)
        changed = np.unique(sets)
        stay = self._uses[changed, ways]
        self._uses[changed, ways] = stay - np.minimum(stay, least[changed, None])
        self._ids[sets, at] = ids[order]
        self._rows[sets, at] = rows[order]
        self._when[sets, at], self._uses[sets, at] = self._now, 0
        was_there = gone >= 0
        return gone[was_there], wanted[was_there], gone_rows[was_there]

    def _find(self, ids: Ids) -> tuple[Ids, Ids, Mask]:
        """Return the sets of ids, their ways in these, and a mask of the ids that are cached."""
        sets = _spread(ids, _TO_SET, len(self._ids))
        equal = self._ids[sets] == ids[:, None]
        ways: Any = equal.argmax(axis=1)
        return sets, ways, equal[np.arange(len(ids)), ways]

    def _remembered_slots(self, ids: Ids) -> Ids:
        return _spread(ids, _TO_MEMORY, len(self._remembered))


def _spread(ids: Ids, multiplier: np.uint64, count: int) -> Ids:
    """Hash each id to a number below ``count``."""
    upper = (ids.astype(np.uint64) * multiplier) >> _HALF
    found: Ids = ((upper * np.uint64(count)) >> _HALF).astype(np.int64)
    return found


def _ranks(groups: Ids) -> Ids:
    """Return the index of each element within its group; equal groups are adjacent."""
    place = np.arange(len(groups))
    first = np.ones(len(groups), np.bool_)
    first[1:] = groups[1:] != groups[:-1]
    ranks: Ids = place - np.maximum.accumulate(np.where(first, place, 0))
    return ranks
