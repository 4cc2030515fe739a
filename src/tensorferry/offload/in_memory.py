"""The state of an offloaded optimizer while all of it fits in the memory budget.

A step is one call of the optimizer, as without offloading. The state is in the store only after :meth:`flush`, in the
same buckets as state on drives (``plan.py``), so that another run may have another budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from tensorferry.offload.holder import Counters, reserve
from tensorferry.offload.plan import MASTER, by_param, check_storable, local_of
from tensorferry.offload.saved import finish_writes
from tensorferry.offload.states import (
    like_param,
    owned,
    put_master,
    put_states,
    share_of,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.offload.loans import Lender
    from tensorferry.offload.plan import Bucket
    from tensorferry.offload.saved import Saved
    from tensorferry.offload.sweep import Sweep
    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future


class StateInMemory:
    """State in memory; the methods are those of :class:`~tensorferry.offload.on_drives.StateOnDrives`."""

    steps_by_buckets = False

    def __init__(
        self,
        store: TensorStore,
        buckets: Sequence[Bucket],
        lender: Lender,
        *,
        memory_budget_nbytes: int,
        all_in_flight: bool,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.counters = Counters()
        self._store = store
        self._lender = lender
        self._budget_nbytes = memory_budget_nbytes
        self._all_in_flight = all_in_flight
        self._nbytes = 0  # of the state that there is
        self._count = 0  # of its values when they were counted last
        self._states: dict[torch.Tensor, dict[Any, Any]] = {}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self.add(buckets)

    @property
    def nbytes(self) -> int:
        """The memory for state, in bytes."""
        return max(self._nbytes, sum(bucket.nbytes for bucket in self.buckets))

    @property
    def is_outgrown(self) -> bool:
        """Whether a step has created state that exceeds the budget."""
        return self._nbytes > self._budget_nbytes

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets of further parameters, and reserve space for them."""
        reserve(self._store, buckets, 0, all_in_flight=self._all_in_flight)
        self.buckets += buckets

    def order(self, _: Sweep) -> list[Bucket]:
        """Return the buckets of a sweep: none, because one call steps all parameters."""
        return []

    def step(self, sweep: Sweep, bring: Callable[[Bucket], None]) -> None:  # noqa: ARG002
        """Call the sweep's method for all parameters."""
        loans = {}
        try:
            for param in filter(sweep.involves, sweep.group_of):
                grad, known = sweep.lent_gradient(param), param in self._masters
                master = self._master(param)
                loans[param] = grad, self._lender.lend(param, grad, master=master, known=known)
                if master is not None:
                    self._masters[param] = master
            state = sweep.call(
                (param, loan.target, self._states.get(param)) for param, (_, loan) in loans.items()
            )
            for param, (_, loan) in loans.items():
                loan.settle(self._masters.get(param))
                self._set(param, state.get(loan.target))
            sweep.broken = False
            self._measure()
        finally:
            for param, (grad, loan) in loans.items():
                self._lender.take_back(param, grad, loan)

    def _measure(self) -> None:
        """Count the bytes of the state, if it has got or lost values."""
        count = sum(map(len, self._states.values())) + len(self._masters)
        if count != self._count:
            self._count = count
            leaves = _pytree.tree_leaves([*self._states.values(), *self._masters.values()])
            self._nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _master(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's master, or memory for a new one; None if the parameter needs none."""
        dtype = self._lender.step_dtype(param)
        if dtype == param.dtype or param in self._masters:
            return self._masters.get(param)
        device = self._lender.step_device(param)
        return torch.empty_like(local_of(param).detach(), dtype=dtype, device=device)

    def _set(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        if state:
            self._states[param] = state
        else:
            self._states.pop(param, None)

    def names(self) -> dict[torch.Tensor, list[Any]]:
        """Return the parameters that have state, with the names of its values."""
        states = {param: list(self._whole(param)) for param in by_param(self.buckets)}
        return {param: names for param, names in states.items() if names}

    def _whole(self, param: torch.Tensor) -> dict[Any, Any]:
        state, master = self._states.get(param, {}), self._masters.get(param)
        return state if master is None else {**state, MASTER: master}

    def read(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return a copy of a parameter's state, with its master."""
        local = local_of(param)
        copied: dict[Any, Any] = _pytree.tree_map(
            lambda leaf: like_param(owned(leaf), param, local), self._whole(param)
        )
        return copied

    def write(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Replace a parameter's state; None or an empty one deletes it."""
        check_storable(state)
        self._masters.pop(param, None)
        state = dict(state or {})
        if state:
            master = self._master(param)
            if master is not None:
                master.copy_(local_of(state.pop(MASTER, param.detach())))
                self._masters[param] = master
        self._set(param, _pytree.tree_map(owned, state))

    def fill(self, states: Callable[[torch.Tensor], Any]) -> None:
        """Set the state of each parameter to what ``states`` returns for it; None stands for no state."""
        for param in by_param(self.buckets):
            self.write(param, states(param))

    def load(self, saved: Saved) -> None:
        """Load the buckets of a checkpoint or commit, whose layout the buckets here have."""
        for param, pieces in by_param(self.buckets).items():
            self.write(param, state_of(pieces, saved.bucket))

    def flush(self) -> None:
        """Write all state to the store, and wait for the writes.

        Raises
        ------
        StorageError
            A write failed.
        """
        finish_writes(self._write_buckets())

    def _write_buckets(self) -> Iterator[Future[Any]]:
        for bucket in self.buckets:
            states = {unit: self._whole(unit.param) for unit in bucket.units}
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
            memory = put_states(
                bucket, memory, {unit: share_of(unit, state) for unit, state in states.items()}
            )
            for unit, state in states.items():
                put_master(unit, state or None, memory)
            if bucket.nbytes and any(states.values()):
                write = self._store.write(bucket.name, memory)
                self.counters.written_nbytes += bucket.nbytes
                yield write

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's bytes from the store, after :meth:`flush`."""
        memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
        if bucket.nbytes:
            self._store.read(bucket.name, memory).result()
        return memory

    def note_time(self, seconds: float, waited_seconds: float) -> None:
        """Do nothing: the step does not wait for drives."""

    def check(self) -> None:
        """Do nothing: there are no writes in flight."""

    def drain(self) -> None:
        """Do nothing: there are no writes in flight."""

    def close(self, *, delete: bool = False) -> None:
        """Release the memory; with ``delete``, also the space in the store."""
        self._states.clear()
        self._masters.clear()
        for bucket in self.buckets if delete else ():
            if bucket.name in self._store:
                self._store.delete(bucket.name)
