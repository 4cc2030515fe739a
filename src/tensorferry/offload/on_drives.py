"""The state of an offloaded optimizer on drives: buckets pass through a fixed amount of memory in each step.

A *bucket* is one tensor in the store, with the state of some *units*, which are parameters or pieces of large ones
(``plan.py``). The :class:`~tensorferry.offload.holder.Holder` reads buckets ahead of their use and writes stepped ones
behind. If a GPU does the arithmetic, :class:`~tensorferry.offload.staging.Staging` copies them to it and back.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.holder import Counters, Holder, allocate, reserve
from tensorferry.offload.plan import (
    MIN_BUCKETS,
    PAGE_NBYTES,
    by_param,
    check_budget,
    check_storable,
)
from tensorferry.offload.scan import Order
from tensorferry.offload.staging import Staging
from tensorferry.offload.states import (
    names_of_states,
    put_master,
    put_states,
    share_of,
    state_in,
    state_of,
)
from tensorferry.offload.threads import StepThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.loans import Lender
    from tensorferry.offload.plan import Bucket, Unit
    from tensorferry.offload.saved import Saved
    from tensorferry.offload.sweep import Sweep
    from tensorferry.store import TensorStore

# The most tensors of single numbers in the state of a parameter that are allocated before the state is made.
_COUNTERS = 3


class StateOnDrives:
    """State on drives.

    Parameters
    ----------
    store : TensorStore
        The store for buckets.
    buckets : sequence of Bucket
        All buckets, by index.
    lender : Lender
        Lends parameters to the optimizer.
    memory_budget_nbytes : int
        Bytes of memory for buckets.
    device : torch.device or None
        The device to which buckets are copied for a step; None: none.
    all_in_flight : bool
        Whether two versions of all buckets need space: those of a commit and those of the next one.
    few_threads : bool
        Whether the number of threads does not change the result of a step.
    interrupted : callable
        Returns whether a wait for a drive should end now, with KeyboardInterrupt.
    """

    steps_by_buckets = True

    def __init__(
        self,
        store: TensorStore,
        buckets: Sequence[Bucket],
        lender: Lender,
        *,
        memory_budget_nbytes: int,
        device: torch.device | None,
        all_in_flight: bool,
        few_threads: bool,
        interrupted: Callable[[], bool],
    ) -> None:
        self.buckets: list[Bucket] = []
        self._store = store
        self._lender = lender
        self._budget_nbytes = memory_budget_nbytes
        self._device = device
        self._few_threads = few_threads
        self._threads = StepThreads()
        self._is_backwards = False
        self._staging: Staging | None = None
        self._sizes: list[int] = []
        # With a device, three buckets must fit: one is copied to it, one is stepped there, and one is copied back.
        self._at_once = 1 if device is None else MIN_BUCKETS
        self._all_in_flight = all_in_flight
        self._interrupted = interrupted
        #: Bytes moved, and seconds spent waiting.
        self.counters = Counters()
        self._holder: Holder | None = None
        self.add(buckets)

    @property
    def nbytes(self) -> int:
        """The memory for buckets, in bytes."""
        return self._holding.nbytes

    @property
    def _holding(self) -> Holder:
        assert self._holder is not None
        return self._holder

    @property
    def is_outgrown(self) -> bool:
        """Whether a step has created state that changed the sizes of buckets."""
        return [bucket.nbytes for bucket in self.buckets] != self._sizes

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets of further parameters, and reserve space for them.

        Raises
        ------
        StorageError
            There is no space for them; nothing has changed.
        """
        for bucket in buckets:
            bucket.store = self._store
        self._fit([*self.buckets, *buckets])

    # Steps

    def order(self, sweep: Sweep) -> list[Bucket]:
        """Return the buckets of a sweep in their order.

        The direction alternates from step to step: the last buckets of a step are still in memory, and the next step
        begins with them.
        """
        order = [
            bucket
            for bucket in self.buckets
            if any(sweep.involves(unit.param) for unit in bucket.units)
        ]
        return order[::-1] if self._is_backwards else order

    def step(self, sweep: Sweep, bring: Callable[[Bucket], None]) -> None:
        """Call the sweep's method for its remaining buckets.

        ``bring`` is called before each bucket, and brings the bucket's parameters and gradients into memory.

        Raises
        ------
        StorageError, MemoryBudgetError
            A bucket cannot be read, or is too large since its last step; the rest can be stepped later.
        """
        if not sweep.done:
            sweep.note_gradients(sweep.group_of)
        left = sweep.order[sweep.done :]
        self._begin(left)
        new = [unit for bucket in self.buckets for unit in bucket.units if unit.leaves is None]
        counters = [torch.zeros((), device="cpu") for _ in range(_COUNTERS * len(new))]
        numel = max((unit.numel for bucket in self.buckets for unit in bucket.units), default=0)
        with self._threads.limited(numel) if self._few_threads else contextlib.nullcontext():
            try:
                for bucket in left:
                    bring(bucket)
                    self._step_bucket(bucket, sweep, counters)
            finally:
                self._release_staged()
            # If no parameter has a gradient, call the optimizer nevertheless: it may count the step in its groups.
            if not sweep.order:
                sweep.call(())
        sweep.broken = False
        self._is_backwards = not self._is_backwards

    def note_time(self, seconds: float, waited_seconds: float) -> None:
        """Record how long a step took and how much of that it waited for drives."""
        self._threads.note(seconds, waited_seconds)

    def _step_bucket(self, bucket: Bucket, sweep: Sweep, counters: list[torch.Tensor]) -> None:
        memory = self._hold(bucket)
        here = memory if self._staging is None else self._staging.load(memory)
        there = self._stepped(bucket, here, sweep, counters)
        sweep.broken = False
        sweep.done += 1
        sweep.note_gradients(unit.param for unit in bucket.units)
        if there is not here or self._staging is None:
            self._release_staged()
            self._release(bucket, None if there is here else there.to("cpu"))
            return
        self._staging.store(bucket, here, memory)
        self._release_staged(but=1)

    def _release_staged(self, *, but: int = 0) -> None:
        for bucket in self._staging.stored(but=but) if self._staging is not None else ():
            self._release(bucket)

    def _hold(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's bytes in memory, where they stay until :meth:`_release`."""
        [memory] = self._holding.hold([bucket], change=True)
        bucket.is_held = True
        return memory

    def _release(self, bucket: Bucket, grown: torch.Tensor | None = None) -> None:
        """End the use of a bucket, which has changed; ``grown`` is its memory if its layout has changed."""
        bucket.is_held = False
        if grown is not None:
            self._holding.replace(bucket, grown)
        bucket.dirty = True

    def _stepped(
        self, bucket: Bucket, memory: torch.Tensor, sweep: Sweep, counters: list[torch.Tensor]
    ) -> torch.Tensor:
        """Step the units of a bucket, with its bytes in ``memory``; return its memory, other memory if it has grown."""
        loans = []
        try:
            for unit in bucket.units:
                if sweep.involves(unit.param):
                    grad = sweep.lent_gradient(unit.param)
                    master = None if unit.master is None else unit.master.view(memory)
                    loan = self._lender.lend(
                        unit.param, grad, unit=unit, master=master, known=unit.has_master
                    )
                    loans.append((unit, grad, loan, master))
            states = sweep.call(
                (unit.param, loan.target, None if unit.leaves is None else state_in(unit, memory))
                for unit, _, loan, _ in loans
            )
            for unit, _, loan, master in loans:
                loan.settle(master)
                unit.has_master = master is not None
            new = {unit: states.get(loan.target) for unit, _, loan, _ in loans}
            return put_states(bucket, memory, new, counters)
        finally:
            for unit, grad, loan, _ in loans:
                self._lender.take_back(unit.param, grad, loan)

    # State

    def names(self) -> dict[torch.Tensor, list[Any]]:
        """Return the parameters that have state, with the names of its values."""
        return names_of_states(self.buckets)

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's bytes, in memory or read from the store."""
        if bucket.place is not None and (bucket.writes or not bucket.moving):
            return bucket.place.memory
        memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
        if bucket.nbytes:
            self._store.read(bucket.name, memory).result()
        return memory

    def read(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return a copy of a parameter's state, with its master."""
        return state_of(by_param(self.buckets)[param], self.bucket)

    def write(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Replace a parameter's state; None or an empty one deletes it.

        Raises
        ------
        TypeError
            The state has a tensor that cannot be stored; nothing has changed.
        """
        check_storable(state)
        buckets = [bucket for bucket, _ in by_param(self.buckets)[param]]
        self._begin(buckets)
        for bucket in buckets:
            states = {unit: state or None for unit in bucket.units if unit.param is param}
            self._put(bucket, states)

    def fill(self, states: Callable[[torch.Tensor], Any]) -> None:
        """Set the state of each parameter to what ``states`` returns for it; None stands for no state."""
        self._begin(self.buckets)
        last: tuple[Any, Any] = (None, None)  # pieces of a parameter follow each other
        for bucket in self.buckets:
            wanted = {}
            for unit in bucket.units:
                if last[0] is not unit.param:
                    last = unit.param, states(unit.param) or None
                wanted[unit] = last[1]
            if any(wanted.values()):
                self._put(bucket, wanted)

    def _put(self, bucket: Bucket, states: dict[Unit, dict[Any, Any] | None]) -> None:
        memory = there = self._hold(bucket)
        try:
            shares = {unit: share_of(unit, state) for unit, state in states.items()}
            there = put_states(bucket, memory, shares)
            for unit, state in states.items():
                put_master(unit, state, there)
        finally:
            self._release(bucket, None if there is memory else there)

    def load(self, saved: Saved) -> None:
        """Load the buckets of a checkpoint or commit, whose layout the buckets here have.

        Raises
        ------
        StorageError
            A bucket is unreadable or damaged.
        """
        self._begin(self.buckets)
        for bucket in self.buckets:
            saved.read(bucket, self._hold(bucket))
            self._release(bucket)

    def flush(self) -> None:
        """Write all state to the store, and wait for the writes.

        Raises
        ------
        StorageError
            A write failed; its bucket is still in memory.
        """
        self._holding.flush()

    def drain(self) -> None:
        """Wait for the writes in flight; raises like :meth:`flush`."""
        self._holding.drain()

    def check(self) -> None:
        """Raise the error of a write that has failed in the meantime."""
        self._holding.check()

    def close(self, *, delete: bool = False) -> None:
        """Wait for transfers in flight, and release the memory; with ``delete``, also the space in the store."""
        self._holding.settle()
        self._holder = None
        for bucket in self.buckets:
            bucket.place, bucket.failure = None, None
            bucket.stored = bucket.dirty = bucket.is_held = False
            if delete and bucket.name in self._store:
                self._store.delete(bucket.name)

    def _begin(self, order: Sequence[Bucket]) -> None:
        """Begin to use buckets in an order, and after that in the opposite one."""
        self._fit(self.buckets)
        numbers = [bucket.number for bucket in order]
        self._holding.expect(Order([*numbers, *reversed(numbers)]), begin=False)

    def _fit(self, buckets: list[Bucket]) -> None:
        """Adapt memory and space to buckets and their sizes, which steps may change.

        Raises
        ------
        MemoryBudgetError, StorageError
            A bucket has become larger than the budget, or the disk is full; nothing has changed.
        """
        sizes = [bucket.nbytes for bucket in buckets]
        if sizes == self._sizes and self._holder is not None:
            return
        check_budget(self._budget_nbytes, buckets, self._at_once, usual=False)
        total = sum(map(round_to_pages, sizes))
        nbytes = min(self._budget_nbytes // PAGE_NBYTES * PAGE_NBYTES, total)
        reserve(self._store, buckets, nbytes, all_in_flight=self._all_in_flight)
        if self._holder is not None:
            self._holder.flush()
        for bucket in self.buckets:
            bucket.place = None
        self._holder = None  # free its memory before the new one is allocated
        memory = allocate(nbytes, self._device or torch.device("cpu"))
        self._holder = Holder(buckets, memory, Order(()), guard=contextlib.nullcontext)
        self._holder.counters, self._holder.interrupted = self.counters, self._interrupted
        if self._device is not None and sizes:
            self._staging = Staging(self._device, max(sizes))
        self.buckets, self._sizes = buckets, sizes
