"""The state of an offloaded optimizer on drives: buckets pass through a fixed amount of memory in each step.

A *bucket* is one tensor in the store, with the state of some *units*, which are parameters or pieces of large ones
(``plan.py``). The :class:`~tensorferry.offload.residency.Residency` reads buckets ahead of their use and writes stepped
ones behind. If a GPU does the arithmetic, :class:`~tensorferry.offload.staging.Staging` copies them to it and back.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.plan import (
    MIN_BUCKETS,
    PAGE_NBYTES,
    by_param,
    check_budget,
    check_storable,
)
from tensorferry.offload.residency import Residency
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
    from tensorferry.offload.residency import BucketCounters
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
        self._residency = Residency(
            store,
            0,
            all_in_flight=all_in_flight,
            gpu=-1 if device is None or device.type != "cuda" else device.index or 0,
        )
        self._residency.interrupted = interrupted
        self.add(buckets)

    @property
    def nbytes(self) -> int:
        """The memory for buckets, in bytes."""
        return self._residency.nbytes

    @property
    def is_outgrown(self) -> bool:
        """Whether a step has created state that changed the sizes of buckets."""
        return [bucket.nbytes for bucket in self.buckets] != self._sizes

    @property
    def counters(self) -> BucketCounters:
        """Bytes moved, and seconds spent waiting."""
        return self._residency.counters

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets of further parameters, and reserve space for them.

        Raises
        ------
        StorageError
            There is no space for them; nothing has changed.
        """
        everything = [*self.buckets, *buckets]
        self._fit(everything)
        self._residency.add(buckets)
        self.buckets = everything

    # Steps

    def order(self, sweep: Sweep) -> list[int]:
        """Return the buckets of a sweep in their order.

        The direction alternates from step to step: the last buckets of a step are still in memory, and the next step
        begins with them.
        """
        order = [
            bucket.index
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
                for index in left:
                    bring(self.buckets[index])
                    self._step_bucket(self.buckets[index], sweep, counters)
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
        memory = self._residency.acquire(bucket.index)
        here = memory if self._staging is None else self._staging.load(memory)
        there = self._stepped(bucket, here, sweep, counters)
        sweep.broken = False
        sweep.done += 1
        sweep.note_gradients(unit.param for unit in bucket.units)
        if there is not here or self._staging is None:
            self._release_staged()
            if there is not here:
                self._residency.replace(bucket.index, there.to("cpu"))
            self._residency.release(bucket.index, dirty=True)
            return
        self._staging.store(bucket.index, here, memory)
        self._release_staged(but=1)

    def _release_staged(self, *, but: int = 0) -> None:
        for index in self._staging.stored(but=but) if self._staging is not None else ():
            self._residency.release(index, dirty=True)

    def _stepped(
        self, bucket: Bucket, memory: torch.Tensor, sweep: Sweep, counters: list[torch.Tensor]
    ) -> torch.Tensor:
        """Step the units of a bucket, with its bytes in ``memory``; return its memory, other memory if it has grown."""
        loans = []
        try:
            for unit in bucket.units:
                if sweep.involves(unit.param):
                    grad = sweep.lent_gradient(unit.param)
                    master = None if unit.master is None else unit.view(unit.master, memory)
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
        memory = self._residency.bytes_of(bucket.index)
        if memory is None:
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
            self._residency.drain()
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
        self._begin([bucket.index for bucket in buckets])
        for bucket in buckets:
            states = {unit: state or None for unit in bucket.units if unit.param is param}
            self._put(bucket, states, dirty=True)

    def fill(self, states: Callable[[torch.Tensor], Any]) -> None:
        """Set the state of each parameter to what ``states`` returns for it; None stands for no state."""
        self._begin([bucket.index for bucket in self.buckets], fresh=True)
        last: tuple[Any, Any] = (None, None)  # pieces of a parameter follow each other
        for bucket in self.buckets:
            wanted = {}
            for unit in bucket.units:
                if last[0] is not unit.param:
                    last = unit.param, states(unit.param) or None
                wanted[unit] = last[1]
            self._put(bucket, wanted, dirty=any(wanted.values()))

    def _put(
        self, bucket: Bucket, states: dict[Unit, dict[Any, Any] | None], *, dirty: bool
    ) -> None:
        memory = self._residency.acquire(bucket.index)
        try:
            there = put_states(
                bucket, memory, {unit: share_of(unit, state) for unit, state in states.items()}
            )
            for unit, state in states.items():
                put_master(unit, state, there)
            if there is not memory:
                self._residency.replace(bucket.index, there)
        finally:
            self._residency.release(bucket.index, dirty=dirty)

    def load(self, saved: Saved) -> None:
        """Load the buckets of a checkpoint or commit, whose layout the buckets here have.

        Raises
        ------
        StorageError
            A bucket is unreadable or damaged.
        """
        self._begin([bucket.index for bucket in self.buckets], fresh=True)
        for bucket in self.buckets:
            saved.read(bucket, self._residency.acquire(bucket.index))
            self._residency.release(bucket.index, dirty=True)

    def flush(self) -> None:
        """Write all state to the store, and wait for the writes.

        Raises
        ------
        StorageError
            A write failed; its bucket is still in memory.
        """
        self._residency.flush()

    def drain(self) -> None:
        """Wait for the writes in flight; raises like :meth:`flush`."""
        self._residency.drain()

    def check(self) -> None:
        """Raise the error of a write that has failed in the meantime."""
        self._residency.check()

    def close(self, *, delete: bool = False) -> None:
        """Wait for transfers in flight, and release the memory; with ``delete``, also the space in the store."""
        if delete:
            self._residency.forget()
        else:
            self._residency.settle()
        for bucket in self.buckets:
            for unit in bucket.units:
                unit.forget_views()

    def _begin(self, order: Sequence[int], *, fresh: bool = False) -> None:
        self._fit(self.buckets)
        self._residency.begin(order, fresh=fresh)

    def _fit(self, buckets: Sequence[Bucket]) -> None:
        """Adapt the memory to the sizes of buckets, which steps may change.

        Raises
        ------
        MemoryBudgetError
            A bucket has become larger than the budget.
        """
        sizes = [bucket.nbytes for bucket in buckets]
        if sizes == self._sizes:
            return
        check_budget(self._budget_nbytes, buckets, self._at_once, usual=False)
        total = sum(map(round_to_pages, sizes))
        self._residency.resize(min(self._budget_nbytes // PAGE_NBYTES * PAGE_NBYTES, total))
        if self._device is not None and sizes:
            self._staging = Staging(self._device, max(sizes))
        self._sizes = sizes
