"""Parameters and gradients on drives: their division into slabs, and the slabs in memory.

A slab is one tensor in a store: consecutive parameters that are used by the same modules and are in the same group of
the optimizer. A second slab with the same layout has their gradients. Training uses slabs in an order that repeats in
each step of the training: the forward pass, the backward pass, and the optimizer's step. One such repetition is a
*cycle*, and the last cycle predicts the next one. If memory is needed, the slab with the furthest next use is evicted
(Belady's rule), that is, its memory is freed after a write if it has changed. Slabs are read ahead in the predicted
order. To *hold* a slab is to keep it in memory until it is released.

The division into slabs depends on the model and the optimizer's groups, never on the memory budget.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.plan import Bucket, Field, dense_stride, placed
from tensorferry.offload.residency import Residency, Slot
from tensorferry.offload.scan import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future

# The largest size of a slab with several parameters; a larger parameter has a slab alone. With this size, several slabs
# can be in flight at the same time.
MAX_SLAB_NBYTES = 16 << 20


class Slab(Bucket):
    """Parameters, or their gradients, in one tensor of a store.

    Attributes
    ----------
    fields : dict of parameter to Field
        The parameters and their places in the slab.
    gradients : Slab or None
        The slab of the parameters' gradients. None if the parameters are frozen, or if this is a slab of gradients.
    is_of_gradients : bool
        Whether this is a slab of gradients.
    pending : list of pairs
        In a slab of gradients: functions such as clipping, to be called with the gradients before they are used; each
        with the parameters whose gradients it gets.
    memory, on_device : torch.Tensor or None
        The slab's bytes while it is held, and a copy of them on the GPU if the model computes there.
    lent : torch.Tensor or None
        The same bytes as ``memory``, as a separate storage for the parameters. The storage's reference count shows
        whether other tensors use it.
    written : int
        How many times a forward() has been found to write into parameters.
    holds : int
        The number of uses for which the slab must be in memory now: by modules, the backward pass, the optimizer or a
        caller of :meth:`Training.held`.
    stays : bool
        Whether the slab is always in memory.
    kept : int
        How many of the holds are those of :meth:`Training.held`. They remain when an interrupted pass is cleaned up.
    versions : list of int
        torch's version counters of the parameters (``_version``) at the time when they got their values; changed
        counters show that a forward() has written into parameters.
    version : int
        Grows whenever the optimizer or a caller of :meth:`Training.held` changes the parameters. A tensor that autograd
        saved at another version cannot be used any more.
    """

    def __init__(
        self, index: int, fields: dict[torch.Tensor, Field], nbytes: int, kind: str
    ) -> None:
        super().__init__(index, nbytes)
        self._name = f"{kind}-{index:06d}"
        self.is_of_gradients = kind == "gradients"
        self.fields = fields
        self.gradients: Slab | None = None
        self.pending: list[tuple[Callable[[list[torch.Tensor]], object], set[torch.Tensor]]] = []
        self.memory: torch.Tensor | None = None
        self.on_device: torch.Tensor | None = None
        self.lent: torch.Tensor | None = None
        self.written = 0
        self.holds = 0
        self.stays = False
        self.kept = 0
        self.version = 0
        self.versions: list[int] = []
        self.store: TensorStore
        #: Begins to read frozen parameters from the user's files; None if the slab is in the store.
        self.source: Callable[[torch.Tensor], Future[Any]] | None = None

    @property
    def name(self) -> str:
        """The tensor's name in the store."""
        return self._name

    @property
    def here(self) -> torch.Tensor:
        """The slab's bytes on the model's device, while the slab is held."""
        here = self.memory if self.on_device is None else self.on_device
        assert here is not None
        return here

    def read(self, _: TensorStore, memory: torch.Tensor) -> Future[Any]:
        """Begin to read the slab, from its own store (not the argument) or from the user's files."""
        return super().read(self.store, memory) if self.source is None else self.source(memory)

    def write(self, _: TensorStore, memory: torch.Tensor) -> Future[Any]:
        """Begin to write the slab to its own store (not the argument)."""
        return super().write(self.store, memory)


def slabs_of(
    keys: Mapping[torch.Tensor, Any], frozen: Callable[[torch.Tensor], bool]
) -> list[Slab]:
    """Return the slabs of parameters, followed by the slabs of gradients.

    Parameters
    ----------
    keys : mapping of parameters
        Parameters in the order of their use, each with a key; parameters with equal keys may share a slab.
    frozen : callable
        Returns whether a parameter needs no gradient.
    """
    slabs: list[Slab] = []
    last: dict[Any, Slab] = {}
    for param, key in keys.items():
        slab = last.get(key)
        if slab is None or slab.nbytes + param.nbytes > MAX_SLAB_NBYTES:
            slab = last[key] = Slab(len(slabs), {}, 0, "values")
            slabs.append(slab)
        field = Field("", 0, param.dtype, tuple(param.shape), dense_stride(param))
        slab.fields[param] = placed(field, slab)
    for slab in list(slabs):
        if not frozen(next(iter(slab.fields))):
            slab.gradients = Slab(len(slabs), slab.fields, slab.nbytes, "gradients")
            slabs.append(slab.gradients)
    return slabs


class Cycle(Residency):
    """Slabs of which some are in memory, for uses that repeat in the same order.

    Parameters
    ----------
    nbytes : int
        Size of the memory for slabs.
    slabs : sequence of Slab
        All slabs, by index.
    all_in_flight, gpu
        As for :class:`~tensorferry.offload.residency.Residency`.
    """

    def __init__(
        self,
        nbytes: int,
        slabs: Sequence[Slab],
        *,
        all_in_flight: bool = False,
        gpu: int = -1,
    ) -> None:
        super().__init__(slabs[0].store, nbytes, all_in_flight=all_in_flight, gpu=gpu)
        # Read-ahead has handled all expected uses before this position of the order, which counts across cycles.
        self._frontier = 0
        self._orders: dict[str, Order] = {}  # by kind of cycle, such as "forward"; see expect()
        #: The uses of slabs that are expected in the first step of the training.
        self.default = _expected(slabs)
        self.expect("", self.default)
        self._stores = {slab.store for slab in slabs}
        for store in self._stores:
            self._reserve(
                store, [slab for slab in slabs if slab.source is None and slab.store is store]
            )
        self._places = [Slot(slab, stored=slab.source is not None) for slab in slabs]

    def expect(self, kind: str, default: Sequence[int], *, begin: bool = True) -> None:
        """Expect the uses of the last cycle of a kind, or ``default`` before the first one.

        ``kind`` names cycles that use slabs in the same order. Without ``begin``, a cycle of this kind is in progress
        and continues.
        """
        self._cycle = self._orders.setdefault(kind, Order(default))
        if begin:
            self._cycle.begin_pass()
        self._frontier = self._cycle.position

    def hold(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Return the bytes of slabs, which stay in memory until they are released.

        Raises
        ------
        StorageError, MemoryError
            As for :meth:`acquire`.
        """
        places = [self._places[index] for index in indices]
        for place in places:
            # After an unexpected use, read ahead from the position that the order has found for it.
            if not self._cycle.used(place.bucket.index):
                self._frontier = self._cycle.position
        held = [place for place in places if place.held]
        try:
            for place in places:  # begin all reads before waiting for one
                reading = place.reading
                if reading is not None and reading.done() and reading.exception(0) is not None:
                    # The read-ahead failed; read again now, when the drive may work.
                    place.reading = None
                    self._take_back(place)
                place.held = True
                while place.view is None:
                    if not self._give_place(place, insist=True):
                        self._await_a_write()
            self._read_ahead()
            return [self.acquire(place.bucket.index) for place in places]
        except BaseException:
            for place in places:
                place.held = place in held
            raise

    def release(self, index: int, *, dirty: bool) -> None:
        """End the use of a slab, which stays in memory until another slab needs the memory."""
        place = self._places[index]
        place.held = False
        place.dirty |= dirty
        self._read_ahead()

    def close(self) -> None:
        """Wait for transfers in flight, and release the memory."""
        self.settle()
        for place in self._places:
            self._take_back(place)
        self._made = None
        for store in self._stores:
            store.close()

    def mark_dirty(self, index: int) -> None:
        """Mark a held slab as modified."""
        self._places[index].dirty = True

    def drop(self, index: int) -> None:
        """Discard the contents of a slab that is not held, without writing them; its next use finds undefined bytes."""
        place = self._places[index]
        for moving in (place.reading, place.writing):
            if moving is not None:
                self._await(moving)
                moving.exception()
        self._reap()
        place.reading = None
        place.dirty = place.stored = False
        self._take_back(place)

    def _await_a_write(self) -> None:
        if not self._writing:
            needed = 2 * (
                self._arena.taken_nbytes + max(each.bucket.nbytes for each in self._places)
            )
            raise MemoryBudgetError(
                f"memory_budget: {self.nbytes} bytes for parameters and gradients are too few, or too fragmented, for "
                f"those that are needed at the same time: {self._arena.taken_nbytes} bytes are in use",
                needed,
            )
        super()._await_a_write()

    def _evict(self) -> bool:
        last = self._last_wanted(self._distance)
        if last is None:
            return False
        self._let_go(last)
        # The evicted slab must be read again before its next use: move read-ahead back to that use.
        if self._frontier > self._cycle.position:
            next_use = self._cycle.position + self._distance(last.bucket.index)
            self._frontier = int(min(self._frontier, next_use))
        return True

    def _read_ahead(self) -> None:
        cycle = self._cycle
        self._frontier = max(self._frontier, cycle.position)
        while self._frontier < cycle.position + cycle.length:
            place = self._places[cycle.expected(self._frontier)]
            if place.writing is not None:
                place.keep = True  # the slab is needed again soon, and keeping it saves a read
            elif place.view is None and place.stored and not self._find_place(place):
                return
            self._frontier += 1

    def _find_place(self, place: Slot) -> bool:
        """Give a slab memory, and begin to read it ahead.

        For this, evict only slabs that are needed later than the slab itself. Return False if there is no memory for it
        yet; then the write of another slab, which will free memory, may have begun.
        """
        ahead = self._frontier - self._cycle.position
        while True:
            try:
                if self._give_place(place, insist=False):
                    return True
            except (OSError, MemoryError):
                return False  # the slab is not needed yet: hold() tries to read it again, and raises if that fails
            last = self._last_wanted(self._distance)
            if (
                last is None
                or last.reading is not None
                or self._distance(last.bucket.index) <= ahead
            ):
                return False
            # A dirty slab must be written before it is evicted. Do not begin this write if the writes in flight will
            # free enough memory.
            if last.dirty:
                leaving = sum(each.bucket.nbytes for each in self._writing if not each.keep)
                if leaving >= place.bucket.nbytes or self._write(last, keep=False) is not None:
                    return False
            else:
                self._take_back(last)

    def _distance(self, index: int) -> float:
        found = self._cycle.distance(index)
        return math.inf if found is None else found


def _expected(slabs: Sequence[Slab]) -> list[int]:
    """Return the uses that are expected in the first step of the training: forward, backward, optimizer's step."""
    values = [slab for slab in slabs if not slab.is_of_gradients]
    both = [
        [slab.index] if slab.gradients is None else [slab.index, slab.gradients.index]
        for slab in values
    ]
    backward = [index for pair in reversed(both) for index in pair]
    stepped = [index for pair in both if len(pair) > 1 for index in pair]
    return [*(slab.index for slab in values), *backward, *stepped]
