"""Items of which some are in memory: read ahead of their use, kept while they are used, and written when they change.

An *item* is a bucket of optimizer state (``plan.py``), the slab of a training, or a streamed weight (``slabs.py``).
Items are used in an order that repeats: the last repetition predicts the next one (``scan.py``). All memory is one
arena, allocated once. Some items stay in it. If memory is needed, the other item with the furthest next use leaves
(Belady's rule); one with changes is written first.

An item is *used* while any other tensor shares its memory: a parameter, a tensor that autograd has saved for the
backward pass, or a view that a module, a hook or a closure keeps. The reference count of the item's storage shows that.
An item that is used does not leave memory. So a tensor never reads or changes the bytes of another item, however long
it lives, and there is nothing to release: an item may leave memory when its last tensor is gone. Buckets are different:
only the optimizer's step gets views of them, which says when it has ended.

Signal handlers run in the main thread and may raise between any two lines. A transfer that has begun must be known,
because its memory may not be reused before it ends. Therefore changes of places and transfers are made under ``guard``.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.offload import scan
from tensorferry.offload.arena import Arena
from tensorferry.offload.errors import MemoryBudgetError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future

# Seconds of waiting for a transfer until the next check for interrupts, and until the next check whether another write
# has freed memory for a read.
_SLICE_SECONDS = 0.5
_SHORT_SECONDS = 0.002
# Reads that may always be in flight: the drive has one to begin when another ends.
_MIN_IN_FLIGHT = 2
# The bytes of items that leave memory at the same time, each after a write: at most a half of the arena, because reads
# need memory, too.
_LEAVING_NBYTES = 64 << 20


class _Place:
    """A range of the arena.

    ``range`` is for transfers, which keep a reference to it for some time after they have ended. ``memory`` is for all
    others: the same bytes, as a tensor with a storage of its own.
    """

    range: torch.Tensor
    memory: torch.Tensor

    def set_range(self, memory: torch.Tensor) -> None:
        """Set the bytes of the range."""
        self.range = memory
        self.memory = torch.utils.dlpack.from_dlpack(memory)
        self._storage = self.memory.untyped_storage()
        self._unused = self._references()

    @property
    def is_used(self) -> bool:
        """Whether other tensors share the memory, or other code refers to its storage."""
        return self._references() != self._unused

    def _references(self) -> tuple[int, int]:
        """Return the number of references to the storage, and to the Python object of the storage."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count, sys.getrefcount(self._storage)


class Item:
    """Bytes on a drive that a :class:`Holder` brings into memory.

    Attributes
    ----------
    nbytes : int
        The memory that the item needs.
    number : int
        The index among the items of the holder.
    stored : bool
        Whether the item has contents that can be read.
    dirty : bool
        Whether the memory has changes that are not being written.
    stays : bool
        Whether the item leaves memory only if nothing else can.
    lasts : bool
        Whether the item is used during uses of others. Its memory should not lie between theirs.
    failure : Exception or None
        Why the last write of the changes has failed.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = 0
        self.stored = self.dirty = self.stays = self.lasts = False
        self.failure: Exception | None = None
        self.place: _Place | None = None
        self.moving: Sequence[Future[Any]] = ()  # its read, or a write
        self.writes = False  # whether `moving` is a write
        self.keep = False  # whether to keep the item in memory once it has been written
        self.is_new = False  # whether it has been read ahead and not used since

    @property
    def is_used(self) -> bool:
        """Whether tensors share the item's memory."""
        return self.place is not None and self.place.is_used

    def read(self, memory: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to read the item."""
        raise NotImplementedError

    def write(self, memory: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to write the item."""
        raise NotImplementedError

    def has_contents(self) -> bool:
        """Return whether the item's changes are worth a write."""
        return True

    def left(self) -> None:
        """Prepare the reuse of the memory that the item has just left."""


@dataclass
class Counters:
    """Bytes moved, and time spent waiting."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    unexpected: int = 0  # uses that were not expected


class StoredItem(Item):
    """An item that is a tensor in a store."""

    store: TensorStore
    name: str

    def read(self, memory: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to read the item."""
        return [self.store.read(self.name, memory)]

    def write(self, memory: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to write the item."""
        return [self.store.write(self.name, memory)]


class Holder:
    """Items, some of them in memory. Its methods may be called by any thread.

    Parameters
    ----------
    items : sequence of Item
        All items.
    memory : torch.Tensor
        The bytes of the arena.
    order : Order
        The expected order of uses, by number.
    together : sequence of sequences of Item
        For :meth:`choose`, items that must be in memory at the same time.
    guard : callable
        Returns a context manager that defers signals.
    ahead_nbytes : int, optional
        The limit for reads in flight that are not needed yet: a deeper queue would delay the read that is needed first.
    """

    def __init__(
        self,
        items: Sequence[Item],
        memory: torch.Tensor,
        order: scan.Order,
        together: Sequence[Sequence[Item]] = (),
        *,
        guard: Callable[[], contextlib.AbstractContextManager[Any]],
        ahead_nbytes: float = math.inf,
    ) -> None:
        self.lock = threading.RLock()
        self.counters = Counters()
        #: Returns whether a wait for a drive should end now, with KeyboardInterrupt.
        self.interrupted: Callable[[], bool] = bool
        self._items, self._together = items, together
        for number, item in enumerate(items):
            item.number = number
        self._memory, self._arena = memory, Arena(memory.nbytes)
        self._guard = guard
        self._ahead_nbytes = ahead_nbytes
        self._order = order
        self._last: Item | None = None  # the item that was used last
        self._frontier = 0  # items before this position of the order are in memory or being read
        self._here: list[Item] = []  # those that have memory
        self._moving: list[Item] = []  # in the order in which their transfers began
        self._needed: set[Item] = set()  # the items of the call in progress
        self._orphans: list[_Place] = []  # places that items have left and that are still used
        self._max_leaving_nbytes = min(_LEAVING_NBYTES, self.nbytes // 2)

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    # Uses

    def choose(self) -> None:
        """Choose the items that stay in memory when items are used in the expected order."""
        together = [[item.number for item in items] for items in self._together]
        sizes = [item.nbytes for item in self._items]
        chosen = scan.kept(self._order.pass_steps(), together, sizes, self.nbytes)
        for item in self._items:
            if item.stays != (item.number in chosen):
                item.stays = not item.stays
                self._vacate(item)  # it gets memory among its like

    def expect(self, order: scan.Order, *, begin: bool) -> None:
        """Expect the uses of an order, from its beginning or (without ``begin``) from its position."""
        with self.lock:
            self._order = order
            if begin:
                order.begin_pass()
            self._frontier = order.position

    def hold(self, items: Sequence[Item], *, change: bool = False) -> list[torch.Tensor]:
        """Return the bytes of items, which stay in memory while one of these tensors is referred to.

        An item that is not stored has undefined bytes. With ``change``, the caller will change the bytes: no write of
        them is in progress then.

        Raises
        ------
        StorageError
            An item cannot be read, or no memory is free because other items cannot be written. The caller may retry.
        MemoryBudgetError
            The items do not fit beside those that are used.
        """
        with self.lock:
            ready = True
            for item in items:
                if item is not self._last and not self._order.used(item.number):
                    # The order has found another position.
                    self.counters.unexpected += 1
                    self._frontier = self._order.position
                self._last, item.is_new = item, False
                ready = ready and item.place is not None and not _blocks(item, change=change)
            self._needed = set(items)
            try:
                if not ready:
                    with self._guard():
                        self._fetch(items, change=change)
                held = [item.place.memory[:] for item in items if item.place is not None]
                self.read_ahead()
                return held
            finally:
                self._needed = set()

    def _fetch(self, items: Sequence[Item], *, change: bool) -> None:
        self._reap()
        begun_ahead = [item for item in items if item.moving and not item.writes]
        for item in items:
            item.keep = True
        try:
            self._place_all(items)
        except MemoryBudgetError:
            # The free memory may be in ranges that are too short. Collect views that are only in reference cycles, and
            # place the items of this call anew.
            gc.collect()
            for item in items:
                self._vacate(item)
            self._place_all(items)
        self.read_ahead()
        for item in begun_ahead:
            self._await(item)
        self._place_all(items)  # again where reading ahead has failed: the drive may work now
        for item in items:
            if _blocks(item, change=change):
                error = self._await(item)
                if error is not None and item.place is None:
                    raise error

    def _place_all(self, items: Iterable[Item]) -> None:
        for item in items:
            if item.place is None:
                self._put(item)

    def read_ahead(self) -> None:
        """Begin to read the next items of the order while there is memory for them."""
        with self.lock:
            order = self._order
            self._frontier = max(self._frontier, order.position)
            while self._frontier < order.position + order.length:
                item = self._items[order.expected(self._frontier)]
                if item.place is not None:
                    item.keep = True  # if it is being written: keeping it saves a read
                else:
                    # An item without contents gets its memory here, too: later items must not take it.
                    with self._guard():
                        if not self._put_ahead(item):
                            return
                self._frontier += 1

    def _put_ahead(self, item: Item) -> bool:
        self._reap()
        reading = [each.nbytes for each in self._moving if not each.writes]
        if len(reading) >= _MIN_IN_FLIGHT and sum(reading) + item.nbytes > self._ahead_nbytes:
            return False
        try:
            item.is_new = self._put(item, self._frontier - self._order.position)
        except (OSError, MemoryError):
            return False  # the item is not needed yet: hold() tries again, and raises if that fails
        return item.is_new

    # Places in the arena

    def _put(self, item: Item, ahead: float | None = None) -> bool:
        """Give an item memory, and begin to read it if it is stored.

        For an item that is needed ``ahead`` uses from now, only items that are needed later leave memory, and the
        result is False if none of them can. For an item that is needed now, ``ahead`` is None: any item that is not
        used leaves memory, and this waits for writes.
        """
        place = _Place()
        at_end, tried = item.stays or item.lasts, set()
        while (at := self._arena.take(place, item.nbytes, stays=at_end)) is None:
            last = self._last_wanted()
            if ahead is not None and (last is None or self._distance(last) <= ahead):
                return False
            leaving = sum(each.nbytes for each in self._moving if each.writes and not each.keep)
            if last is not None and not last.dirty:
                self._leave(last)
                continue
            if last is not None and leaving < max(item.nbytes, self._max_leaving_nbytes):
                # A write that has failed may succeed now, but it is repeated only for an item that is needed.
                if last.failure is not None and (ahead is not None or last in tried):
                    raise last.failure
                tried.add(last)
                self._write(last, keep=False)
            elif ahead is not None:
                return False
            else:
                self._await_another(item)
            self._reap()
        item.place = self._set_range(place, at, item.nbytes)
        self._here.append(item)
        if item.stored:
            try:
                item.moving, item.writes = item.read(place.range), False
                self._moving.append(item)
            except BaseException:
                self._leave(item)  # the memory does not contain the item
                raise
        return True

    def _set_range(self, place: _Place, at: int, nbytes: int) -> _Place:
        place.set_range(self._memory[at : at + nbytes])
        return place

    def replace(self, item: Item, memory: torch.Tensor) -> None:
        """Give an item other memory, because its size has changed.

        If the arena has no free range of the new size, the item keeps this memory until it has been written.
        """
        self._leave(item)
        place = _Place()
        at = self._arena.take(place, memory.nbytes)
        if at is None:
            place.set_range(memory)
        else:
            self._set_range(place, at, memory.nbytes).range.copy_(memory)
        item.place = place
        self._here.append(item)

    def _last_wanted(self) -> Item | None:
        """Return the item with the furthest next use among those that may leave memory, or None if none may."""
        may_leave = [each for each in self._here if not each.moving and each not in self._needed]
        may_leave.sort(key=self._distance, reverse=True)
        return next((item for item in may_leave if not item.is_used), None)

    def _distance(self, item: Item) -> float:
        """Return how many uses precede the next use of an item, as far as that is known; -1 if the item stays."""
        if item.stays:
            return -1
        # The first order is only assumed. An item that was read and not used yet may still be needed soon.
        if item.is_new and not self._order.learned:
            return 0
        found = self._order.distance(item.number)
        return math.inf if found is None else found

    def _leave(self, item: Item) -> None:
        """Free an item's memory; tensors that use it keep it."""
        place, is_used, item.place = item.place, item.is_used, None
        if place is None:
            return
        self._here.remove(item)
        if is_used:
            self._orphans.append(place)
        else:
            self._arena.give_back(place)
            item.left()
        # The item must be read again before its next use: move reading ahead back to that use.
        distance = max(min(self._distance(item), self._order.length), 0)
        self._frontier = min(self._frontier, self._order.position + int(distance))

    def _vacate(self, item: Item) -> None:
        """Have an item leave its memory, after a write of its changes, unless it is used."""
        self._await(item)
        if item.dirty:
            self._write(item, keep=False)
            self._await(item)
        if not (item.dirty or item.is_used):
            self._leave(item)

    # Transfers

    def drop(self, item: Item) -> None:
        """Discard the contents of an item without writing them; its next use finds undefined bytes."""
        with self.lock:
            if item.place is not None:
                with self._guard():
                    self._await(item)
                    self._leave(item)
            item.dirty = item.stored = False
            item.failure = None

    def flush(self) -> None:
        """Write all changes, and wait for the writes; items stay in memory.

        Raises
        ------
        StorageError
            The first failure; items that could not be written are still in memory.
        """
        with self.lock, self._guard():
            for item in self._items:
                if item.dirty:
                    self._await(item)  # a write of an earlier version
                    try:
                        self._write(item, keep=True)
                    except StorageError as error:
                        item.failure = error
            self.drain()

    def drain(self) -> None:
        """Wait for all transfers in flight; raises like :meth:`flush`, also for writes that failed before the call."""
        with self.lock, self._guard():
            while self._moving:
                self._await(self._moving[0])
            self.check()

    def check(self) -> None:
        """Raise the failure of a write, if there is one."""
        with self.lock, self._guard():
            self._reap()
            for item in self._items:
                if item.failure is not None:
                    raise item.failure

    def settle(self) -> bool:
        """Wait for transfers in flight, whatever their outcome; return whether tensors use memory of the arena."""
        with self.lock, self._guard():
            for item in list(self._moving):
                self._await(item)
            return bool(self._orphans) or any(item.is_used for item in self._items)

    def _write(self, item: Item, *, keep: bool) -> None:
        """Begin to write an item."""
        assert item.place is not None
        if item.has_contents():
            item.moving, item.writes, item.keep = item.write(item.place.range), True, keep
            self._moving.append(item)
        else:
            item.stored, item.failure = False, None
        item.dirty = False

    def _reap(self) -> None:
        """Process transfers that have ended, and memory that is no longer used."""
        for item in list(self._moving):
            if item not in self._needed and _is_done(item):
                self._end(item)
        for place in [each for each in self._orphans if not each.is_used]:
            self._orphans.remove(place)
            self._arena.give_back(place)

    def _end(self, item: Item) -> Exception | None:
        """Process the end of a transfer, and return its failure."""
        errors: list[Any] = [each.exception(0) for each in item.moving]
        error: Exception | None = next((each for each in errors if each is not None), None)
        item.moving = ()
        self._moving.remove(item)
        if not item.writes:
            if error is None:
                self.counters.read_nbytes += item.nbytes
            else:
                self._leave(item)
        elif error is not None:
            item.dirty, item.failure = True, error
        else:
            item.failure = None
            self.counters.written_nbytes += item.nbytes
            item.stored = True
            # Through a tensor that is still there the bytes may change again.
            item.dirty |= item.is_used
            if not (item.keep or item.dirty):
                self._leave(item)
        return error

    def _await_another(self, item: Item) -> None:
        """Wait for a transfer of another item, after which there may be memory for ``item``."""
        other = next((each for each in self._moving if each not in self._needed), None)
        if other is None:
            used = sum(each.nbytes for each in self._items if each.is_used)
            raise MemoryBudgetError(
                f"memory_budget: {self.nbytes} bytes are too few, or too fragmented: {item.nbytes} are needed, and "
                f"{used} are used by modules that run, or by views that modules, hooks or closures keep",
                2 * (used + item.nbytes),
            )
        error = self._await(other)
        if error is not None and other.dirty:
            raise error

    def _await(self, item: Item) -> Exception | None:
        """Wait for the end of an item's transfer, if one is in progress, and return its failure."""
        moving = item.moving
        if not moving:
            return None
        began = None if _is_done(item) else time.perf_counter()
        try:
            for each in moving:
                waits = item in self._needed and any(other.writes for other in self._moving)
                while not _ended(each, _SHORT_SECONDS if waits else _SLICE_SECONDS):
                    if self.interrupted():
                        raise KeyboardInterrupt
                    if waits and any(map(_has_written, self._moving)):
                        self.read_ahead()
        finally:
            if began is not None:
                self.counters.waits += 1
                self.counters.wait_seconds += time.perf_counter() - began
        return self._end(item) if item.moving is moving else None


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return page-aligned host memory; it is locked for copies to ``device`` if that is a GPU."""
    gpu = (device.index or 0) if device.type == "cuda" else -1
    memory, _ = _core.allocate(max(nbytes, 1), gpu >= 0, gpu)
    return torch.utils.dlpack.from_dlpack(memory)[:nbytes]


def is_shared(memory: torch.Tensor, *, but: int = 0) -> bool:
    """Return whether more than ``but`` other tensors share a tensor's memory."""
    storage = memory.untyped_storage()  # this object has a reference, too
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 2 + but


def _blocks(item: Item, *, change: bool) -> bool:
    """Return whether a transfer must end before the item's bytes are read, or with ``change``, changed."""
    return bool(item.moving) and (change or not item.writes)


def reserve(
    store: TensorStore,
    items: Iterable[StoredItem],
    in_flight_nbytes: int,
    *,
    all_in_flight: bool,
) -> None:
    """Reserve space in a store for items, and for new versions of those that are rewritten at the same time.

    These have ``in_flight_nbytes``; with ``all_in_flight``, all items have two versions.
    """
    wanted = {item.name: item.nbytes for item in items if item.nbytes}
    total = sum(wanted.values())
    in_flight = total if all_in_flight else min(total, in_flight_nbytes) or None
    store.reserve(wanted, in_flight_nbytes=in_flight)


def _is_done(item: Item) -> bool:
    return all(each.done() for each in item.moving)


def _has_written(item: Item) -> bool:
    return item.writes and _is_done(item)


def _ended(moving: Future[Any], within_seconds: float) -> bool:
    try:
        moving.exception(within_seconds)
    except TimeoutError:
        return False
    return True
