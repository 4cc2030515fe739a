"""Which buckets are in memory: as many as an arena has room for, reads as far ahead as that allows, writes behind.

All memory that buckets ever use is allocated once, as an arena. A bucket is read only with a place in hand; its place
is free again when the bucket is clean, or has been written. A bucket that could not be written keeps its place. Places
are given to reads in the order in which buckets are wanted, so that the next one always gets one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.offload.arena import Arena, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.plan import Bucket
    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future

# A few buckets on their way each way keep a drive busy; more memory is worth more with what need not be moved.
_MAX_STREAMING = 8
_STREAMING_SHARE = 4

# How long one waits for I/O before looking whether somebody wants to interrupt, in seconds.
_SLICE_SECONDS = 0.5
_SHORT_SECONDS = 0.002  # and before looking whether more can be begun


@dataclass(eq=False)
class Slot:
    """Where a bucket is."""

    bucket: Bucket
    reading: Future[Any] | None = None
    writing: Future[Any] | None = None
    dirty: bool = False
    stored: bool = False
    keep: bool = False  # when written
    held: bool = False  # acquired, and not released
    view: torch.Tensor | None = None  # its bytes in the arena


@dataclass
class BucketCounters:
    """What has been moved and waited for."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    wait_seconds: float = 0.0


class Residency:
    """Buckets of a store, some of them in memory.

    Parameters
    ----------
    store : TensorStore
        Where buckets are when they are not here.
    nbytes : int
        Of memory, in all.
    all_in_flight : bool
        Two versions of everything must have space: that of a commit, and those of the next one.
    gpu : int
        The GPU that buckets are copied to: then the memory is page-locked and registered with CUDA.
    """

    def __init__(
        self, store: TensorStore, nbytes: int, *, all_in_flight: bool = False, gpu: int = -1
    ) -> None:
        self._store = store
        self._all_in_flight = all_in_flight
        self._places: list[Slot] = []
        self._arena = Arena(nbytes)
        self._order: list[int] = []
        self._fresh = False
        self._position = 0
        self._next_read = 0
        self._kept_from = 0
        self._writing: list[Slot] = []
        self.counters = BucketCounters()
        self.interrupted: Callable[[], bool] = bool
        self._gpu = gpu
        self._made: torch.Tensor | None = None

    @property
    def _memory(self) -> torch.Tensor:
        if self._made is None:
            memory, _ = _core.allocate(max(self.nbytes, 1), self._gpu >= 0, self._gpu)
            self._made = torch.utils.dlpack.from_dlpack(memory)
        return self._made

    def touch(self) -> None:
        """Have all of the memory now, so that the first steps do not wait for it."""
        self._memory.zero_()

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Know further buckets, which are nowhere yet; reserves their space."""
        self._reserve(self._store, buckets)
        self._places += [Slot(bucket) for bucket in buckets]

    def _reserve(self, store: TensorStore, buckets: Sequence[Bucket]) -> None:
        wanted = {bucket.name: bucket.nbytes for bucket in buckets if bucket.nbytes}
        total = sum(wanted.values())
        in_flight = total if self._all_in_flight else min(total, self.nbytes) or None
        store.reserve(wanted, in_flight_nbytes=in_flight)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._arena.nbytes

    # A sweep: buckets in an order, each acquired and released once

    def begin(self, order: Sequence[int], *, fresh: bool = False) -> None:
        """Begin with buckets in an order: the last ones stay in memory, so the next order should begin with these.

        Those that are to be filled anew (``fresh``) are not read.
        """
        self._order, self._fresh = list(order), fresh
        self._position = 0
        self._next_read = 0
        for place in self._places:
            if place.reading is None:
                continue
            # Begun by a sweep that was not finished, and maybe while the drive failed: another try may succeed.
            self._await(place.reading)
            if place.reading.exception(0) is not None:
                place.reading = None
                self._take_back(place)
        self._kept_from = self._first_kept()
        self._read_ahead()

    def _first_kept(self) -> int:
        """Return the place in the order from which on buckets stay in memory when they have been stepped."""
        sizes = [rounded(self._places[index].bucket.nbytes) for index in self._order]
        if sum(rounded(place.bucket.nbytes) for place in self._places) <= self.nbytes:
            return 0
        largest = max(sizes, default=0)
        left = self.nbytes - min(
            max(3 * largest, self.nbytes // _STREAMING_SHARE), _MAX_STREAMING * largest
        )
        at = len(sizes)
        while at and sizes[at - 1] <= left:
            at -= 1
            left -= sizes[at]
        return at

    def acquire(self, index: int) -> torch.Tensor:
        """Return a bucket's bytes in memory, read if it has been stored.

        Raises
        ------
        StorageError
            It cannot be read, or no place can be had since others cannot be written. Another try may succeed.
        """
        place = self._places[index]
        if place.view is None:
            self._read_ahead()
        while place.view is None:
            if not self._give_place(place, insist=True):
                self._await_a_write()
        if place.reading is not None:
            self._await(place.reading, going_on=True)
            reading, place.reading = place.reading, None
            try:
                reading.result(0)
            except BaseException:
                self._take_back(place)
                raise
            self.counters.read_nbytes += place.bucket.nbytes
        if place.writing is not None:
            place.keep = True
            self._await(place.writing)
            self._reap()
        assert place.view is not None
        place.held = True
        return place.view

    def release(self, index: int, *, dirty: bool) -> None:
        """Be done with a bucket: it is written behind, or stays where the order's end is near."""
        place = self._places[index]
        place.held = False
        place.dirty |= dirty
        if self._position >= self._kept_from:
            pass
        elif place.dirty:
            # Where it cannot begin the bucket stays here; the next that needs its place tries again.
            self._write(place, keep=False)
        else:
            self._take_back(place)
        self._position += 1
        self._read_ahead()

    # Between sweeps

    def bytes_of(self, index: int) -> torch.Tensor | None:
        """Return a bucket's bytes where they are in memory, else None."""
        place = self._places[index]
        return None if place.reading is not None else place.view

    def flush(self) -> None:
        """Write all that is dirty and wait for it; what is in memory stays there.

        Raises
        ------
        StorageError
            Something could not be written, and is still in memory; the first failure.
        """
        first: Exception | None = None
        for place in self._places:
            if place.dirty and place.writing is None:
                first = self._write(place, keep=True) or first
        self.drain()
        if first is not None:
            raise first

    def drain(self) -> None:
        """Wait for all writes that are on their way; raises as :meth:`flush`."""
        first: Exception | None = None
        while self._writing:
            self._await_oldest()
            try:
                self._reap(wanted=True)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def check(self) -> None:
        """Raise the failure of a write that has ended, if there is one."""
        self._reap(wanted=True)

    def forget(self) -> None:
        """Let go of all buckets' contents, here and in the store."""
        self.settle()
        for place in self._places:
            self._take_back(place)
            place.dirty = False
            if place.stored:
                self._store.delete(place.bucket.name)
                place.stored = False
        self._places = []
        self._order = []

    def resize(self, nbytes: int) -> None:
        """Have another number of bytes of memory.

        Raises
        ------
        StorageError
            What is in memory cannot be stored; nothing has changed.
        """
        if nbytes == self.nbytes:
            return
        self.flush()
        for place in self._places:
            self._take_back(place)
        self._made = None
        self._arena = Arena(nbytes)

    def settle(self) -> None:
        """Wait until nothing is on its way any more, however it ends."""
        for place in self._places:
            for moving in (place.reading, place.writing):
                if moving is not None:
                    moving.exception()
            if place.reading is not None:
                place.reading = None
                self._take_back(place)
            place.writing = None
        self._writing = []

    # Steps

    def _give_place(self, place: Slot, *, insist: bool) -> bool:
        """Give a bucket a place, if there is one, and begin to read it; ``insist`` lets go of others for it."""
        nbytes = place.bucket.nbytes
        at = self._arena.take(place.bucket.index, nbytes) if nbytes else 0
        if at is None:
            self._reap()
            at = self._arena.take(place.bucket.index, nbytes)
        while at is None and insist and not self._writing and self._evict():
            self._reap()
            at = self._arena.take(place.bucket.index, nbytes)
        if at is None:
            return False
        place.view = self._memory[at : at + nbytes]
        if place.stored and not self._fresh:
            try:
                place.reading = place.bucket.read(self._store, place.view)
            except BaseException:
                self._take_back(place)  # it has nothing of the bucket's
                raise
        return True

    def _evict(self) -> bool:
        """Let go of the bucket that the rest of the order wants last, or not at all; False if there is none."""
        wanted = {self._order[at]: at for at in range(self._position, len(self._order))}
        last = self._last_wanted(lambda index: wanted.get(index, len(self._order)))
        if last is None:
            return False
        self._next_read = min(self._next_read, wanted.get(last.bucket.index, len(self._order)))
        self._let_go(last)
        return True

    def _last_wanted(self, distance: Callable[[int], float]) -> Slot | None:
        """Return the bucket whose next use is the furthest, of those that may leave memory."""
        may_go = [
            place
            for place in self._places
            if place.view is not None and place.writing is None and not place.held
        ]
        return max(may_go, key=lambda place: distance(place.bucket.index), default=None)

    def _let_go(self, last: Slot) -> None:
        """Have a bucket no longer; what is dirty has its place until it has been written."""
        if last.reading is not None:
            self._await(last.reading)
            last.reading.exception()  # whoever wants it will read it again
            last.reading = None
            self._take_back(last)
        elif last.dirty:
            error = self._write(last, keep=False)
            if error is not None:
                raise error
        else:
            self._take_back(last)

    def _read_ahead(self) -> None:
        """Begin reads, in order, as far as there is room."""
        if self._fresh:
            return
        self._next_read = max(self._next_read, self._position)
        while self._next_read < len(self._order):
            place = self._places[self._order[self._next_read]]
            if place.writing is not None:
                place.keep = True  # it need not be read again
            elif place.view is None:
                if not place.stored:
                    return  # it needs a place, and nothing after it may take that one
                if not self._give_place(place, insist=False):
                    return
            self._next_read += 1

    def _write(self, place: Slot, *, keep: bool) -> StorageError | None:
        """Begin to write a bucket; return why that is not possible, a full disk, say."""
        place.keep = keep
        if place.bucket.nbytes == 0:
            place.dirty = False
            place.stored = False
            return None
        try:
            assert place.view is not None
            place.writing = place.bucket.write(self._store, place.view)
        except StorageError as error:
            return error
        self._writing.append(place)
        return None

    def _reap(self, *, wanted: bool = False) -> None:
        """Look at writes that have ended. One that failed leaves its bucket in memory; ``wanted`` raises it."""
        failure: Exception | None = None
        for place in [place for place in self._writing if place.writing and place.writing.done()]:
            assert place.writing is not None
            error = place.writing.exception(0)
            place.writing = None
            self._writing.remove(place)
            if error is not None:
                failure = failure or error
                continue
            self.counters.written_nbytes += place.bucket.nbytes
            place.dirty, place.stored = False, True
            if not place.keep:
                self._take_back(place)
        if failure is not None and wanted:
            raise failure

    def _take_back(self, place: Slot) -> None:
        if place.view is not None:
            if place.bucket.nbytes:
                self._arena.give_back(place.bucket.index)
            place.view = None
            for unit in place.bucket.units:
                unit.forget_views()

    def _await_a_write(self) -> None:
        if self._writing:
            self._await_oldest()
            self._reap(wanted=True)
            return
        raise MemoryError(
            "no place can be had"
        )  # not reached: the arena has room for what is held at once

    def _await_oldest(self) -> None:
        oldest = self._writing[0].writing
        assert oldest is not None
        self._await(oldest)

    def _await(self, moving: Future[Any], *, going_on: bool = False) -> None:
        """Wait; ``going_on`` begins further reads meanwhile, in places that writes leave."""
        if moving.done():
            return
        began = time.perf_counter()
        try:
            while not _ended(moving, _SHORT_SECONDS if going_on else _SLICE_SECONDS):
                if self.interrupted():
                    raise KeyboardInterrupt
                if going_on and self._writing:
                    self._read_ahead()
        finally:
            self.counters.wait_seconds += time.perf_counter() - began


def _ended(moving: Future[Any], within_seconds: float) -> bool:
    try:
        moving.exception(within_seconds)
    except TimeoutError:
        return False
    return True
