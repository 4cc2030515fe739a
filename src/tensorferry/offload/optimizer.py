"""An optimizer with its state on drives, which steps a torch optimizer bucket by bucket, bit for bit as in memory.

A *unit* is a parameter, or a piece of a large one, with its state. A *bucket* is one tensor in the store, with the
state of some units that are stepped together (``plan.py``). The original optimizer does the arithmetic, in calls for
one bucket at a time (``calls.py``); its class determines whether this gives the same result as one call for all
parameters (``kinds.py``). A :class:`~tensorferry.offload.sweep.Sweep` is one pass over the buckets. The state is an
object of one of two classes: :class:`~tensorferry.offload.in_memory.StateInMemory` if all of it fits in the memory
budget, and otherwise :class:`~tensorferry.offload.on_drives.StateOnDrives`.

A *master* is a copy of a parameter in another dtype, which is stepped instead of the parameter.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import threading
import time
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch._compile import _disable_dynamo

from tensorferry.base.checks import checked_nbytes, one_of
from tensorferry.base.processes import Interrupts, Owned
from tensorferry.errors import StorageError
from tensorferry.offload import plan
from tensorferry.offload.calls import HOOKS
from tensorferry.offload.errors import NotSeparableError, OffloadError
from tensorferry.offload.in_memory import StateInMemory
from tensorferry.offload.kinds import known_of
from tensorferry.offload.loans import Lender
from tensorferry.offload.on_drives import StateOnDrives
from tensorferry.offload.plan import (
    MASTER,
    Bucket,
    Planner,
    check_master,
    check_params,
    check_storable,
    local_of,
    params_in,
)
from tensorferry.offload.saved import (
    Saved,
    finish_writes,
    open_commits,
    pack,
    packed_params,
    to_record,
)
from tensorferry.offload.state_view import StateView
from tensorferry.offload.states import cast_like_torch, mapped_states, twin_of
from tensorferry.offload.sweep import Sweep
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensorferry.base.checks import Path
    from tensorferry.offload.kinds import Kind

# If the whole state is in memory, saving it needs memory for two buckets. It may exceed the budget by this many bytes.
_MAX_EXCESS_NBYTES = 64 << 20

Commit: TypeAlias = Literal["none", "step", "fsync"]
StepDevice: TypeAlias = Literal["param", "cpu"]


class OffloadedOptimizer(Owned, torch.optim.Optimizer):
    """An optimizer with its state on drives; made by :func:`offload_optimizer`.

    It is a ``torch.optim.Optimizer`` and works with schedulers, ``GradScaler``, gradient clipping, hooks and closures.
    ``param_groups`` are those of the original optimizer. :meth:`state_dict` has the same contents as in memory;
    :meth:`read_state` and :meth:`write_state` access the state of one parameter.
    """

    _refusal = "this optimizer was made before fork() and belongs to the parent process; make a new one in the child"
    _params_nbytes = math.inf  # the largest number of bytes of parameters in a bucket
    # Whether the store contains the parameters at all times, rather than only in commits.
    _stores_params = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: TensorStore,
        memory_budget_nbytes: int,
        *,
        kind: Kind | None = None,
        master_dtype: torch.dtype | None = None,
        commit: Commit = "none",
        earlier: Sequence[Saved] = (),
        endurance_nbytes: int | None = None,
        step_device: StepDevice = "param",
    ) -> None:
        self._inner = optimizer
        self._store = store
        self._budget_nbytes = memory_budget_nbytes
        self._lock = threading.RLock()
        self._set_owner()
        self._interrupts = Interrupts()
        self._commit = commit
        self._endurance_nbytes = endurance_nbytes
        self._committed = True  # whether the last complete step is committed
        self._earlier_commits = list(earlier)  # commits of an earlier run, the newest first
        # Whether the next commit keeps the last one: if a kill lets only some ranks commit, all can go back to it.
        self._keeps_previous = False
        self._held: StateInMemory | StateOnDrives | None = None
        self._sweep: Sweep | None = None
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0
        self._incomplete = False  # whether a load has failed part-way
        # The state that `state` returns for the duration of state_dict().
        self._shown: dict[Any, Any] | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._known = known_of(optimizer, kind)
        self._lender = Lender(master_dtype, on_host=step_device == "cpu")
        self._shapes = _shapes_of(self.param_groups)
        self._step_device = step_device
        self._planner = Planner(
            optimizer, self._known, self._lender.step_dtype, params_nbytes=self._params_nbytes
        )
        # Both optimizers share one list of groups and one set of hooks, so hooks registered earlier run once per step.
        kept = optimizer.param_groups
        optimizer.param_groups = self.param_groups
        try:
            buckets = self._planned(optimizer.state.get)
            self._install(buckets)
            self._fill(self._state_before)
            self._take_params()
        except BaseException:
            optimizer.param_groups = kept
            raise
        optimizer.state = defaultdict(dict)
        for name in HOOKS:
            # The same dict object: a hook's handle removes the hook from it.
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            self._step_supports_amp_scaling = optimizer._step_supports_amp_scaling
        self._redirect_methods()
        self._is_constructed = True

    def _take_params(self) -> None:
        """Move the parameters to drives; in this class they stay in memory."""

    def _redirect_methods(self) -> None:
        """Forward methods of the original optimizer to this one, or make them raise."""
        own = weakref.ref(self)

        def forwarded(name: str, *arguments: Any, **more: Any) -> Any:
            there = own()
            if there is None:
                raise RuntimeError(
                    f"{name}(): this optimizer has been offloaded, and the optimizer that offload_optimizer() or "
                    "offload_training() returned has been deleted; keep a reference to it"
                )
            if name in ("train", "eval"):
                return there._apply(name)
            return getattr(there, name)(*arguments, **more)

        inner = vars(self._inner)
        inner["step"] = refused_step
        for name in ("state_dict", "load_state_dict", "add_param_group"):
            inner[name] = functools.partial(forwarded, name)
        for name in ("train", "eval"):
            if callable(getattr(type(self._inner), name, None)):
                inner[name] = functools.partial(forwarded, name)
                setattr(self, name, functools.partial(forwarded, name))

    # Stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients. New state is written behind while training continues.

        Ctrl-C, and other signals with handlers in Python, take effect after the step; a second Ctrl-C ends the wait
        for a drive that does not respond. With ``commit="step"``, the commit includes changes made by the step's
        hooks. Within a function that ``torch.compile`` has compiled, the step is not part of the graph.

        Raises
        ------
        OffloadError
            A read or write failed: :meth:`retry` continues.
        NotSeparableError
            The optimizer left different values in its groups for different buckets; the step is half done.
        MemoryBudgetError
            An earlier step has created more state than the budget can hold; nothing has changed.
        RuntimeError
            An earlier run has committed a step in the directories, and neither :meth:`resume` nor
            :meth:`discard_committed` was called.
        TypeError, ValueError
            A gradient is sparse, or lies in memory or among ranks in another way than its parameter; a parameter has
            another shape, dtype or strides than before, or shares memory with another; or the list of a group's
            parameters was changed directly. Nothing has changed.
        """
        loss = self._hooked_step(*(() if closure is None else (closure,)))
        if self._commit != "none" and not self._committed:
            with self._guarded():
                self._commit_step()
        return loss

    # torch wraps step() in its hooks unless it is marked as hooked. Here the hooks run inside, before the commit.
    step = _disable_dynamo(step)
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _hooked_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._guarded():
            sweep = self._begun_step()
            if sweep is None:
                return loss
            self._go_on(sweep)
            # Schedulers that were made with the original optimizer read this to see whether it has stepped.
            vars(self._inner)["_opt_called"] = True
        return sweep.calls.returned if closure is None else loss

    def _begun_step(self) -> Sweep | None:
        """Begin a step and return its sweep, or None if GradScaler has found infinite gradients and skips the step."""
        state = self._usable()
        if self._sweep is not None:
            raise self._half_done("a previous step failed")
        if self._earlier_commits:
            raise RuntimeError(
                f"step {self.committed_step} is committed in these directories, and a step would replace it: call "
                "resume() to continue from it, or discard_committed()"
            )
        scaling = {
            name: getattr(self, name)
            for name in ("grad_scale", "found_inf")
            if getattr(self, name, None) is not None
        }
        if "found_inf" in scaling and scaling["found_inf"].item():
            return None
        with self._storing():
            # The commit before the last one was kept for ranks that had not committed the last step. This step's
            # gradients are sums over all ranks, and a rank computes its part only after it has committed the last
            # step. So now all ranks have committed the last step, and none needs the commit before it.
            self._store.drop_previous()
            state.check()
        self._check_step()
        if state.is_outgrown or self._planner.names(self.param_groups) != self._names:
            state = self._plan_again()
        sweep = Sweep.of(self._inner, self._gradient_of, scaling)
        sweep.placed = self._placed_gradients()
        sweep.order = state.order(sweep)
        return sweep

    def _apply(self, name: str) -> None:
        """Call another method of the original optimizer, such as train() or eval(), for all parameters."""
        with self._guarded():
            self._readable()
            sweep = Sweep.of(self._inner, self._gradient_of, {}, name)
            sweep.order = self._usable().order(sweep)
            self._go_on(sweep)

    def retry(self) -> None:
        """Continue after a failure: finish a step that is half done, and write what could not be written.

        Gradients must be unchanged.

        Raises
        ------
        OffloadError
            Another failure; or gradients have changed, and the step cannot be finished.
        """
        with self._guarded():
            state, sweep = self._usable(), self._sweep
            with contextlib.suppress(StorageError):
                state.drain()  # collect failed writes: flush() below writes those buckets again
            if sweep is not None:
                if sweep.broken:
                    raise self._half_done("a previous attempt failed")
                left = sweep.order[sweep.done :]
                changed = sweep.changed_gradient(unit.param for each in left for unit in each.units)
                if changed is not None:
                    raise self._half_done(
                        f"the gradient of a parameter of shape {tuple(changed.shape)} has been replaced, removed or "
                        "modified since the step began"
                    )
                self._go_on(sweep)
            with self._storing():
                self._flush()
            self._commit_step()

    @property
    def steps(self) -> int:
        """The number of complete steps."""
        return self._steps

    def stats(self) -> dict[str, Any]:
        """Return what steps have cost so far.

        Returns
        -------
        dict
            ``steps``, ``step_seconds`` (the total), ``wait_seconds`` (of these, waiting for drives), ``drive_share``
            (wait_seconds / step_seconds), ``endurance_share`` (the share of the drive's endurance that this optimizer
            has written; None without ``endurance``), ``read_nbytes`` and ``written_nbytes``, ``state_nbytes`` (all
            state in buckets), ``memory_nbytes`` (the memory for it), ``buckets``, and the ``store``'s own statistics.
        """
        with self._locked():
            state = self._usable()
            moved = state.counters
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
                "state_nbytes": sum(bucket.nbytes for bucket in state.buckets),
                "memory_nbytes": state.nbytes,
                "buckets": len(state.buckets),
                "store": self._store.stats(),
            }

    def _check_step(self) -> None:
        """Raise if the step cannot be done, before anything has changed."""
        check_params(self.param_groups)
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                planned = self._shapes.get(param)
                now = number, param.shape, param.dtype, param.stride()
                if planned is None:
                    raise ValueError(
                        f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} was put into the list "
                        "directly; remove it from the list and pass it to add_param_group()"
                    )
                if planned != now:
                    names = ("group", "shape", "dtype", "strides")
                    raise ValueError(
                        f"param_groups[{number}]: a parameter now has {_describe(names, now)}; when it was offloaded, "
                        f"it had {_describe(names, planned)}; offload a new optimizer"
                    )
                grad = self._gradient_of(param)
                if grad is not None:
                    self._check_gradient(f"param_groups[{number}]", param, grad)
        if sum(len(group["params"]) for group in self.param_groups) != len(self._shapes):
            raise ValueError(
                "param_groups: parameters have been removed; make a new optimizer without them"
            )

    def _plan_again(self) -> StateInMemory | StateOnDrives:
        """Plan the layout for the state that there is now, and for the groups' options; move the state there."""
        states, before = self._mapped_states(), self._usable().buckets
        planned = self._planned(states.get)
        try:
            self._install(planned)
            self._fill(states.get)
        except BaseException:
            self._install(before)
            self._fill(states.get)
            raise
        return self._usable()

    def _mapped_states(self) -> dict[torch.Tensor, Any]:
        """Return the states of all parameters, mapped from the store."""
        self._store_state()
        state = self._usable()
        with self._storing():
            return mapped_states(state.buckets, state.bucket, self._store)

    def _placed_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return DTensor gradients whose placements are not those of their parameters, redistributed to these.

        This is a collective operation, so it runs for all parameters in the same order on all ranks. torch
        redistributes a gradient when an operation of the step needs it. Moving elements first does not change an
        element-wise step; summing them first does, unless the step does so, too.
        """
        placed = {}
        for group in self.param_groups:
            for param in group["params"]:
                grad: Any = self._gradient_of(param)
                places = getattr(param, "placements", None)
                if grad is None or getattr(grad, "placements", None) == places:
                    continue
                is_partial = any(each.is_partial() for each in grad.placements)
                if is_partial and not (self._known.sums_first and self._known.sums_first(group)):
                    raise NotSeparableError(
                        f"{type(self._inner).__name__} cannot be offloaded exactly: a gradient has the placements "
                        f"{grad.placements} and its parameter has {places}, and the step may change the gradient "
                        "before redistributing it. Remedy: grad.redistribute(placements=param.placements) before the "
                        "step"
                    )
                placed[param] = grad.redistribute(placements=places)
        return placed

    def _check_gradient(self, name: str, param: Any, grad: Any) -> None:
        """Raise if a gradient cannot be used without changing the result."""
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name}: a parameter of shape {tuple(param.shape)} has a sparse gradient; offloaded optimizers "
                "support only dense ones (remedy: sparse=False in nn.Embedding)"
            )
        if param in self._cut and (
            not local_of(grad).is_contiguous()
            or (grad.dtype != param.dtype and self._lender.step_dtype(param) == param.dtype)
        ):
            raise ValueError(
                f"{name}: a parameter of shape {tuple(param.shape)} is stepped in pieces, and its gradient is not "
                "contiguous or has another dtype; torch's kernels then round pieces in another way. Remedy: "
                "param.grad = param.grad.to(param.dtype).contiguous()"
            )

    def _gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, or the object that represents it."""
        return param.grad

    def _bring(self, bucket: Bucket | None) -> None:
        """Bring a bucket's parameters and gradients into memory; in this class they are always in memory.

        With None, release those of the bucket that was brought last, because no other bucket is stepped now.
        """

    def _go_on(self, sweep: Sweep) -> None:
        """Step the remaining buckets of a sweep."""
        state = self._usable()
        began, waited = time.perf_counter(), state.counters.wait_seconds
        self._sweep = sweep
        try:
            state.step(sweep, self._bring)
        except StorageError as error:
            raise self._half_done(str(error)) from error
        except BaseException:
            if sweep.done == 0 and not sweep.broken:
                self._sweep = None  # no bucket has been stepped
            raise
        finally:
            self._bring(None)
            seconds = time.perf_counter() - began
            waited = state.counters.wait_seconds - waited
            state.note_time(seconds, waited)
            self._seconds += seconds
            self._waited_seconds += waited
        sweep.calls.end()
        self._sweep = None
        if sweep.is_step:
            self._steps += 1
            self._committed = False

    # Checkpoints

    def checkpoint(self, path: Path | Sequence[Path]) -> None:
        """Save the current state, without parameters, in a new directory for :meth:`restore`.

        On the file system of the state nothing is copied: the files are hard-linked into the directory, and the next
        steps write to other files, for which space is reserved now. The checkpoint is durable when this method returns,
        and is verified when it is read. With ``torch.distributed``, each rank has its own subdirectory.

        Parameters
        ----------
        path : path, or a list of paths
            A directory that does not exist. For state in several directories: one path, or one on each file system.

        Raises
        ------
        OffloadError
            A step is half done, or state could not be stored.
        StorageError
            The path exists, space is missing, or a write failed; the path is not created.
        ValueError
            A group has a value that cannot be saved.
        """
        with self._locked():
            self._readable()
            self._store_state()
            self._store.snapshot(of_this_rank(path), self._record())

    def restore(self, path: Path | Sequence[Path]) -> int:
        """Load the state and the groups' values of a :meth:`checkpoint`; parameters stay unchanged.

        Every byte is verified. Loading needs no memory beyond the budget, which may differ from the one at saving.

        Returns
        -------
        int
            The number of steps at the time of the checkpoint.

        Raises
        ------
        ValueError
            The checkpoint has other parameters, or the state of a different class of optimizers; nothing has changed.
        MemoryBudgetError
            The budget is too small for a piece of state in the checkpoint; nothing has changed.
        StorageError
            The checkpoint is missing, unreadable or damaged. If this is detected late, the state is unusable until
            another restore() or load_state_dict().
        """
        with self._locked():
            self._usable(loading=True)
            paths = of_this_rank(path)
            store = type(self._store).open(paths)
            try:
                return self._load(Saved(store, paths[0]), with_params=self._stores_params)
            finally:
                store.close()

    @property
    def committed_step(self) -> int | None:
        """The step that an earlier run has committed in these directories, for :meth:`resume`, or None."""
        return self._earlier_commits[0].steps if self._earlier_commits else None

    def resume(self) -> int | None:
        """Continue from the last commit of an earlier run: restore its parameters, state and groups' values.

        With ``torch.distributed``, all ranks must call it. They continue from the newest step that all have committed:
        a kill may have happened when only some ranks had committed a step.

        Returns
        -------
        int or None
            The step. None if nothing was committed, or ``commit`` is "none"; then nothing has changed.

        Raises
        ------
        ValueError
            The commit has other parameters, or is of a different optimizer; nothing has changed.
        RuntimeError
            Ranks have no committed step in common; nothing has changed on any of them.
        StorageError
            The commit is unreadable or damaged; it is kept.
        """
        with self._locked():
            self._usable(loading=True)
            steps = self.committed_step
            if self._commit != "none" and ranks() > 1:
                steps = _common_step([earlier.steps for earlier in self._earlier_commits])
            if steps is None:
                return None
            if self._earlier_commits[0].steps != steps:
                with self._interrupts.deferred():
                    self._store.go_back()
                    self._earlier_commits.pop(0).close()
            self._load(self._earlier_commits[0], with_params=True)
            self.discard_committed()
            self._keeps_previous = True
            return steps

    def discard_committed(self) -> None:
        """Discard what an earlier run has committed: the next commit replaces it."""
        with self._locked():
            earlier, self._earlier_commits = self._earlier_commits, []
            self._keeps_previous = False
            for each in earlier:
                each.close()

    def _record(self) -> bytes:
        places = {param: index for index, param in enumerate(self._shapes)}
        groups = []
        for group in self.param_groups:
            values = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**values, "params": [places[param] for param in group["params"]]})
        name, buckets = type(self._inner).__name__, self._usable().buckets
        slabs = self._slabs_of_params()
        return to_record(self._steps, name, groups, list(self._shapes), buckets, slabs=slabs)

    def _slabs_of_params(self) -> list[tuple[str, int]] | None:
        """Return the name of the tensor in the store, and the offset in it, for each parameter.

        Return None if parameters are in the store only in commits.
        """
        return None

    def _store_params(self) -> None:
        """Write parameters into the store."""
        finish_writes(
            self._store.write(name, pack(members))
            for name, members in packed_params(list(self._shapes))
        )

    def _commit_step(self) -> None:
        """Commit the state and the current parameters, which hooks may have changed after the step."""
        if self._commit == "none" or self._committed or self._sweep is not None:
            return
        self._store_state()
        try:
            self._store_params()
            self._store.commit(
                self._record(),
                sync=self._commit == "fsync",
                keep_previous=self._keeps_previous and ranks() > 1,
            )
            self._keeps_previous = True
        except StorageError as error:
            raise OffloadError(
                f"step {self._steps} is complete, but could not be committed; retry() tries again",
                step=self._steps,
                finished=True,
            ) from error
        self._committed = True

    def _load(self, saved: Saved, *, with_params: bool) -> int:
        """Load state and groups from a checkpoint or commit; if ``with_params``, load the parameters, too.

        Return the step of the checkpoint or commit.
        """
        saved.check_groups(self._inner)
        twin = twin_of(self._inner, list(self.param_groups))
        twin.load_state_dict({"state": {}, "param_groups": saved.groups})
        saved.check_values(twin)
        if with_params:
            saved.check_places(in_slabs=self._stores_params)
        params = list(params_in(twin.param_groups))
        saved.check_params(params, [self._lender.step_dtype(param) for param in params])
        with self._groups_replaced(twin.param_groups):
            check_params(self.param_groups)
            group_of = {param: group for group in self.param_groups for param in group["params"]}
            buckets = saved.layout(
                params, lambda param: self._planner.may_cut(group_of[param], param)
            )
            plan.check_budget(self._budget_nbytes, buckets, self._at_once(), usual=False)
        self._sweep = None
        with self._guarded():
            self._install(buckets)
            self._incomplete = True
            self._usable(loading=True).load(saved)
            if with_params:
                self._load_params(saved, params)
            self._incomplete = False
        self._steps = saved.steps
        return saved.steps

    def _load_params(self, saved: Saved, params: Sequence[torch.Tensor]) -> None:
        saved.set_params(params)

    @contextlib.contextmanager
    def _groups_replaced(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Plan with other groups in a ``with`` block; after an exception in it, the groups are those before."""
        kept = self.param_groups
        self.param_groups = self._inner.param_groups = groups
        try:
            yield
        except BaseException:
            self.param_groups = self._inner.param_groups = kept
            raise

    # State

    @property  # type: ignore[override]
    def state(self) -> Mapping[Any, Any]:
        """The parameters that have state, each with the names of its values.

        The values are on drives: :meth:`read_state` and :meth:`write_state` access them. Reading or setting them here
        raises TypeError.
        """
        if self._shown is not None:
            return self._shown
        with self._locked():
            return StateView(self._readable().names())

    @state.setter
    def state(self, _: Any) -> None:
        if vars(self).get("_is_constructed"):
            raise TypeError(
                "state: cannot be replaced; use load_state_dict(), or write_state(param, {}) to delete the state of a "
                "parameter"
            )

    def read_state(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return a copy of a parameter's state, as it is now.

        Parameters
        ----------
        param : torch.Tensor
            A parameter of this optimizer.

        Returns
        -------
        dict
            The state as the original optimizer has it in memory, and "master", the parameter's master, if it has one.
            Empty if the parameter has no state.

        Raises
        ------
        KeyError
            The optimizer does not have the parameter.
        OffloadError
            A step is half done.
        StorageError
            The state cannot be read, or is damaged.
        """
        with self._guarded():
            self._check_param(param)
            with self._storing():
                return self._readable().read(param)

    def write_state(self, param: torch.Tensor, state: dict[Any, Any]) -> None:
        """Replace a parameter's state; an empty dict deletes it.

        Parameters
        ----------
        param : torch.Tensor
            A parameter of this optimizer.
        state : dict
            The new state, with tensors of any names, shapes and dtypes, which are copied. "master" sets the
            parameter's master; without it, the master is set from the parameter.

        Raises
        ------
        KeyError, TypeError
            The optimizer does not have the parameter, or the state is not a dict of plain tensors and other values.
        OffloadError
            A step is half done, or other state could not be stored to free memory.
        """
        with self._guarded():
            self._check_param(param)
            if not isinstance(state, dict):
                raise TypeError(f"state: {type(state).__name__} is not a dict")
            with self._storing():
                self._readable().write(param, state)

    def _check_param(self, param: Any) -> None:
        if not isinstance(param, torch.Tensor) or param not in self._shapes:
            raise KeyError(f"param: not a parameter of this optimizer: {type(param).__name__}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's optimizers: a snapshot with tensors mapped from the drive.

        The tensors need no additional memory, and training does not change them.
        """
        with self._locked():
            self._readable()
            shown = self._mapped_states()
            own = type(self._inner).state_dict
            try:
                self._shown = shown
                if own is torch.optim.Optimizer.state_dict:
                    return super().state_dict()
                self._inner.state = defaultdict(dict, shown)
                return own(self._inner)
            finally:
                self._shown = None
                self._inner.state = defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of the original one.

        Parameters are loaded one after the other. Values are cast as by the optimizer's own ``load_state_dict``.

        Raises
        ------
        ValueError, TypeError, MemoryBudgetError
            The state dict has other parameters, state of no parameter, or state that cannot be stored, or needs a
            larger memory budget; nothing has changed.
        StorageError
            The state could not be stored; the optimizer's previous state is lost.
        """
        with self._locked():
            self._usable(loading=True)
            state_dict = state_dict.copy()
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            saved = state_dict["state"]
            # Load the groups as torch does, without any state.
            twin = twin_of(self._inner, list(self.param_groups))
            before = dict(vars(twin))
            twin.load_state_dict({**state_dict, "state": {}})
            # Attributes that load_state_dict() of the original optimizer's class has set on the twin.
            own = {
                name: value
                for name, value in vars(twin).items()
                if name not in ("state", "param_groups") and before.get(name) is not value
            }
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            number_of = dict(zip(params_in(twin.param_groups), numbers, strict=True))
            self._check_states(saved, number_of)

            def loaded(param: torch.Tensor) -> Any:
                state = saved.get(number_of[param])
                return None if not state else self._cast(param, state, state_dict)

            with self._groups_replaced(twin.param_groups):
                buckets = self._planned(lambda param: saved.get(number_of[param]))
            self._sweep = None
            vars(self._inner).update(own)
            with self._guarded():
                self._install(buckets)
                self._fill(loaded)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

    def _check_states(self, saved: dict[Any, Any], number_of: Mapping[torch.Tensor, Any]) -> None:
        """Raise if the states of a state dict are not those of this optimizer's parameters, or cannot be stored."""
        unknown = [key for key in saved if key not in number_of.values()]
        if unknown:
            raise ValueError(
                f"state_dict: it has state for {unknown[:5]}, which are not parameters"
            )
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                state = saved.get(number_of[param], {})
                name = f"parameter {number_of[param]} (param_groups[{number}])"
                if not isinstance(state, dict):
                    raise ValueError(
                        f"state_dict: the state of {name} is a {type(state).__name__}, not a dict"
                    )
                check_storable(state)
                for key, shape in self._planner.shapes(group, param).items():
                    found = getattr(state.get(key), "shape", shape)
                    if tuple(found) != tuple(shape):
                        raise ValueError(
                            f"state_dict: {key!r} of {name} has the shape {tuple(found)}, not {tuple(shape)}"
                        )

    def _state_before(self, param: torch.Tensor) -> Any:
        """Return a parameter's state in memory, cast to the dtype in which the parameter is stepped."""
        state = self._inner.state.get(param)
        if not state or self._lender.step_dtype(param) == param.dtype:
            return state
        return self._cast(param, state, {})

    def _cast(
        self, param: torch.Tensor, state: dict[str, Any], other_entries: Mapping[str, Any]
    ) -> Any:
        """Return a parameter's state as the optimizer's own ``load_state_dict`` converts it."""
        dtype, device = self._lender.step_dtype(param), self._lender.step_device(param)
        is_itself = local_of(param) is param and (param.dtype, param.device) == (dtype, device)
        alike = param if is_itself else torch.empty((), dtype=dtype, device=device)
        state = {
            key: local_of(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        master = state.pop(MASTER, None) if dtype != param.dtype else None
        group = self.param_groups[self._shapes[param][0]]
        cast = cast_like_torch(self._inner, group, alike, state, other_entries)
        return {**cast, MASTER: master} if master is not None else cast

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :class:`torch.optim.Optimizer`.

        Raises
        ------
        NotSeparableError, MemoryBudgetError, StorageError
            The group cannot be offloaded, or memory or space for its state is missing; nothing has changed.
        """
        if self._held is None:  # called by the constructor of torch's class
            super().add_param_group(param_group)
            return
        with self._guarded():
            state = self._readable()
            type(self._inner).add_param_group(self._inner, param_group)
            group = self.param_groups[-1]
            begun = {param: self._inner.state.pop(param, None) for param in group["params"]}
            try:
                check_params(self.param_groups)
                added = self._planner.pack(
                    [group], begun.get, len(self._shapes), len(state.buckets)
                )
                buckets = [*state.buckets, *added]
                self._check_budget(buckets)
                with self._storing():
                    if isinstance(state, StateInMemory) and not self._fits_at_home(buckets):
                        state = self._on_drives(buckets)
                        state.fill(self._usable().read)
                    else:
                        state.add(added)
            except BaseException:
                self.param_groups.pop()
                raise
            self._held = state
            self._index_params()
            for param in group["params"]:
                if begun[param]:
                    state.write(param, begun[param])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an offloaded optimizer cannot be pickled or copied: its state is on drives (use state_dict())"
        )

    # Ending

    def drain(self) -> None:
        """Wait until all write-behind is done.

        Raises
        ------
        OffloadError
            A write failed; its data is still in memory.
        """
        with self._guarded(), self._storing():
            self._usable().drain()

    def close(self) -> None:
        """Release the memory and the space on drives; state that has not been saved is lost."""
        if self.is_parents:
            return  # memory and files belong to the parent process
        with self._lock:
            state, self._held = self._held, None
            self.discard_committed()
            if state is None:
                return
            try:
                state.close()
            finally:
                self._store.close()

    # Where state is

    def _planned(self, states: Callable[[torch.Tensor], Any]) -> list[Bucket]:
        """Plan the layout of the state for the current groups, with the state that parameters already have."""
        check_params(self.param_groups)
        buckets = self._planner.pack(self.param_groups, states)
        self._check_budget(buckets)
        return buckets

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        plan.check_budget(self._budget_nbytes, buckets, self._at_once())

    def _at_once(self) -> int:
        """Return how many buckets must fit into memory together.

        With a GPU it is three: one is copied to the GPU, one is stepped there, and one is copied back.
        """
        return 1 if self._device_to_stage_on() is None else plan.MIN_BUCKETS

    def _fits_at_home(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether the whole state can be in memory; saving it needs memory for two more buckets."""
        sizes = sorted(bucket.nbytes for bucket in buckets)
        return (
            self._device_to_stage_on() is None
            and sum(sizes) + max(sum(sizes[-2:]) - _MAX_EXCESS_NBYTES, 0) <= self._budget_nbytes
        )

    def _install(self, buckets: list[Bucket]) -> None:
        """Replace the layout of the state; previous state is lost."""
        # Free the old memory before allocating the new one. If that allocation fails, the optimizer stays closed.
        before, self._held = self._held, None
        if before is not None:
            before.close(delete=True)
        del before
        if self._fits_at_home(buckets):
            self._held = StateInMemory(
                self._store,
                buckets,
                self._lender,
                memory_budget_nbytes=self._budget_nbytes,
                all_in_flight=self._commit != "none",
            )
        else:
            self._held = self._on_drives(buckets)
        self._index_params()

    def _on_drives(self, buckets: list[Bucket]) -> StateOnDrives:
        device = self._device_to_stage_on()
        return StateOnDrives(
            self._store,
            buckets,
            self._lender,
            memory_budget_nbytes=self._budget_nbytes,
            device=device,
            all_in_flight=self._commit != "none",
            # The number of threads does not change the result where a parameter could be cut at any place.
            few_threads=device is None
            and all(
                self._planner.may_cut(group, param)
                for group in self.param_groups
                for param in group["params"]
                if local_of(param).numel() > 1
            ),
            interrupted=self._interrupts.was_repeated,
        )

    def _device_to_stage_on(self) -> torch.device | None:
        """Return the device that steps the buckets, or None if this is the host."""
        devices = {param.device for param in params_in(self.param_groups)}
        if self._step_device == "cpu" or all(device.type == "cpu" for device in devices):
            return None
        if len(devices) > 1:
            raise ValueError(
                f'step_device: parameters are on {sorted(map(str, devices))}; "param" needs one device for all of them'
            )
        return devices.pop()

    def _index_params(self) -> None:
        self._shapes = _shapes_of(self.param_groups)
        self._names = self._planner.names(self.param_groups)
        # Parameters that are stepped in pieces.
        state = self._usable(loading=True)
        units = [unit for bucket in state.buckets for unit in bucket.units]
        self._cut = {
            unit.param for unit in units if unit.stop is not None and state.steps_by_buckets
        }

    def _fill(self, states: Callable[[torch.Tensor], Any]) -> None:
        """Set the state of each parameter to what ``states`` returns for it; None stands for no state."""
        self._incomplete = True
        with self._interrupts.deferred():
            self._usable(loading=True).fill(states)
        self._incomplete = False

    def _store_state(self) -> None:
        """Write all state to the store."""
        with self._guarded(), self._storing():
            self._flush()

    def _flush(self) -> None:
        self._usable().flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the original optimizer's ``zero_grad``."""
        self._inner.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original optimizer."""
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; those of the original optimizer are set there, because its step may read them."""
        is_own = name in vars(self) or hasattr(type(self), name)
        if vars(self).get("_is_constructed") and not is_own and name in vars(self._inner):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)

    # Checks and errors

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock; raise in a child process after fork(), where a thread of the parent may hold it forever."""
        self._check_process()
        return self._lock

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock, and defer signals until the end of the block."""
        with self._locked(), self._interrupts.deferred():
            yield

    def _usable(self, *, loading: bool = False) -> StateInMemory | StateOnDrives:
        """Return the state; raise if the optimizer is closed, or (unless ``loading``) partly loaded."""
        if self._held is None:
            raise ValueError("the offloaded optimizer is closed")
        if self._incomplete and not loading:
            raise RuntimeError(
                "only a part of a state has been loaded because loading failed; call restore() or load_state_dict() "
                "again"
            )
        return self._held

    def _readable(self) -> StateInMemory | StateOnDrives:
        """Return the state as :meth:`_usable` does; raise also if a step is half done."""
        state = self._usable()
        if self._sweep is not None:
            raise self._half_done("a previous step failed")
        return state

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Convert a StorageError into an OffloadError: no state is lost."""
        try:
            yield
        except StorageError as error:
            raise self._not_stored() from error

    def _half_done(self, why: str) -> OffloadError:
        assert self._sweep is not None
        sweep = self._sweep
        remedy = (
            "It cannot be finished, because the optimizer raised an exception. Go back to an earlier state with "
            "load_state_dict() or restore(), and to the parameters of that time"
            if sweep.broken
            else "Set the gradients with which the step began, unmodified, and call retry(); or go back to an earlier "
            "state with load_state_dict() or restore(), and to the parameters of that time"
        )
        progress = (
            f": {sweep.done} of {len(sweep.order)} buckets (groups of parameters that are stepped together) have been "
            f"stepped, and the others have their values after step {self._steps}"
            if sweep.order
            else ""
        )
        return OffloadError(
            f"step {self._steps + 1} is half done ({why}){progress}. {remedy}",
            step=self._steps,
            finished=False,
        )

    def _not_stored(self) -> OffloadError:
        return OffloadError(
            f"step {self._steps} is complete, but a part of its state could not be stored; it is still in memory. "
            "retry() writes it again",
            step=self._steps,
            finished=True,
        )


def refused_step(*_: Any, **__: Any) -> Any:
    """Raise: this is the step() of an optimizer that has been offloaded."""
    raise RuntimeError(
        "step(): this optimizer has been offloaded; call step() of the optimizer that offload_optimizer() or "
        "offload_training() returned"
    )


# Schedulers that were made with the original optimizer look for this attribute.
refused_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _shapes_of(
    groups: Sequence[dict[str, Any]],
) -> dict[torch.Tensor, tuple[int, torch.Size, torch.dtype, tuple[int, ...]]]:
    """Return the group's number, the shape, the dtype and the strides of each parameter."""
    return {
        param: (number, param.shape, param.dtype, param.stride())
        for number, group in enumerate(groups)
        for param in group["params"]
    }


def _describe(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value) if isinstance(value, torch.Size) else value}"
        for name, value in zip(names, values, strict=True)
    )


def ranks() -> int:
    """Return the number of ranks: the processes of torch.distributed, or 1 without it."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _common_step(steps: list[int]) -> int | None:
    """Return the newest committed step that all ranks have, or None if no rank has any.

    Raises
    ------
    RuntimeError
        Some ranks have committed steps, but none in common. The message lists them; it is raised on all ranks.
    """
    of_ranks: list[Any] = [None] * ranks()
    torch.distributed.all_gather_object(of_ranks, steps)
    common = set(steps).intersection(*of_ranks)
    if common or not any(of_ranks):
        return max(common, default=None)
    listed = ", ".join(f"rank {rank}: {each or None}" for rank, each in enumerate(of_ranks))
    raise RuntimeError(
        f"ranks have no committed step in common ({listed}) and cannot continue together. Remedy: restore a checkpoint "
        "that all ranks have, or call discard_committed() on all of them"
    )


def checked_options(
    optimizer: torch.optim.Optimizer,
    memory_budget: int | str,
    kind: Kind | None,
    master_dtype: torch.dtype | None,
    commit: Commit,
    endurance: int | str | None,
) -> tuple[int, dict[str, Any]]:
    """Check options of ``offload_optimizer()`` and ``offload_training()``.

    Return the budget in bytes, and the other options as keyword arguments of :class:`OffloadedOptimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if isinstance(optimizer, OffloadedOptimizer) or vars(optimizer).get("step") is refused_step:
        raise ValueError("optimizer: it is offloaded already")
    one_of(commit, "commit", ("none", "step", "fsync"))
    nbytes = checked_nbytes(memory_budget, "memory_budget")
    endurance_nbytes = None if endurance is None else checked_nbytes(endurance, "endurance")
    known_of(optimizer, kind)
    owned = set(params_in(optimizer.param_groups))
    for key in optimizer.state:
        if key not in owned:
            raise NotSeparableError(
                f"{type(optimizer).__name__} cannot be offloaded: it has state for {key!r}, which is not a parameter"
            )
    if master_dtype is not None:
        check_master(optimizer, master_dtype)
    options = {
        "kind": kind,
        "master_dtype": master_dtype,
        "commit": commit,
        "endurance_nbytes": endurance_nbytes,
    }
    return nbytes, options


def opened_store(
    directories: Path | Sequence[Path],
    weights: Sequence[float] | None,
    commit: Commit,
    undo: contextlib.ExitStack,
) -> tuple[TensorStore, list[Saved]]:
    """Return a store in directories, and the commits of an earlier run there; ``undo`` closes all of them."""
    paths = directories if commit == "none" else of_this_rank(directories)
    store = TensorStore(paths, weights=weights, temporary=commit == "none")
    undo.callback(store.close)
    earlier = [] if commit == "none" else open_commits(of_this_rank(directories))
    for each in earlier:
        undo.callback(each.close)
    return store, earlier


def of_this_rank(path: Path | Sequence[Path]) -> list[str]:
    """Return paths with this rank's subdirectory if there are several ranks."""
    paths: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    names: list[str] = [os.fsdecode(each) for each in paths]
    if not _is_distributed():
        return names
    return [str(pathlib.Path(name) / f"rank-{torch.distributed.get_rank():05d}") for name in names]
