"""Parameters and gradients that are on drives: slabs of them, and which slabs are in memory.

A slab is parameters that the same modules use and the same group of the optimizer has, one after the other; it is one
tensor in a store. Its gradients are a second slab, laid out alike. A training wants slabs in an order that comes again
in every step: those of the forward pass, of the backward pass, and of the optimizer's step. What is in memory is
decided by the last one: a slab goes whose next use is the furthest (Belady's rule), and reads run ahead.

How parameters are put into slabs depends on the model and the optimizer's groups, never on the memory budget.
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

# A slab that has more than one parameter has at most so many bytes: several of them are on their way at a time.
MAX_SLAB_NBYTES = 16 << 20


class Slab(Bucket):
    """Parameters, or their gradients, that are one tensor in a store.

    Attributes
    ----------
    fields : dict of parameter to Field
        The parameters, and where each is.
    gradients : Slab or None
        The slab of their gradients; None where they are frozen, and in a slab of gradients.
    is_of_gradients : bool
        Which of both it is.
    pending : list of callables
        What is to be done with gradients of this slab before they are used: clipping, say.
    memory, on_device : torch.Tensor or None
        Its bytes while it is held, and those of the copy with which the model computes, if that is on a GPU.
    lent : torch.Tensor or None
        The same bytes as parameters have them, so that it can be seen who else keeps these.
    written : int
        How often it has been seen that a forward() has written into parameters.
    holds : int
        How many want it in memory now.
    stays : bool
        Whether it is in memory all the time.
    kept : int
        How many of those that hold it are not a pass that may have been interrupted.
    versions : list of int
        Those that parameters had when they got their values.
    version : int
        How often it has been held by the optimizer's step: what autograd has saved of it is of one version.
    """

    def __init__(
        self, index: int, fields: dict[torch.Tensor, Field], nbytes: int, kind: str
    ) -> None:
        super().__init__(index, nbytes)
        self._name = f"{kind}-{index:06d}"
        self.is_of_gradients = kind == "gradients"
        self.fields = fields
        self.gradients: Slab | None = None
        self.pending: list[Callable[[list[torch.Tensor]], object]] = []
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
        #: Reads frozen parameters from the files that they are in.
        self.source: Callable[[torch.Tensor], Future[Any]] | None = None

    @property
    def name(self) -> str:
        """What its store calls it."""
        return self._name

    @property
    def here(self) -> torch.Tensor:
        """Its bytes where the model computes, while it is held."""
        here = self.memory if self.on_device is None else self.on_device
        assert here is not None
        return here

    def read(self, _: TensorStore, memory: torch.Tensor) -> Future[Any]:
        """Begin to read it, from the store or the files that it has of its own."""
        return super().read(self.store, memory) if self.source is None else self.source(memory)

    def write(self, _: TensorStore, memory: torch.Tensor) -> Future[Any]:
        """Begin to write it."""
        return super().write(self.store, memory)


def slabs_of(
    keys: Mapping[torch.Tensor, Any], frozen: Callable[[torch.Tensor], bool]
) -> list[Slab]:
    """Return parameters' slabs, with those of gradients behind them.

    Parameters
    ----------
    keys : mapping of parameters
        In the order of their use; those with equal keys may share a slab.
    frozen : callable
        Whether a parameter needs no place for a gradient.
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
    """Slabs, some of them in memory, for uses that come again in the same order.

    Parameters
    ----------
    nbytes : int
        Of memory, in all.
    slabs : sequence of Slab
        All of them, by index.
    all_in_flight : bool
        As for :class:`~tensorferry.offload.residency.Residency`.
    gpu : int
        The GPU that slabs are copied to.
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
        self._frontier = 0
        self._orders: dict[str, Order] = {}
        #: The uses of a step of which nothing is known yet.
        self.default = _expected(slabs)
        self.expect("", self.default)
        self._stores = {slab.store for slab in slabs}
        for store in self._stores:
            self._reserve(
                store, [slab for slab in slabs if slab.source is None and slab.store is store]
            )
        self._places = [Slot(slab, stored=slab.source is not None) for slab in slabs]

    def expect(self, kind: str, default: Sequence[int], *, begin: bool = True) -> None:
        """Expect the uses of the last cycle of a kind; ``default`` as long as there was none."""
        self._cycle = self._orders.setdefault(kind, Order(default))
        if begin:
            self._cycle.begin_pass()
        self._frontier = self._cycle.position

    def hold(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Return the bytes of slabs, which stay in memory until they are released.

        Raises
        ------
        StorageError, MemoryError
            As :meth:`acquire`.
        """
        places = [self._places[index] for index in indices]
        for place in places:
            if not self._cycle.used(place.bucket.index):
                self._frontier = self._cycle.position
        held = [place for place in places if place.held]
        try:
            for place in places:  # all are on their way before one is waited for
                reading = place.reading
                if reading is not None and reading.done() and reading.exception(0) is not None:
                    # It was read ahead while the drive failed; another try may succeed.
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
        """Be done with a slab: it stays until its place is wanted."""
        place = self._places[index]
        place.held = False
        place.dirty |= dirty
        self._read_ahead()

    def close(self) -> None:
        """Wait for what is on its way, and give the memory back."""
        self.settle()
        for place in self._places:
            self._take_back(place)
        self._made = None
        for store in self._stores:
            store.close()

    def mark_dirty(self, index: int) -> None:
        """Note that a slab, which is held, has been written into."""
        self._places[index].dirty = True

    def drop(self, index: int) -> None:
        """Forget what is in a slab, which is not held."""
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
                f"memory_budget: {self.nbytes} bytes for parameters and gradients are not enough, or lie in too small "
                f"pieces, for what is wanted at the same time: {self._arena.taken_nbytes} are in use",
                needed,
            )
        super()._await_a_write()

    def _evict(self) -> bool:
        last = self._last_wanted(self._distance)
        if last is None:
            return False
        self._let_go(last)
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
                place.keep = True  # it need not be read again
            elif place.view is None and place.stored and not self._find_place(place):
                return
            self._frontier += 1

    def _find_place(self, place: Slot) -> bool:
        """Begin to read a slab, in the place of such as are wanted later."""
        ahead = self._frontier - self._cycle.position
        while True:
            try:
                if self._give_place(place, insist=False):
                    return True
            except (OSError, MemoryError):
                return False  # it is not needed yet: who needs it is told
            last = self._last_wanted(self._distance)
            if (
                last is None
                or last.reading is not None
                or self._distance(last.bucket.index) <= ahead
            ):
                return False
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
    """Return the uses of a step of which nothing is known yet: forward, backward, and the optimizer's."""
    values = [slab for slab in slabs if not slab.is_of_gradients]
    both = [
        [slab.index] if slab.gradients is None else [slab.index, slab.gradients.index]
        for slab in values
    ]
    backward = [index for pair in reversed(both) for index in pair]
    stepped = [index for pair in both if len(pair) > 1 for index in pair]
    return [*(slab.index for slab in values), *backward, *stepped]
