"""An optimizer whose state is on drives: any of torch's, stepped bucket by bucket, with the result it has in memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.offload import probe as probing
from tensorferry.offload.errors import MemoryBudgetError, NotSeparableError, OffloadError
from tensorferry.offload.interrupts import Interrupts
from tensorferry.offload.plan import (
    MIN_SLOTS,
    UNCUT_NBYTES,
    Bucket,
    Planner,
    Slots,
    Unit,
    check_params,
    choose_slots,
)
from tensorferry.offload.probe import local_of
from tensorferry.offload.residency import Residency
from tensorferry.offload.saved import Saved, to_record
from tensorferry.offload.staging import Staging
from tensorferry.offload.states import (
    MASTER,
    Copied,
    Located,
    Mapped,
    StateView,
    cast_like_torch,
    checked_state,
    put_state,
    state_of,
)
from tensorferry.offload.stepping import Step, note_param, set_param
from tensorferry.offload.threads import StepThreads
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.transfers import Path

# Below, steps are too short for anybody to mind.
_WORTH_TELLING_NBYTES = 64 << 20

Commit: TypeAlias = Literal["none", "step", "fsync"]
StepDevice: TypeAlias = Literal["param", "cpu"]


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on drives; made by :func:`offload_optimizer`.

    It is a ``torch.optim.Optimizer``: schedulers, ``GradScaler``, clipping, hooks and closures take it as it is, and
    ``param_groups`` are those of the optimizer it was made of. It has the same state, too, by :attr:`state` and
    :meth:`state_dict`, as copies.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: TensorStore,
        memory_budget_nbytes: int,
        *,
        master_dtype: torch.dtype | None = None,
        commit: Commit = "none",
        earlier: Saved | None = None,
        endurance_nbytes: int | None = None,
        step_device: StepDevice = "param",
    ) -> None:
        self._inner = optimizer
        self._store = store
        self._budget_nbytes = memory_budget_nbytes
        self._lock = threading.RLock()
        self._generation = _core.fork_generation()
        self._interrupts = Interrupts()
        self._planner = Planner(
            probing.Probe(optimizer, on_host=step_device == "cpu"),
            master_dtype=master_dtype,
            with_params=commit != "none",
        )
        self._step_device = step_device
        self._staging: Staging | None = None
        self._stepped: list[int] = []
        self._threads = StepThreads()
        self._commit = commit
        self._endurance_nbytes = endurance_nbytes
        self._committed = True  # whether the last whole step is
        self._earlier = earlier  # what was committed here before
        self._warned = False
        self._buckets: list[Bucket] = []
        self._slots = Slots(0, 0)
        self._residency: Residency | None = None
        self._sweep: _Sweep | None = None
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0
        self._incomplete = False  # a load has failed half way
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._install(*self._planned_for(self.param_groups))
        # One list and one set of hooks: what was registered before is called once a step.
        optimizer.param_groups = self.param_groups
        for name in probing.HOOKS:
            if hasattr(optimizer, name):  # the same: handles of hooks must be able to remove them
                setattr(self, name, getattr(optimizer, name))
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            self._step_supports_amp_scaling = optimizer._step_supports_amp_scaling
        self._fill(self._state_before)
        optimizer.state = defaultdict(dict)

    # Stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients. What it changes is written behind, while training goes on.

        Ctrl-C is heard when the step is whole; a second one ends the wait for a drive that does not answer.

        Raises
        ------
        OffloadError
            Something could not be read or written: :meth:`retry` goes on.
        TypeError, ValueError
            A gradient is sparse, or a parameter has another size than when it was added.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._locked():
            residency = self._usable()
            if self._sweep is not None:
                raise self._half_done("a step before it failed")
            if self._earlier is not None:
                raise RuntimeError(
                    f"step {self._earlier.steps} is committed in these directories, and a step would replace it: call "
                    "resume() to go on from it, or discard_committed()"
                )
            scaling = {
                name: getattr(self, name)
                for name in ("grad_scale", "found_inf")
                if getattr(self, name, None) is not None
            }
            if "found_inf" in scaling and scaling["found_inf"].item():
                return loss
            order = self._order()
            try:
                with self._interrupts.deferred():
                    residency.check()
            except StorageError as error:
                raise self._not_stored() from error
            step = Step(self._inner, self.param_groups, scaling, on_host=self._step_device == "cpu")
            self._go_on(residency, _Sweep(order[::-1] if self._steps % 2 else order, step))
            self._commit_step(residency)
            self._warn_of_drive()
        return loss

    def retry(self) -> None:
        """Go on where a failure stopped: finish the step that is half done, and write what could not be written.

        Gradients must be as they were.

        Raises
        ------
        OffloadError
            It failed again.
        """
        with self._locked():
            residency = self._usable()
            with contextlib.suppress(StorageError), self._interrupts.deferred():
                residency.drain()  # what has failed since is tried again here
            if self._sweep is not None:
                if self._sweep.broken:
                    raise self._half_done("the optimizer raised in the middle of it")
                self._go_on(residency, self._sweep)
            self._flush(residency)
            self._commit_step(residency)

    @property
    def steps(self) -> int:
        """How many steps are whole."""
        return self._steps

    def stats(self) -> dict[str, Any]:
        """Return what steps have cost so far.

        Returns
        -------
        dict
            ``steps``, ``step_seconds`` (in all), ``wait_seconds`` (of these, waiting for drives), ``drive_share`` (the
            ratio of both), ``endurance_share`` (of the drive's endurance, written by this optimizer; None if not told),
            ``read_nbytes`` and ``written_nbytes``, ``state_nbytes`` (all state that is swapped),
            ``memory_nbytes`` (in slots), ``buckets``, and the ``store``'s own.
        """
        with self._locked():
            residency = self._usable()
            moved = residency.counters
            return {
                "steps": self._steps,
                "step_seconds": self._seconds,
                "wait_seconds": self._waited_seconds,
                "drive_share": self._waited_seconds / self._seconds if self._seconds else 0.0,
                "endurance_share": moved.written_nbytes / self._endurance_nbytes
                if self._endurance_nbytes
                else None,
                "read_nbytes": moved.read_nbytes,
                "written_nbytes": moved.written_nbytes,
                "state_nbytes": sum(bucket.nbytes for bucket in self._buckets),
                "memory_nbytes": residency.nbytes,
                "buckets": len(self._buckets),
                "store": self._store.stats(),
            }

    def _order(self) -> list[int]:
        """Return the buckets that a step concerns, or refuse it before anything has changed."""
        with_gradient = set()
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    if self._planner.steps_all:
                        raise ValueError(
                            f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} has no gradient, and "
                            f"{type(self._inner).__name__} steps it all the same; give it one of zeros"
                        )
                    continue
                if param.grad.is_sparse:
                    raise TypeError(
                        f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} has a sparse gradient; "
                        "offloaded optimizers step dense ones (remedy: sparse=False in nn.Embedding)"
                    )
                planned = self._planned.get(param)
                now = number, param.shape, param.dtype, param.stride()
                if planned != now:
                    names = ("group", "shape", "dtype", "strides")
                    was = "not in param_groups" if planned is None else _described(names, planned)
                    raise ValueError(
                        f"param_groups[{number}]: a parameter has changed: {_described(names, now)}; it was {was} when "
                        "it was added; make a new optimizer, or add_param_group()"
                    )
                with_gradient.add(param)
        if sum(len(group["params"]) for group in self.param_groups) != len(self._planned):
            raise ValueError(
                "param_groups: parameters have been taken away; make a new optimizer without them"
            )
        self._check_values()
        return [
            bucket.index
            for bucket in self._buckets
            if any(unit.param in with_gradient for unit in bucket.units)
        ]

    def _check_values(self) -> None:
        """Refuse groups with values that the state was not planned for."""
        for number, group in enumerate(self.param_groups):
            pattern = probing.pattern(group)
            params = [param for param in group["params"] if param in self._index]
            if self._patterns.get(number) == pattern or not params:
                continue
            units = [self._located.units[self._index[param]][0][1] for param in params]
            exact, well = self._planner.agrees({**group, "params": params}, units)
            before = dict(self._patterns.get(number, ()))
            changed = ", ".join(key for key, value in pattern if before.get(key) != value)
            if not exact:
                raise ValueError(
                    f"param_groups[{number}]: {changed} has changed, and parameters can be cut no more; "
                    "load_state_dict(state_dict()) lays their state out anew"
                )
            if not well:
                warnings.warn(
                    f"param_groups[{number}]: {changed} has changed, and with it which state there is. What is new "
                    "stays in memory, beside the memory_budget, until load_state_dict(state_dict()) lays it out anew",
                    RuntimeWarning,
                    stacklevel=5,  # beyond what torch puts around step()
                )
            self._patterns[number] = pattern

    def _go_on(self, residency: Residency, sweep: _Sweep) -> None:
        """Step the buckets that are left."""
        with self._interrupts.deferred(), self._timed(residency):
            self._sweep = sweep
            try:
                residency.begin(sweep.order[sweep.done :])
                with self._threads.limited() if self._by_elements else contextlib.nullcontext():
                    for portion in self._portions(residency, sweep.order[sweep.done :]):
                        parts = [(self._buckets[at], residency.acquire(at)) for at in portion]
                        sweep.broken = True
                        self._run(sweep.step, parts, lasting=residency.holds_all)
                        sweep.broken = False
                        sweep.done += len(portion)
                        self._release(residency, 1)
                self._release(residency, 0)
            except StorageError as error:
                self._release(residency, 0)
                raise self._half_done(str(error)) from error
            except BaseException:
                self._release(residency, 0)
                if sweep.done == 0 and not sweep.broken:
                    self._sweep = None  # nothing has changed
                raise
            sweep.broken = True
            sweep.step.run_rest()
            sweep.step.finish()
            self._sweep = None
            self._steps += 1
            self._committed = False

    @contextlib.contextmanager
    def _timed(self, residency: Residency) -> Iterator[None]:
        """Count the time as a step's, and the share of it that is spent waiting."""
        began, waited = time.perf_counter(), residency.counters.wait_seconds
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            waited = residency.counters.wait_seconds - waited
            self._threads.note(seconds, waited)
            self._seconds += seconds
            self._waited_seconds += waited

    def _portions(self, residency: Residency, order: list[int]) -> list[list[int]]:
        """Return which buckets are stepped by one call: more than one only if that takes no more memory."""
        if (
            residency.holds_all
            and self._stepped_in_place
            and all(group.get("fused") for group in self.param_groups)
            and all(
                unit.born or unit.param.grad is None
                for index in order
                for unit in self._buckets[index].units
            )
        ):
            return [sorted(order)] if order else []
        return [[index] for index in order]

    def _run(self, step: Step, parts: list[tuple[Bucket, torch.Tensor]], *, lasting: bool) -> None:
        """Step buckets: in their slots, or on the parameters' device."""
        if self._staging is None:
            step.run(parts, lasting=lasting)
            self._stepped = [bucket.index for bucket, _ in parts]
            return
        for bucket, memory in parts:
            here = self._staging.load(memory)
            step.run([(bucket, here)])
            self._staging.store(bucket.index, here, memory)

    def _release(self, residency: Residency, on_their_way: int) -> None:
        """Release what has been stepped and is in its slot; some may still be on their way to theirs."""
        if self._staging is not None:
            stepped = self._staging.stored(but=on_their_way)
        else:
            stepped, self._stepped = iter(self._stepped), []
        for index in stepped:
            residency.release(index, dirty=True)

    # Checkpoints

    def checkpoint(self, path: Path | Sequence[Path]) -> None:
        """Keep the state as it is now in a new directory, for :meth:`restore`; parameters are not in it.

        On the file system of the state that takes no copy: its files are linked there, and the next steps write to
        others, whose space is reserved here. It is durable when this returns, and verified when it is read. Where
        ``torch.distributed`` is in use, each rank has a directory of its own in it.

        Parameters
        ----------
        path : path, or a list of paths
            It must not exist. With several directories: one, or one on the file system of each of them.

        Raises
        ------
        OffloadError
            A step is half done, or state could not be stored.
        StorageError
            It exists, there is no space, or something cannot be written; nothing has the name.
        ValueError
            A group has a value that cannot be saved.
        """
        with self._locked():
            residency = self._readable()
            record = self._record()
            self._flush(residency)
            self._store.snapshot(of_this_rank(path), record)

    def restore(self, path: Path | Sequence[Path]) -> int:
        """Have the state, and the groups' values, of a :meth:`checkpoint`; parameters stay as they are.

        Every byte is verified. The memory budget, and with it how the state is cut, may be another.

        Returns
        -------
        int
            How many steps had been done.

        Raises
        ------
        ValueError
            It is of other parameters, or of another optimizer; nothing has changed.
        StorageError
            It is not there, cannot be read or is damaged. If that shows late, the state is not usable before another
            restore() or load_state_dict().
        """
        with self._locked():
            self._usable(loading=True)
            paths = of_this_rank(path)
            store = TensorStore.open(paths)
            try:
                return self._load(Saved(store, paths[0]), with_params=False)
            finally:
                store.close()

    @property
    def committed_step(self) -> int | None:
        """The step that an earlier run has committed in these directories, for :meth:`resume`; None if none."""
        return None if self._earlier is None else self._earlier.steps

    def resume(self) -> int | None:
        """Go on from what an earlier run has committed: parameters, state and groups' values are those of that step.

        Returns
        -------
        int or None
            The step; None, and nothing has changed, where nothing was committed, or ``commit`` is "none" here.

        Raises
        ------
        ValueError
            It is of other parameters, or of another optimizer; nothing has changed.
        StorageError
            It cannot be read, or is damaged; it is still there.
        """
        with self._locked():
            self._usable(loading=True)
            if self._earlier is None:
                return None
            steps = self._load(self._earlier, with_params=True)
            self.discard_committed()
            return steps

    def discard_committed(self) -> None:
        """Do without what an earlier run has committed: the next commit replaces it."""
        with self._locked():
            earlier, self._earlier = self._earlier, None
            if earlier is not None:
                earlier.close()

    def _record(self) -> bytes:
        params = list(self._index)  # as they were when they were added, whatever their order is now
        groups = []
        for group in self.param_groups:
            indices = [self._index[param] for param in group["params"]]
            groups.append({**probing.values_of(group), "params": indices})
        return to_record(self._steps, type(self._inner).__name__, groups, params, self._buckets)

    def _commit_step(self, residency: Residency) -> None:
        if self._commit == "none" or self._committed:
            return
        self._note_unstepped(residency)
        self._flush(residency)
        try:
            self._store.commit(self._record(), sync=self._commit == "fsync")
        except StorageError as error:
            raise OffloadError(
                f"step {self._steps} is whole, but could not be committed; retry() tries it again",
                step=self._steps,
                finished=True,
            ) from error
        self._committed = True

    def _note_unstepped(self, residency: Residency) -> None:
        """Have parameters that have not been stepped yet in their buckets, once."""
        buckets = [
            bucket
            for bucket in self._buckets
            if any(not (unit.own or unit.noted) for unit in bucket.units)
        ]
        if not buckets:
            return
        try:
            with self._interrupts.deferred():
                residency.begin([bucket.index for bucket in buckets])
                for bucket in buckets:
                    memory = residency.acquire(bucket.index)
                    for unit in bucket.units:
                        if not unit.own:
                            note_param(unit, memory)
                            unit.noted = True
                    residency.release(bucket.index, dirty=True)
        except StorageError as error:
            raise self._not_stored() from error

    def _load(self, saved: Saved, *, with_params: bool) -> int:
        saved.check_groups(self.param_groups)
        twin = probing.twin_of(self._inner, list(self.param_groups))
        twin.load_state_dict({"state": {}, "param_groups": saved.groups})
        saved.check_values(twin)
        slots, buckets = self._planned_for(twin.param_groups)
        params = [param for group in twin.param_groups for param in group["params"]]
        saved.check(params, buckets)
        self.param_groups = self._inner.param_groups = twin.param_groups
        self._sweep = None
        self._install(slots, buckets)

        def fill(unit: Unit, memory: torch.Tensor) -> bool:
            filled = saved.fill(unit, memory, self._device_of_step(unit.param))
            if filled and with_params:
                set_param(unit, memory)
            return filled

        self._fill_by(fill)
        self._steps = saved.steps
        return saved.steps

    def _warn_of_drive(self) -> None:
        if self._warned or self._steps < 5 or not self._slots.count:
            return
        total = sum(bucket.nbytes for bucket in self._buckets)
        if total < _WORTH_TELLING_NBYTES:
            return
        share = self._waited_seconds / max(self._seconds, 1e-9)
        if share > 0.5:
            self._warned = True
            warnings.warn(
                f"{share:.0%} of the optimizer's steps are spent waiting for the drive: {self._budget_nbytes} of "
                f"{total} bytes of state fit the memory_budget. Each byte more is one that is not moved; with {total} "
                "nothing is",
                RuntimeWarning,
                stacklevel=4,
            )

    # State

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The state by parameter, as copies; ``state[param]`` reads one parameter's."""
        return StateView(self._params_with_state, self._state_of_one, self._mapped_state)

    @state.setter
    def state(self, value: Any) -> None:
        if value:
            raise AttributeError(
                "state: it is on drives and cannot be assigned; use load_state_dict()"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch's optimizers have it: of this optimizer, or of the one it was made of.

        It is taken parameter by parameter; what is cast is cast as the optimizer's own ``load_state_dict`` does it.

        Raises
        ------
        ValueError, MemoryBudgetError
            It is not of an optimizer with such parameters, or wants more memory; nothing has changed.
        StorageError
            The state could not be stored; what the optimizer had before is gone.
        """
        with self._locked():
            self._usable(loading=True)
            state_dict = state_dict.copy()
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
            saved = state_dict["state"]
            # Groups as torch does it, without any state.
            twin = probing.twin_of(self._inner, list(self.param_groups))
            twin.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            params = [param for group in twin.param_groups for param in group["params"]]
            for number, param in zip(numbers, params, strict=True):
                if number in saved:
                    pieces = self._located.units.get(self._index[param], [])
                    checked_state(number, param, pieces, saved[number])
            planned = self._planned_for(twin.param_groups)
            self.param_groups = self._inner.param_groups = twin.param_groups
            of_group = {param: group for group in self.param_groups for param in group["params"]}
            number_of = dict(zip(params, numbers, strict=True))

            def loaded(_: int, param: torch.Tensor) -> Any:
                state = saved.get(number_of[param])
                return None if not state else self._cast(of_group[param], param, state)

            self._sweep = None
            self._install(*planned)
            self._fill(loaded)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

    def _state_before(self, _: int, param: torch.Tensor) -> Any:
        """Return a parameter's state in memory as what is stepped for it has it."""
        state = self._inner.state.get(param)
        if not state or self._planner.step_dtype(param) == param.dtype:
            return state
        group = self.param_groups[self._planned[param][0]]
        return self._cast(group, param, state)

    def _cast(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        local = local_of(param)
        dtype = self._planner.step_dtype(param)
        device = self._device_of_step(param)
        alike = (
            local
            if (local.dtype, local.device) == (dtype, device)
            else torch.empty((), dtype=dtype, device=device)
        )
        state = {
            key: local_of(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        master = state.pop(MASTER, None)
        cast = cast_like_torch(self._inner, group, alike, state)
        return {**cast, MASTER: master} if master is not None else cast

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`.

        Raises
        ------
        NotSeparableError, MemoryBudgetError, StorageError
            It cannot be offloaded, or there is no space for its state; nothing has changed.
        """
        if self._residency is None:  # the constructor adds what there is
            super().add_param_group(param_group)
            return
        with self._locked():
            residency = self._usable()
            if self._sweep is not None:
                raise self._half_done("a step before failed")
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            known = sum(len(each["params"]) for each in self.param_groups[:-1])
            buckets = list(self._buckets)
            try:
                check_params(self.param_groups)
                self._planner.check_together(self.param_groups)
                # What is loaded later is planned anew, and must have room, too.
                choose_slots(self._budget_nbytes, *self._planner.measure(self.param_groups))
                self._planner.extend(
                    buckets, [(len(self.param_groups) - 1, group)], known, self._slots.nbytes
                )
                added = buckets[len(self._buckets) :]
                total = sum(bucket.nbytes for bucket in buckets)
                slots = self._slots
                if slots.count or total > self._budget_nbytes:
                    slots = Slots(self._budget_nbytes // slots.nbytes, slots.nbytes)
                    largest = max((bucket.nbytes for bucket in buckets), default=0)
                    if slots.count < MIN_SLOTS or largest > slots.nbytes:
                        raise MemoryBudgetError(
                            f"memory_budget: {self._budget_nbytes} bytes, in slots of {slots.nbytes}, cannot take this "
                            f"group: its state and that before have {total} bytes, {largest} of them in one piece; "
                            "make a new optimizer with all groups",
                            total,
                        )
                with self._interrupts.deferred():
                    if slots.count != self._slots.count:
                        residency.confine(slots)
                        self._slots = slots
                    residency.add(added)
            except BaseException:
                self.param_groups.pop()
                raise
            self._buckets = buckets
            self._note_params()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an offloaded optimizer cannot be pickled or copied: its state is on drives (use state_dict())"
        )

    # Ending

    def drain(self) -> None:
        """Wait until what is being written behind has been written.

        Raises
        ------
        OffloadError
            Something could not be written, and is still in memory.
        """
        with self._locked():
            residency = self._usable()
            self._drain(residency)

    def close(self) -> None:
        """Give the memory and the space on drives back; the state is lost unless it has been saved."""
        if self._generation != _core.fork_generation():
            return  # the parent's
        with self._lock:
            residency, self._residency = self._residency, None
            self.discard_committed()
            if residency is None:
                return
            try:
                residency.settle()
            finally:
                for bucket in self._buckets:
                    bucket.forget_views()
                self._store.close()

    # Steps

    def _locked(self) -> threading.RLock:
        """Return the lock, unless a thread of the parent process may hold it for ever."""
        if self._generation != _core.fork_generation():
            raise RuntimeError(
                "this optimizer is the parent process's: its state cannot be used after fork()"
            )
        return self._lock

    def _usable(self, *, loading: bool = False) -> Residency:
        if self._residency is None:
            raise ValueError("the offloaded optimizer is closed")
        if self._incomplete and not loading:
            raise RuntimeError(
                "only a part of a state has been loaded, since that failed; another restore() or load_state_dict() is "
                "needed"
            )
        return self._residency

    def _planned_for(self, groups: list[dict[str, Any]]) -> tuple[Slots, list[Bucket]]:
        """Decide which state lies where."""
        for number, group in enumerate(groups):
            if group.get("differentiable"):
                raise NotSeparableError(
                    f"param_groups[{number}]: differentiable=True keeps all state for autograd; it cannot be offloaded"
                )
        self._planner.check_together(groups)
        total, whole = self._planner.measure(groups)
        slots = choose_slots(self._budget_nbytes, total, whole)
        buckets = self._planner.pack(groups, slots.nbytes)
        packed = sum(bucket.nbytes for bucket in buckets)
        if not slots.count and packed > self._budget_nbytes:
            # Cutting takes padding, too: the budget has room for all as it is, but not so cut.
            buckets = self._planner.pack(groups, UNCUT_NBYTES)
        assert not slots.count or all(bucket.nbytes <= slots.nbytes for bucket in buckets)
        return slots, buckets

    def _install(self, slots: Slots, buckets: list[Bucket]) -> None:
        """Let state lie so; what there was is forgotten."""
        # Its memory must be free before there is other; where that cannot be had the optimizer is closed.
        before, self._residency = self._residency, None
        if before is not None:
            before.forget()
        del before
        device = self._device_to_stage_on()
        residency = Residency(
            self._store,
            slots,
            all_in_flight=self._commit != "none",
            gpu=-1 if device is None or device.type != "cuda" else device.index or 0,
        )
        if device is not None and buckets:
            self._staging = Staging(device, max(bucket.nbytes for bucket in buckets))
        residency.interrupted = self._interrupts.insisted
        residency.add(buckets)
        self._slots, self._buckets, self._residency = slots, buckets, residency
        self._note_params()

    def _device_of_step(self, param: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self._step_device == "cpu" else local_of(param).device

    def _device_to_stage_on(self) -> torch.device | None:
        """Return the device that steps, where that is not the host."""
        devices: set[torch.device] = {
            param.device for group in self.param_groups for param in group["params"]
        }
        if self._step_device == "cpu" or all(device.type == "cpu" for device in devices):
            return None
        if len(devices) > 1:
            raise ValueError(
                f'step_device: parameters are on {sorted(map(str, devices))}; "param" needs one device for all of them'
            )
        return devices.pop()

    def _note_params(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self._index = {param: index for index, param in enumerate(params)}
        self._patterns = {
            number: probing.pattern(group) for number, group in enumerate(self.param_groups)
        }
        self._planned = {
            param: (number, param.shape, param.dtype, param.stride())
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        # Nothing is copied for a step of all at once.
        self._stepped_in_place = all(
            param.device.type == "cpu" and self._planner.step_dtype(param) == param.dtype
            for param in params
        )
        # Then how the work is divided changes no result.
        self._by_elements = self._staging is None and all(
            unit.cuttable for bucket in self._buckets for unit in bucket.units
        )
        self._located = Located(self._buckets)

    def _fill(self, states: Callable[[int, torch.Tensor], Any]) -> None:
        """Give units the states that their parameters have; a parameter without one has none."""
        current: tuple[int, Any] = (-1, None)

        def fill(unit: Unit, memory: torch.Tensor) -> bool:
            nonlocal current
            if current[0] != unit.index:
                current = unit.index, states(unit.index, unit.param)
            if not current[1]:
                return False
            put_state(unit, current[1], memory)
            return True

        self._fill_by(fill)

    def _fill_by(self, fill: Callable[[Unit, torch.Tensor], bool]) -> None:
        """Fill all buckets, unit by unit; those in which no unit had anything stay as they are."""
        residency = self._usable(loading=True)
        self._incomplete = True
        with self._interrupts.deferred():
            residency.begin([bucket.index for bucket in self._buckets])
            for bucket in self._buckets:
                memory = residency.acquire(bucket.index, fresh=True)
                filled = [fill(unit, memory) for unit in bucket.units]
                residency.release(bucket.index, dirty=any(filled))
            self._incomplete = False

    def _params_with_state(self) -> list[torch.Tensor]:
        return [
            param
            for group in self.param_groups
            for param in group["params"]
            if any(unit.kept for _, unit in self._located.units.get(self._index[param], ()))
        ]

    def _state_of_one(self, param: torch.Tensor) -> dict[str, Any]:
        with self._locked():
            residency = self._readable()
            pieces = self._located.units.get(self._index[param], [])
            if not any(unit.kept for _, unit in pieces):
                return {}
            held: dict[int, torch.Tensor] = {}

            def read(bucket: Bucket) -> torch.Tensor:
                if bucket.index not in held:
                    held.clear()  # one at a time
                    memory = residency.slot_of(bucket.index)
                    if memory is None:
                        memory = torch.empty(bucket.nbytes, dtype=torch.uint8)
                        self._drain(residency)
                        if bucket.nbytes:
                            self._store.read(bucket.name, memory).result()
                    held[bucket.index] = memory
                return held[bucket.index]

            return state_of(pieces, Copied(read))

    def _mapped_state(self) -> dict[torch.Tensor, Any]:
        with self._locked():
            residency = self._readable()
            self._flush(residency)
            source = Mapped(self._store)
            return {
                param: state_of(self._located.units[self._index[param]], source)
                for param in self._params_with_state()
            }

    def _readable(self) -> Residency:
        residency = self._usable()
        if self._sweep is not None:
            raise self._half_done("a step before failed")
        return residency

    def _flush(self, residency: Residency) -> None:
        try:
            with self._interrupts.deferred():
                residency.flush()
        except StorageError as error:
            raise self._not_stored() from error

    def _drain(self, residency: Residency) -> None:
        try:
            with self._interrupts.deferred():
                residency.drain()
        except StorageError as error:
            raise self._not_stored() from error

    def _half_done(self, why: str) -> OffloadError:
        assert self._sweep is not None
        sweep = self._sweep
        remedy = (
            "It cannot be finished: the optimizer raised in the middle of it. load_state_dict() or restore() of an "
            "earlier state go on, with the parameters of then"
            if sweep.broken
            else "retry() finishes it, with the gradients as they are"
        )
        return OffloadError(
            f"step {self._steps + 1} is half done, {sweep.done} of {len(sweep.order)} buckets ({why}); the others are "
            f"as after step {self._steps}. {remedy}",
            step=self._steps,
            finished=False,
        )

    def _not_stored(self) -> OffloadError:
        return OffloadError(
            f"step {self._steps} is whole, but a part of its state could not be stored; it is still in memory. "
            "retry() writes it again",
            step=self._steps,
            finished=True,
        )


def _described(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value) if isinstance(value, torch.Size) else value}"
        for name, value in zip(names, values, strict=True)
    )


class _Sweep:
    """A step's way through buckets."""

    def __init__(self, order: list[int], step: Step) -> None:
        self.order = order
        self.step = step
        self.done = 0
        self.broken = False  # in the middle of a bucket


def of_this_rank(path: Path | Sequence[Path]) -> list[str]:
    """Return the paths that are this rank's, where there are several ranks."""
    paths: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    names: list[str] = [os.fsdecode(each) for each in paths]
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return names
    return [str(pathlib.Path(name) / f"rank-{torch.distributed.get_rank():05d}") for name in names]
