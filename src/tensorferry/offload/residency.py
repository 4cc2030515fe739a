"""Buckets in memory: an arena with read-ahead and write-behind.

A bucket is one tensor in a store: the optimizer state of some parameters (``plan.py``), or a slab (``slabs.py``). All
memory for buckets is allocated once, as an *arena*. A read begins only after its bucket has a range in the arena. The
range can be freed when the bucket has no unwritten changes; a bucket that could not be written keeps its range. Reads
get ranges in the order in which buckets will be needed, so the bucket that is needed next always gets a range.

A *sweep* uses buckets one after the other in a given order. It *acquires* each of them, which brings the bucket into
memory and keeps it there, and *releases* it afterwards. A bucket is *dirty* if its bytes in memory have changes that
are not in the store. To *evict* a bucket is to free its range for another one, after writing it if it is dirty.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.offload.arena import Arena, round_to_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.plan import Bucket
    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future

# Memory for buckets that pass through the arena: a quarter of it, but at least 3 of the largest buckets (one is read,
# one is used, one is written) and at most 8, which keep a drive busy. The rest of the arena holds the last buckets of a
# sweep, which stay in memory for the next one.
_MAX_STREAMING = 8
_STREAMING_SHARE = 4

# Intervals of waiting for I/O, in seconds: the time until a check for interrupts, and the time until a check whether
# another read can begin.
_SLICE_SECONDS = 0.5
_SHORT_SECONDS = 0.002


@dataclass(eq=False)
class Slot:
    """A bucket, with its memory (if it has any) and its transfers in flight."""

    bucket: Bucket
    reading: Future[Any] | None = None
    writing: Future[Any] | None = None
    dirty: bool = False  # whether memory has changes that have not been written
    stored: bool = False  # whether the bucket has contents that can be read, in the store or in the user's files
    keep: bool = False  # whether to keep the bucket in memory once it has been written
    held: bool = False  # whether the bucket is acquired and not yet released
    view: torch.Tensor | None = None  # the bucket's bytes in the arena
    failure: Exception | None = None  # why its last write has failed


@dataclass
class BucketCounters:
    """Bytes moved, and seconds spent waiting."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    wait_seconds: float = 0.0


class Residency:
    """Buckets of a store, some of them in memory.

    Parameters
    ----------
    store : TensorStore
        The store for buckets that are not in memory.
    nbytes : int
        Size of the arena.
    all_in_flight : bool
        Reserve space for two versions of all buckets: those of a commit and those of the next one.
    gpu : int
        The index of the GPU to which buckets are copied, or -1. For a GPU, the memory is page-locked and registered
        with CUDA.
    """

    def __init__(
        self, store: TensorStore, nbytes: int, *, all_in_flight: bool = False, gpu: int = -1
    ) -> None:
        self._store = store
        self._all_in_flight = all_in_flight
        self._places: list[Slot] = []
        self._arena = Arena(nbytes)
        self._order: list[int] = []
        self._fresh = False  # whether the sweep fills buckets and reads none
        self._has_new_sizes = False  # whether space is reserved for earlier sizes of buckets
        # Indexes in the order: of the next bucket to be released, of the next one to be read, and of the first one that
        # stays in memory after its release.
        self._position = 0
        self._next_read = 0
        self._kept_from = 0
        self._writing: list[Slot] = []
        self.counters = BucketCounters()
        #: Returns whether a wait for a drive should end now, with KeyboardInterrupt.
        self.interrupted: Callable[[], bool] = bool
        self._gpu = gpu
        self._made: torch.Tensor | None = None

    @property
    def _memory(self) -> torch.Tensor:
        if self._made is None:
            memory, _ = _core.allocate(max(self.nbytes, 1), self._gpu >= 0, self._gpu)
            self._made = torch.utils.dlpack.from_dlpack(memory)
        return self._made

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets without contents, and reserve space for them in the store."""
        reserve(self._store, buckets, self.nbytes, all_in_flight=self._all_in_flight)
        self._places += [Slot(bucket) for bucket in buckets]

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    # A sweep acquires and releases each bucket of an order once.

    def begin(self, order: Sequence[int], *, fresh: bool = False) -> None:
        """Begin a sweep in an order. Its last buckets stay in memory, so the next sweep should begin with them.

        With ``fresh``, buckets will be filled by the caller and are not read.
        """
        if self._has_new_sizes:
            buckets = [slot.bucket for slot in self._places]
            reserve(self._store, buckets, self.nbytes, all_in_flight=self._all_in_flight)
            self._has_new_sizes = False
        self._order, self._fresh = list(order), fresh
        self._position = 0
        self._next_read = 0
        for slot in self._places:
            if slot.reading is None:
                continue
            # The read belongs to an unfinished sweep, and the drive may have failed then. Discard a failure: the bucket
            # is read again when it is needed.
            self._await(slot.reading)
            if slot.reading.exception(0) is not None:
                slot.reading = None
                self._take_back(slot)
        self._kept_from = self._first_kept()
        self._read_ahead()

    def _first_kept(self) -> int:
        """Return the index in the order from which on buckets stay in memory after their release."""
        sizes = [round_to_pages(self._places[index].bucket.nbytes) for index in self._order]
        if sum(round_to_pages(slot.bucket.nbytes) for slot in self._places) <= self.nbytes:
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
        """Return a bucket's bytes in memory; read them if they are stored.

        Raises
        ------
        StorageError
            The bucket cannot be read, or no memory is free because other buckets cannot be written. The caller may
            retry.
        """
        slot = self._places[index]
        if slot.view is None:
            self._read_ahead()
        while slot.view is None:
            if not self._give_place(slot, insist=True):
                self._await_a_write()
        if slot.reading is not None:
            self._await(slot.reading, going_on=True)
            reading, slot.reading = slot.reading, None
            try:
                reading.result(0)
            except BaseException:
                self._take_back(slot)
                raise
            self.counters.read_nbytes += slot.bucket.nbytes
        if slot.writing is not None:
            slot.keep = True
            self._await(slot.writing)
            self._reap()
        assert slot.view is not None
        slot.held = True
        return slot.view

    def release(self, index: int, *, dirty: bool) -> None:
        """End the use of a bucket: keep it in memory near the end of the order, else write it behind if it is dirty."""
        slot = self._places[index]
        slot.held = False
        slot.dirty |= dirty
        if self._position >= self._kept_from:
            pass
        elif slot.dirty:
            # If the write cannot begin, the bucket stays in memory. The next bucket that needs the memory tries again.
            self._write(slot, keep=False)
        else:
            self._take_back(slot)
        self._position += 1
        self._read_ahead()

    def replace(self, index: int, memory: torch.Tensor) -> None:
        """Give an acquired bucket other memory, because its layout and its size have changed.

        If the arena has no free range of the new size, the bucket keeps this memory until it has been written.
        """
        slot = self._places[index]
        self._take_back(slot)
        at = self._arena.take(index, slot.bucket.nbytes) if slot.bucket.nbytes else 0
        slot.view = memory
        if at is not None:
            slot.view = self._memory[at : at + slot.bucket.nbytes].copy_(memory)
        self._has_new_sizes = True

    # Between sweeps

    def bytes_of(self, index: int) -> torch.Tensor | None:
        """Return a bucket's bytes if they are in memory, else None."""
        slot = self._places[index]
        return None if slot.reading is not None else slot.view

    def flush(self) -> None:
        """Write all dirty buckets, which stay in memory, and wait for the writes.

        Raises
        ------
        StorageError
            The first failure; buckets that could not be written are still in memory.
        """
        for slot in self._places:
            if slot.dirty and slot.writing is None:
                self._write(slot, keep=True)
        self.drain()

    def drain(self) -> None:
        """Wait for all writes in flight; raises like :meth:`flush`, also for writes that failed before the call."""
        while self._writing:
            self._await_oldest()
            self._reap()
        self.check()

    def check(self) -> None:
        """Raise the failure of a bucket's last write, if there is one."""
        self._reap()
        for slot in self._places:
            if slot.failure is not None:
                raise slot.failure

    def forget(self) -> None:
        """Delete all buckets, in memory and in the store."""
        self.settle()
        for slot in self._places:
            self._take_back(slot)
            slot.dirty = False
            if slot.stored:
                self._store.delete(slot.bucket.name)
                slot.stored = False
        self._places = []
        self._order = []

    def resize(self, nbytes: int) -> None:
        """Change the size of the arena.

        Raises
        ------
        StorageError
            Buckets in memory cannot be stored; nothing has changed.
        """
        if nbytes == self.nbytes:
            return
        self.flush()
        for slot in self._places:
            self._take_back(slot)
        self._made = None
        self._arena = Arena(nbytes)

    def settle(self) -> None:
        """Wait for all transfers in flight, and ignore their failures."""
        for slot in self._places:
            for moving in (slot.reading, slot.writing):
                if moving is not None:
                    moving.exception()
            if slot.reading is not None:
                slot.reading = None
                self._take_back(slot)
            slot.writing = None
        self._writing = []

    # Memory of buckets

    def _give_place(self, slot: Slot, *, insist: bool) -> bool:
        """Give a bucket memory and begin to read it; return False if no memory is free.

        With ``insist``, other buckets are evicted if necessary.
        """
        nbytes = slot.bucket.nbytes
        at = self._arena.take(slot.bucket.index, nbytes) if nbytes else 0
        if at is None:
            self._reap()
            at = self._arena.take(slot.bucket.index, nbytes)
        while at is None and insist and not self._writing and self._evict():
            self._reap()
            at = self._arena.take(slot.bucket.index, nbytes)
        if at is None:
            return False
        slot.view = self._memory[at : at + nbytes]
        if slot.stored and not self._fresh:
            try:
                slot.reading = slot.bucket.read(self._store, slot.view)
            except BaseException:
                self._take_back(slot)  # the memory does not contain the bucket
                raise
        return True

    def _evict(self) -> bool:
        """Evict the bucket that the rest of the order needs last or not at all; return False if there is none."""
        wanted = {self._order[at]: at for at in range(self._position, len(self._order))}
        last = self._last_wanted(lambda index: wanted.get(index, len(self._order)))
        if last is None:
            return False
        self._next_read = min(self._next_read, wanted.get(last.bucket.index, len(self._order)))
        self._let_go(last)
        return True

    def _last_wanted(self, distance: Callable[[int], float]) -> Slot | None:
        """Return the bucket with the furthest next use among those that may be evicted, or None if none may be."""
        may_go = [
            slot
            for slot in self._places
            if slot.view is not None and slot.writing is None and not slot.held
        ]
        return max(may_go, key=lambda slot: distance(slot.bucket.index), default=None)

    def _let_go(self, last: Slot) -> None:
        """Evict a bucket; a dirty one keeps its memory until it has been written."""
        if last.reading is not None:
            self._await(last.reading)
            last.reading.exception()  # ignore a failure: the next use of the bucket reads it again
            last.reading = None
            self._take_back(last)
        elif last.dirty:
            error = self._write(last, keep=False)
            if error is not None:
                raise error
        else:
            self._take_back(last)

    def _read_ahead(self) -> None:
        """Begin reads, in order, while there is memory for them."""
        if self._fresh:
            return
        self._next_read = max(self._next_read, self._position)
        while self._next_read < len(self._order):
            slot = self._places[self._order[self._next_read]]
            if slot.writing is not None:
                slot.keep = True  # the bucket is needed again soon, and keeping it saves a read
            elif slot.view is None:
                if not slot.stored:
                    return  # nothing to read, but acquire() will need memory for this bucket: leave some free
                if not self._give_place(slot, insist=False):
                    return
            self._next_read += 1

    def _write(self, slot: Slot, *, keep: bool) -> StorageError | None:
        """Begin to write a bucket; return the error if that is impossible, for example on a full disk."""
        slot.keep = keep
        if slot.bucket.nbytes == 0:
            slot.dirty = slot.stored = False
            return None
        try:
            assert slot.view is not None
            slot.writing = slot.bucket.write(self._store, slot.view)
        except StorageError as error:
            slot.failure = error
            return error
        self._writing.append(slot)
        return None

    def _reap(self) -> Exception | None:
        """Process finished writes; a bucket with a failed write stays in memory. Return the first failure."""
        failure: Exception | None = None
        for slot in [slot for slot in self._writing if slot.writing and slot.writing.done()]:
            assert slot.writing is not None
            error = slot.writing.exception(0)
            slot.writing = None
            self._writing.remove(slot)
            slot.failure = error
            if error is not None:
                failure = failure or error
                continue
            self.counters.written_nbytes += slot.bucket.nbytes
            slot.dirty, slot.stored = False, True
            if not slot.keep:
                self._take_back(slot)
        return failure

    def _take_back(self, slot: Slot) -> None:
        """Free a bucket's memory, if it has any; the contents are lost unless they are stored."""
        if slot.view is not None:
            self._arena.give_back(slot.bucket.index)
            slot.view = None
            for unit in slot.bucket.units:
                unit.forget_views()

    def _await_a_write(self) -> None:
        """Wait for the oldest write in flight, to free memory."""
        # A write is in flight, because the caller found neither free memory nor a bucket to evict: the arena has room
        # for all buckets that are acquired at the same time, so buckets that are being written have the rest of it.
        self._await_oldest()
        failure = self._reap()
        if failure is not None:
            raise failure

    def _await_oldest(self) -> None:
        oldest = self._writing[0].writing
        assert oldest is not None
        self._await(oldest)

    def _await(self, moving: Future[Any], *, going_on: bool = False) -> None:
        """Wait for a transfer; with ``going_on``, meanwhile begin reads in memory that finished writes have freed."""
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


def reserve(
    store: TensorStore, buckets: Sequence[Bucket], in_flight_nbytes: int, *, all_in_flight: bool
) -> None:
    """Reserve space in a store for buckets, and for new versions of those that are rewritten at the same time.

    These have ``in_flight_nbytes``; with ``all_in_flight``, all buckets have two versions.
    """
    wanted = {bucket.name: bucket.nbytes for bucket in buckets if bucket.nbytes}
    total = sum(wanted.values())
    in_flight = total if all_in_flight else min(total, in_flight_nbytes) or None
    store.reserve(wanted, in_flight_nbytes=in_flight)


def _ended(moving: Future[Any], within_seconds: float) -> bool:
    try:
        moving.exception(within_seconds)
    except TimeoutError:
        return False
    return True
