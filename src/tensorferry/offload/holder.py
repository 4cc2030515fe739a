"""Items of which some are in memory: read ahead of their use, kept while they are used, and written when they change.

An *item* is a slab of a training (``slabs.py``) or a streamed weight (``streaming.py``). A *group* is the items of one
use. Groups are used in an order that repeats, and the last repetition predicts the next one (:class:`scan.Order`). All
memory is one arena, allocated once. If memory is needed, the item with the furthest next use leaves it (Belady's rule);
an item with changes is written first.

An item is *used* while any other tensor shares its memory: a parameter, a tensor that autograd has saved for the
backward pass, or a view that a module, a hook or a closure keeps. The reference count of the item's storage shows that.
An item that is used stays in memory. So a tensor never reads or changes the bytes of another item, however long it
lives, and there is nothing to release: an item may leave memory when its last tensor is gone.

Signal handlers run in the main thread and may raise between any two lines. A transfer that has begun must be known,
because its memory may not be reused before it ends. Therefore changes of places and transfers are made under ``guard``.
"""

from __future__ import annotations

import contextlib
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
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.offload.scan import Order
    from tensorferry.transfer.futures import Future

# Seconds of waiting for a transfer until the next check for interrupts.
_SLICE_SECONDS = 0.5
# Reads that may always be in flight: the drive has one to begin when another ends.
_MIN_IN_FLIGHT = 2


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
    stored : bool
        Whether the item has contents that can be read.
    dirty : bool
        Whether the memory has changes that are not being written.
    stays : bool
        Whether the item leaves memory only if nothing else can.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.stays = False
        self.forget()

    def forget(self) -> None:
        """Set the state of an item that is not in memory and has no contents."""
        self.stored = self.dirty = False
        self.place: _Place | None = None
        self.moving: Future[Any] | None = None  # its read, or a write
        self.writes = False  # whether `moving` is a write
        self.keep = False  # whether to keep the item in memory once it has been written
        self.is_new = False  # whether it has been read ahead and not used since

    @property
    def is_used(self) -> bool:
        """Whether tensors share the item's memory."""
        return self.place is not None and self.place.is_used

    def read(self, memory: torch.Tensor) -> Future[Any]:
        """Begin to read the item."""
        raise NotImplementedError

    def write(self, memory: torch.Tensor) -> Future[Any]:
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
    unexpected: int = 0  # uses of groups that were not expected


class Holder:
    """Items, some of them in memory. Its methods may be called by any thread.

    Parameters
    ----------
    items : sequence of Item
        All items.
    groups : sequence of sequences of Item
        The items of each use.
    memory : torch.Tensor
        The bytes of the arena.
    order : Order
        The expected order of groups. The items that stay in memory are chosen for it.
    together : sequence of sequences of Item
        Items that must be in memory at the same time.
    guard : callable
        Returns a context manager that defers signals.
    ahead_nbytes : int, optional
        The limit for reads in flight that are not needed yet: a deeper queue would delay the read that is needed first.
    """

    def __init__(
        self,
        items: Sequence[Item],
        groups: Sequence[Sequence[Item]],
        memory: torch.Tensor,
        order: Order,
        together: Sequence[Sequence[Item]],
        *,
        guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        ahead_nbytes: float = math.inf,
    ) -> None:
        self.lock = threading.RLock()
        self.counters = Counters()
        #: Returns whether a wait for a drive should end now, with KeyboardInterrupt.
        self.interrupted: Callable[[], bool] = bool
        self._items, self._groups = items, groups
        self._groups_of: dict[Item, list[int]] = {item: [] for item in items}
        for number, group in enumerate(groups):
            for item in group:
                self._groups_of[item].append(number)
        self._memory, self._arena = memory, Arena(memory.nbytes)
        self._guard = guard
        self._ahead_nbytes = ahead_nbytes
        self._order = order
        self._last: int | None = None  # the last group that was used
        self._frontier = 0  # items of all groups before this position are in memory or being read
        self._moving: list[Item] = []  # in the order in which their transfers began
        self._needed: set[Item] = set()  # the items of the call in progress
        self._orphans: list[_Place] = []  # places that items have left and that are still used
        numbers = {item: number for number, item in enumerate(items)}
        self._nbytes = {number: item.nbytes for item, number in numbers.items()}
        self._in_groups, self._together = (
            [[numbers[item] for item in group] for group in many] for many in (groups, together)
        )
        self.choose()

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    # Uses

    def choose(self) -> None:
        """Choose the items that stay in memory when groups are used in the expected order."""
        steps = [self._in_groups[group] for group in self._order.pass_steps()]
        chosen = scan.kept(steps, self._together, self._nbytes, self.nbytes)
        for number, item in enumerate(self._items):
            if item.stays != (number in chosen):
                item.stays = number in chosen
                self.leave(item)  # it gets memory among its like

    def expect(self, order: Order, *, begin: bool) -> None:
        """Expect the groups of an order, from its beginning or (without ``begin``) from its position."""
        with self.lock:
            self._order = order
            if begin:
                order.begin_pass()
            self._frontier = order.position

    def hold(self, groups: Iterable[int], *, change: bool = False) -> list[torch.Tensor]:
        """Return the bytes of the items of groups; they stay in memory while one of these tensors is referred to.

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
            items: list[Item] = []
            for group in groups:
                if group != self._last and not self._order.used(group):
                    # The order has found another position.
                    self.counters.unexpected += 1
                    self._frontier = self._order.position
                self._last = group
                items += self._groups[group]
            ready = True
            for item in items:
                item.is_new = False
                if item.moving is not None and (change or not item.writes):
                    ready = False
            if not ready or any(item.place is None for item in items):
                with self._guard():
                    held = self._fetch(items, change=change)
            else:
                held = _memories(items)
            self.read_ahead()
            return held

    def _fetch(self, items: Sequence[Item], *, change: bool) -> list[torch.Tensor]:
        self._reap()
        self._needed = set(items)
        begun_ahead = [item for item in items if item.moving is not None and not item.writes]
        for item in items:
            item.keep = True
        try:
            try:
                self._place_all(items)
            except MemoryBudgetError:
                # The free memory may be in ranges that are too short. Collect views that are only in reference cycles,
                # and place the items of this call anew.
                gc.collect()
                for item in items:
                    if item.dirty and not item.moving:
                        self._write(item, keep=False)
                    self._await(item)
                    self.leave(item)
                self._place_all(items)
            self.read_ahead()
            for item in begun_ahead:
                self._await(item, reads_on=True)
            self._place_all(items)  # again where reading ahead has failed: the drive may work now
            for item in items:
                if change or not item.writes:
                    error = self._await(item, reads_on=True)
                    if error is not None and item.place is None:
                        raise error
            return _memories(items)
        finally:
            self._needed = set()

    def _place_all(self, items: Iterable[Item]) -> None:
        for item in items:
            if item.place is None:
                self._put(item)

    def read_ahead(self) -> None:
        """Begin to read the items of the next groups while there is memory for them."""
        with self.lock:
            order = self._order
            self._frontier = max(self._frontier, order.position)
            while self._frontier < order.position + order.length:
                for item in self._groups[order.expected(self._frontier)]:
                    if item.place is not None:
                        item.keep = True  # if it is being written: keeping it saves a read
                        continue
                    # An item without contents gets its memory here, too: later items must not take it.
                    with self._guard():
                        if not self._may_read(item) or not self._put_ahead(item):
                            return
                self._frontier += 1

    def _may_read(self, item: Item) -> bool:
        self._reap()
        reading = [each.nbytes for each in self._moving if not each.writes]
        return len(reading) < _MIN_IN_FLIGHT or sum(reading) + item.nbytes <= self._ahead_nbytes

    def _put_ahead(self, item: Item) -> bool:
        try:
            item.is_new = self._put(item, self._frontier - self._order.position)
            return item.is_new
        except (OSError, MemoryError):
            return False  # the item is not needed yet: hold() tries again, and raises if that fails

    # Places in the arena

    def _put(self, item: Item, ahead: float | None = None) -> bool:
        """Give an item memory, and begin to read it if it is stored.

        For an item that is needed ``ahead`` uses from now, only items that are needed later leave memory, and the
        result is False if none of them can. For an item that is needed now, ``ahead`` is None: any item that is not
        used leaves memory, and this waits for writes.
        """
        place = _Place()
        while (at := self._arena.take(place, item.nbytes, stays=item.stays)) is None:
            last = self._last_wanted()
            if ahead is not None and (last is None or self._distance(last) <= ahead):
                return False
            leaving = sum(each.nbytes for each in self._moving if each.writes and not each.keep)
            if last is not None and not last.dirty:
                self._leave(last)
            elif last is not None and leaving < item.nbytes:
                self._write(last, keep=False)
            elif ahead is not None:
                return False
            else:
                self._await_another(item)
            self._reap()
        place.set_range(self._memory[at : at + item.nbytes])
        item.place = place
        if item.stored:
            try:
                item.moving, item.writes = item.read(place.range), False
                self._moving.append(item)
            except BaseException:
                self._leave(item)  # the memory does not contain the item
                raise
        return True

    def _last_wanted(self) -> Item | None:
        """Return the item with the furthest next use among those that may leave memory, or None if none may."""
        here = [
            item
            for item in self._items
            if item.place is not None and item.moving is None and item not in self._needed
        ]
        here.sort(key=self._distance, reverse=True)
        return next((item for item in here if not item.is_used), None)

    def _distance(self, item: Item) -> float:
        """Return how many uses precede the next use of an item, as far as that is known; -1 if the item stays."""
        if item.stays:
            return -1
        # The first order is only assumed. An item that was read and not used yet may still be needed soon.
        if item.is_new and not self._order.learned:
            return 0
        found = [self._order.distance(group) for group in self._groups_of[item]]
        return min((each for each in found if each is not None), default=math.inf)

    def _leave(self, item: Item) -> None:
        """Free an item's memory; tensors that use it keep it."""
        place, item.place = item.place, None
        if place is None:
            return
        if place.is_used:
            self._orphans.append(place)
        else:
            self._arena.give_back(place)
            item.left()
        # The item must be read again before its next use: move reading ahead back to that use.
        distance = max(min(self._distance(item), self._order.length), 0)
        self._frontier = min(self._frontier, self._order.position + int(distance))

    def leave(self, item: Item) -> None:
        """Free an item's memory, if it has no changes, no transfer is in progress, and no tensor uses it."""
        with self.lock:
            if not (item.dirty or item.moving or item.is_used):
                self._leave(item)

    def has_users(self) -> bool:
        """Return whether tensors use memory of the arena."""
        return bool(self._orphans) or any(item.is_used for item in self._items)

    # Transfers

    def drop(self, item: Item) -> None:
        """Discard the contents of an item without writing them; its next use finds undefined bytes."""
        with self.lock:
            if item.moving is not None or item.place is not None:
                with self._guard():
                    self._await(item)
                    self._leave(item)
            item.dirty = item.stored = False

    def flush(self) -> None:
        """Write all changes, and wait for the writes; items stay in memory.

        Raises
        ------
        StorageError
            The first failure; items that could not be written are still in memory.
        """
        with self.lock, self._guard():
            failures: list[Exception] = []
            for item in self._items:
                if item.dirty:
                    self._await(item)  # a write of an earlier version
                    try:
                        self._write(item, keep=True)
                    except StorageError as error:
                        failures.append(error)
            self._drain(failures)

    def drain(self) -> None:
        """Wait for all transfers in flight; raises like :meth:`flush`."""
        with self.lock, self._guard():
            self._drain([])

    def _drain(self, failures: list[Exception]) -> None:
        while self._moving:
            item = self._moving[0]
            error = self._await(item)
            if error is not None and item.dirty:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for transfers in flight, whatever their outcome, and release the memory."""
        with self.lock, self._guard():
            for item in self._moving:
                if item.moving is not None:
                    item.moving.exception()
            self._moving.clear()
            for item in self._items:
                item.forget()
            self._memory, self._arena = torch.empty(0, dtype=torch.uint8, device="cpu"), Arena(0)

    def _write(self, item: Item, *, keep: bool) -> None:
        """Begin to write an item."""
        assert item.place is not None
        if not item.has_contents():
            item.dirty = item.stored = False
            return
        item.moving, item.writes, item.keep = item.write(item.place.range), True, keep
        self._moving.append(item)
        item.dirty = False

    def _reap(self) -> None:
        """Process transfers that have ended, and memory that is no longer used."""
        for item in list(self._moving):
            if item.moving is not None and item.moving.done() and item not in self._needed:
                self._end(item)
        for place in [each for each in self._orphans if not each.is_used]:
            self._orphans.remove(place)
            self._arena.give_back(place)

    def _end(self, item: Item) -> Exception | None:
        """Process the end of a transfer, and return its failure."""
        assert item.moving is not None
        error: Any = item.moving.exception(0)
        item.moving = None
        self._moving.remove(item)
        if not item.writes:
            if error is None:
                self.counters.read_nbytes += item.nbytes
            else:
                self._leave(item)
        elif error is not None:
            item.dirty = True
        else:
            self.counters.written_nbytes += item.nbytes
            item.stored = True
            # Through a tensor that is still there the bytes may change again.
            item.dirty |= item.is_used
            if not (item.keep or item.dirty):
                self._leave(item)
        return error  # type: ignore[no-any-return]

    def _await_another(self, item: Item) -> None:
        """Wait for a transfer of another item, after which there may be memory for ``item``."""
        other = next((each for each in self._moving if each not in self._needed), None)
        if other is None:
            used = sum(each.nbytes for each in self._items if each.is_used)
            raise MemoryBudgetError(
                f"memory_budget: {self.nbytes} bytes are too few, or too fragmented, for what is needed at the same "
                f"time: {item.nbytes} bytes are needed, and {used} bytes are used by modules that run, or by views of "
                "parameters that modules, hooks or closures keep",
                2 * (used + item.nbytes),
            )
        error = self._await(other)
        if error is not None and other.dirty:
            raise error

    def _await(self, item: Item, *, reads_on: bool = False) -> Exception | None:
        """Wait for the end of an item's transfer, if one is in progress, and return its failure."""
        moving = item.moving
        if moving is None:
            return None
        if not moving.done():
            self.counters.waits += 1
            began = time.perf_counter()
            try:
                while not _ended(moving, _SLICE_SECONDS):
                    if self.interrupted():
                        raise KeyboardInterrupt
                    if reads_on:
                        self.read_ahead()
            finally:
                self.counters.wait_seconds += time.perf_counter() - began
        return self._end(item) if item.moving is moving else None


class Together:
    """Several transfers with the interface of one future."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Return whether all transfers have ended."""
        return all(each.done() for each in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the first failure, as a future does."""
        failures = [each.exception(timeout) for each in self._futures]
        return next((failure for failure in failures if failure is not None), None)

    def cancel(self) -> None:
        """Cancel the transfers, and discard their outcome."""
        for each in self._futures:
            each._abandon()


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return page-aligned host memory; it is locked for copies to ``device`` if that is a GPU."""
    gpu = (device.index or 0) if device.type == "cuda" else -1
    memory, _ = _core.allocate(max(nbytes, 1), gpu >= 0, gpu)
    return torch.utils.dlpack.from_dlpack(memory)[:nbytes]


def is_shared(memory: torch.Tensor) -> bool:
    """Return whether other tensors share a tensor's memory."""
    storage = memory.untyped_storage()  # this object has a reference, too
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 2


def _memories(items: Iterable[Item]) -> list[torch.Tensor]:
    return [item.place.memory[:] for item in items if item.place is not None]


def _ended(moving: Future[Any], within_seconds: float) -> bool:
    try:
        moving.exception(within_seconds)
    except TimeoutError:
        return False
    return True
