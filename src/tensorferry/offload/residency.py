"""Which buckets are in memory: a few slots, reads as far ahead as they allow, writes behind.

All memory that buckets ever use is allocated once, as slots. A bucket is read only with a slot in hand; a slot is free
again when its bucket is clean, or has been written. What failed to be written keeps its slot. Slots are given to reads
in the order in which buckets are wanted, so that the next one always gets one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from tensorferry import _core
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.futures import Future
    from tensorferry.offload.plan import Bucket, Slots
    from tensorferry.store import TensorStore

_MAX_STREAMING = 8

# How long one waits for I/O before looking whether somebody wants to interrupt, in seconds.
_SLICE_SECONDS = 0.5
_SHORT_SECONDS = 0.002  # and before looking whether more can be begun


@dataclass(eq=False)
class _Place:
    """Where a bucket is."""

    bucket: Bucket
    slot: torch.Tensor | None = None
    reading: Future[Any] | None = None
    writing: Future[Any] | None = None
    dirty: bool = False
    stored: bool = False
    keep: bool = False  # when written
    held: bool = False  # acquired, and not released
    view: torch.Tensor | None = None  # of the slot, as long as the bucket


@dataclass
class Counters:
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
    slots : Slots
        How many there are, and their size; a count of 0 gives each bucket memory of its own.
    all_in_flight : bool
        Two versions of everything must have space: that of a commit, and those of the next one.
    gpu : int
        The GPU that buckets are copied to: then slots are page-locked and registered with CUDA.
    """

    def __init__(
        self, store: TensorStore, slots: Slots, *, all_in_flight: bool = False, gpu: int = -1
    ) -> None:
        self._store = store
        self._gpu = gpu
        self._slots = slots
        self._all_in_flight = all_in_flight
        self._places: list[_Place] = []
        self._free: list[torch.Tensor] = []
        self._order: list[int] = []
        self._position = 0
        self._next_read = 0
        self._kept_from = 0
        self._writing: list[_Place] = []
        self.counters = Counters()
        self.interrupted: Callable[[], bool] = bool
        if slots.count:
            memory = self._allocate(slots.count * slots.nbytes)
            self._free = list(memory.view(slots.count, slots.nbytes).unbind())

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Know further buckets, which are nowhere yet; reserves their space."""
        wanted = {bucket.name: bucket.nbytes for bucket in buckets if bucket.nbytes}
        total = sum(wanted.values())
        in_flight = (
            total
            if self._all_in_flight
            else min(total, self._slots.count * self._slots.nbytes) or None
        )
        self._store.reserve(wanted, in_flight_nbytes=in_flight)
        self._places += [_Place(bucket) for bucket in buckets]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in slots."""
        if self._slots.count:
            return self._slots.count * self._slots.nbytes
        return sum(place.slot.nbytes for place in self._places if place.slot is not None)

    @property
    def holds_all(self) -> bool:
        """Whether each bucket has memory of its own."""
        return not self._slots.count

    # A sweep: buckets in an order, each acquired and released once

    def begin(self, order: Sequence[int]) -> None:
        """Begin with buckets in an order: the last ones stay in memory, so the next order should begin with these."""
        self._order = list(order)
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
        # A few on their way each way keep a drive busy; the others are worth more with what need not be moved.
        streaming = min(max(3, self._slots.count // 4), _MAX_STREAMING)
        self._kept_from = len(self._order) - max(self._slots.count - streaming, 0)
        if len(self._places) <= self._slots.count or not self._slots.count:
            self._kept_from = 0
        self._read_ahead()

    def acquire(self, index: int, *, fresh: bool = False) -> torch.Tensor:
        """Return a bucket's bytes in memory, read if it has been stored and is not ``fresh``.

        Raises
        ------
        StorageError
            It cannot be read, or no slot can be had since others cannot be written. Another try may succeed.
        """
        place = self._places[index]
        if place.slot is None:
            self._read_ahead()
        while place.slot is None:
            if not self._give_slot(place, fresh=fresh):
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
            # Where it cannot begin the bucket stays here; who needs its slot tries again.
            self._write(place, keep=False)
        else:
            self._take_back(place)
        self._position += 1
        self._read_ahead()

    # Between sweeps

    def slot_of(self, index: int) -> torch.Tensor | None:
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

    def confine(self, slots: Slots) -> None:
        """Have slots from now on, where every bucket had memory of its own.

        Raises
        ------
        StorageError
            What is in memory cannot be stored; nothing has changed.
        """
        self.flush()
        for place in self._places:
            self._take_back(place)
        self._slots = slots
        memory = self._allocate(slots.count * slots.nbytes)
        self._free = list(memory.view(slots.count, slots.nbytes).unbind())

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

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory, _ = _core.allocate(nbytes, self._gpu >= 0, self._gpu)
        return torch.utils.dlpack.from_dlpack(memory)

    def _give_slot(self, place: _Place, *, fresh: bool) -> bool:
        """Give a bucket a slot, if there is a free one, and begin to read it."""
        slot = self._free_slot(place)
        if slot is None:
            return False
        place.slot = slot
        place.view = slot[: place.bucket.nbytes]
        if place.stored and not fresh:
            try:
                place.reading = self._store.read(place.bucket.name, place.view)
            except BaseException:
                self._take_back(place)  # it has nothing of the bucket's
                raise
        return True

    def _free_slot(self, place: _Place) -> torch.Tensor | None:
        if not self._slots.count:
            return self._allocate(max(place.bucket.nbytes, 1))
        if not self._free:
            self._reap()
        if not self._free and not self._writing:
            self._evict()
        return self._free.pop() if self._free else None

    def _evict(self) -> None:
        """Let go of the bucket in memory that the rest of the order wants last, or not at all."""
        wanted = {self._order[at]: at for at in range(self._position, len(self._order))}
        current = self._order[self._position] if self._position < len(self._order) else None
        last: _Place | None = None
        last_at = -1
        for place in self._places:
            index = place.bucket.index
            at = wanted.get(index, len(self._order))
            may_go = place.slot is not None and place.writing is None and not place.held
            if may_go and index != current and at > last_at:
                last, last_at = place, at
        if last is None:
            return
        self._next_read = min(self._next_read, last_at)
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
        """Begin reads, in order, as far as slots are free."""
        self._next_read = max(self._next_read, self._position)
        while self._next_read < len(self._order):
            place = self._places[self._order[self._next_read]]
            if place.writing is not None:
                place.keep = True  # it need not be read again
            elif place.slot is None:
                if not place.stored:
                    return  # it needs a slot, and nothing after it may take that one
                if not self._free:
                    self._reap()
                if not self._free or not self._give_slot(place, fresh=False):
                    return
            self._next_read += 1

    def _write(self, place: _Place, *, keep: bool) -> StorageError | None:
        """Begin to write a bucket; return why that is not possible, a full disk, say."""
        place.keep = keep
        if place.bucket.nbytes == 0:
            place.dirty = False
            place.stored = False
            return None
        try:
            place.writing = self._store.write(place.bucket.name, place.view)
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

    def _take_back(self, place: _Place) -> None:
        if place.slot is not None and self._slots.count:
            self._free.append(place.slot)
        if place.slot is not None:
            place.slot = place.view = None
            place.bucket.forget_views()

    def _await_a_write(self) -> None:
        if self._writing:
            self._await_oldest()
            self._reap(wanted=True)
            return
        raise MemoryError("no slot can be had")  # not reached: a sweep holds one slot at a time

    def _await_oldest(self) -> None:
        oldest = self._writing[0].writing
        assert oldest is not None
        self._await(oldest)

    def _await(self, moving: Future[Any], *, going_on: bool = False) -> None:
        """Wait; ``going_on`` begins further reads meanwhile, in slots that writes leave."""
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
