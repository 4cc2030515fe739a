"""An optimizer with its state on drives, which steps any torch optimizer bucket by bucket, bit for bit as in memory.

A *unit* is a parameter, or a piece of a large one, with its state. A *bucket* is one tensor in the store, with the
state of some units that are stepped together (``plan.py``). The original optimizer does the arithmetic: the
:class:`~tensorferry.offload.lending.Lender` calls it for one bucket at a time. The
:class:`~tensorferry.offload.probe.Probe` finds out, in trials with small data, whether this gives the same result as
one call for all parameters. A :class:`Sweep` is one pass over the buckets. During it, the
:class:`~tensorferry.offload.residency.Residency` reads buckets into memory ahead of their use and writes stepped ones
behind. If a GPU does the arithmetic, :class:`~tensorferry.offload.staging.Staging` copies buckets to it and back.

A *master* is a copy of a parameter in another dtype, which is stepped instead of the parameter. *Handed-out states* are
the states that users have read through :attr:`OffloadedOptimizer.state`; to *settle* them is to write those that users
have changed back into the buckets (``view.py``). If the whole state fits in the memory budget, the original optimizer
keeps it, and buckets are used only to save it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import threading
import time
import warnings
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree

from tensorferry.base.checks import checked_nbytes, one_of
from tensorferry.base.processes import Interrupts, Owned
from tensorferry.errors import StorageError
from tensorferry.offload import plan
from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.errors import NotSeparableError, OffloadError
from tensorferry.offload.lending import Lender, class_method
from tensorferry.offload.optimizer_snapshot import HOOKS
from tensorferry.offload.plan import (
    MASTER,
    Bucket,
    Planner,
    Unit,
    check_master,
    check_params,
    local_of,
    params_in,
)
from tensorferry.offload.probe import Probe, attributes_of, pattern
from tensorferry.offload.residency import Residency
from tensorferry.offload.saved import Saved, open_commits, pack, packed_params, to_record
from tensorferry.offload.staging import Staging
from tensorferry.offload.states import (
    UnplannedError,
    cast_like_torch,
    is_planned,
    like_param,
    put_state,
    shape_of_state,
    state_of,
    twin_of,
)
from tensorferry.offload.threads import StepThreads
from tensorferry.offload.view import HandedOutStates, StateView
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tensorferry.base.checks import Path

# A state with fewer bytes causes no warning about the drive: its steps are so short that waiting does not matter.
_WARNING_MIN_NBYTES = 64 << 20

# If the original optimizer keeps the whole state in memory, buckets are needed only to save the state. The memory for
# them may then exceed the budget by at most this many bytes.
_MAX_EXCESS_NBYTES = 64 << 20

Commit: TypeAlias = Literal["none", "step", "fsync"]
StepDevice: TypeAlias = Literal["param", "cpu"]


class OffloadedOptimizer(Owned, torch.optim.Optimizer):
    """An optimizer with its state on drives; made by :func:`offload_optimizer`.

    It is a ``torch.optim.Optimizer`` and works with schedulers, ``GradScaler``, gradient clipping, hooks and closures.
    ``param_groups`` are those of the original optimizer. :attr:`state` and :meth:`state_dict` have the same contents
    as in memory.
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
        self._threads = StepThreads()
        self._warned = False
        self._buckets: list[Bucket] = []
        self._pieces: dict[torch.Tensor, list[tuple[Bucket, Unit]]] = {}
        self._residency: Residency | None = None
        self._staging: Staging | None = None
        # Whether the whole state is in memory, in the original optimizer's own `state`.
        self._in_memory = False
        self._sweep: Sweep | None = None
        self._handed_out = HandedOutStates(self._put_back)
        # The result of `_patterns_now()` when the layout was planned, or at the end of the last step.
        self._patterns: list[Any] = []
        # Entries of the state that belong to no parameter: torch allows any key in a state.
        self._extra_entries: dict[Any, Any] = {}
        # Whether `state` returns tensors mapped from the store, for state_dict().
        self._maps_state = False
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0
        self._incomplete = False  # whether a load has failed part-way
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._lender = Lender(
            optimizer,
            lambda param: master_dtype or param.dtype,
            on_host=step_device == "cpu",
        )
        self._step_device = step_device
        self._probe = Probe(optimizer, self._lender)
        self._planner = Planner(
            self._probe, self._lender.step_dtype, params_nbytes=self._params_nbytes
        )
        # Both optimizers share one list of groups and one set of hooks, so hooks registered earlier run once per step.
        kept, state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = self.param_groups
        # A copy, which becomes the state if it stays in memory. After a failure, the optimizer gets the old one back.
        optimizer.state = defaultdict(dict, state)
        try:
            self._install(self._planned())
            self._fill(self._state_before)
            self._extra_entries = {
                key: value for key, value in state.items() if not isinstance(key, torch.Tensor)
            }
            self._take_params()
        except BaseException:
            optimizer.param_groups, optimizer.state = kept, state
            raise
        for name in HOOKS:
            # The same dict object: a hook's handle removes the hook from it.
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            self._step_supports_amp_scaling = optimizer._step_supports_amp_scaling
        if not self._in_memory:
            optimizer.state = defaultdict(dict)
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
        hooks.

        Raises
        ------
        OffloadError
            A read or write failed: :meth:`retry` continues.
        NotSeparableError
            The original optimizer did something that it had not done in the trials with small data before; the
            step is half done.
        RuntimeError
            An earlier run has committed a step in the directories, and neither :meth:`resume` nor
            :meth:`discard_committed` was called; or a state that was read before an earlier step has been written to.
        TypeError, ValueError
            A gradient is sparse, or the optimizer needs one that is missing; a parameter has another shape, dtype or
            strides than before; or the list of a group's parameters was changed directly.
        """
        loss = self._hooked_step(*(() if closure is None else (closure,)))
        if self._commit != "none" and not self._committed:
            with self._locked():
                self._commit_step(self._usable())
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
        with self._locked():
            sweep = self._begun_step()
            if sweep is None:
                return loss
            self._go_on(self._usable(), sweep)
            if closure is None:
                loss, self._lender.returned = self._lender.returned, None
            # Schedulers that were made with the original optimizer read this to see whether it has stepped.
            vars(self._inner)["_opt_called"] = True
            self._warn_of_drive()
        return loss

    def _begun_step(self) -> Sweep | None:
        """Begin a step and return its sweep, or None if GradScaler has found infinite gradients and skips the step."""
        self._usable()
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
        self._handed_out.settle()
        with self._interrupts.deferred():
            self._check_step()
        with self._storing():
            self._usable().check()
        return Sweep(self._order(self._is_stepped), class_method(self._inner), scaling)

    def _apply(self, name: str) -> None:
        """Call another method of the original optimizer, such as train() or eval(), for all parameters."""
        with self._locked():
            residency = self._readable()
            self._handed_out.settle()
            order = self._order(lambda _: True)
            sweep = Sweep(order, class_method(self._inner, name), {}, is_step=False)
            with self._with_all(sweep):
                self._go_on(residency, sweep)

    @contextlib.contextmanager
    def _with_all(self, sweep: Sweep) -> Iterator[None]:
        """Lend the optimizer also parameters without gradients, unless the sweep is a step: methods may need them."""
        # Each call gets the parameters of one bucket only.
        alone = self._lender.alone
        self._lender.alone = alone or not sweep.is_step
        try:
            yield
        finally:
            self._lender.alone = alone

    def retry(self) -> None:
        """Continue after a failure: finish a step that is half done, and write what could not be written.

        Gradients must be unchanged.

        Raises
        ------
        OffloadError
            Another failure; or gradients have changed, and the step cannot be finished.
        """
        with self._locked():
            residency = self._usable()
            with contextlib.suppress(StorageError), self._interrupts.deferred():
                residency.drain()  # collect failed writes: flush() below writes those buckets again
            if self._sweep is not None:
                if self._sweep.broken:
                    raise self._half_done("a previous attempt failed")
                changed = self._sweep.changed_gradient(self._buckets, self._gradient_of)
                if changed is not None:
                    raise self._half_done(
                        f"the gradient of a parameter of shape {tuple(changed.shape)} has been replaced, removed or "
                        "modified since the step began"
                    )
                with self._with_all(self._sweep):
                    self._go_on(residency, self._sweep)
            with self._storing():
                residency.flush()
            self._commit_step(residency)

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
            residency = self._usable()
            moved = residency.counters
            total = self._total_nbytes()
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
                "state_nbytes": total,
                "memory_nbytes": total if self._in_memory else residency.nbytes,
                "buckets": len(self._buckets),
                "store": self._store.stats(),
            }

    def _order(self, wanted: Callable[[torch.Tensor], bool]) -> list[int]:
        """Return the indexes of the buckets with the wanted parameters, in the order of a sweep.

        The direction alternates from step to step: the last buckets of a step are still in memory, and the next step
        begins with them.
        """
        if self._in_memory:
            return []
        order = [
            bucket.index
            for bucket in self._buckets
            if any(wanted(unit.param) for unit in bucket.units)
        ]
        return order[::-1] if self._steps % 2 else order

    def _check_step(self) -> None:
        """Raise if the step cannot be done, before anything has changed."""
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                planned = self._shapes.get(param)
                now = number, param.shape, param.dtype, param.stride()
                if planned != now:
                    if planned is None:
                        raise ValueError(
                            f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} was put into the list "
                            "directly; remove it from the list and pass it to add_param_group()"
                        )
                    names = ("group", "shape", "dtype", "strides")
                    raise ValueError(
                        f"param_groups[{number}]: a parameter now has {_describe(names, now)}; when it was offloaded, "
                        f"it had {_describe(names, planned)}; offload a new optimizer"
                    )
                grad = self._gradient_of(param)
                placements: Any = getattr(grad, "placements", None)
                if placements not in (None, getattr(param, "placements", None)):
                    self._probe.check_placed(group, param, grad)
                if grad is not None and grad.layout != torch.strided:
                    raise TypeError(
                        f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} has a sparse gradient; "
                        "offloaded optimizers support only dense ones (remedy: sparse=False in nn.Embedding)"
                    )
        if sum(len(group["params"]) for group in self.param_groups) != len(self._shapes):
            raise ValueError(
                "param_groups: parameters have been removed; make a new optimizer without them"
            )
        self._check_gradients()
        patterns = self._patterns_now()
        stays = patterns == self._patterns
        # With the whole state in memory, one call steps all parameters. Then it does not matter whether parameters may
        # be stepped apart or in pieces.
        if not self._in_memory:
            self._check_apart()
            if stays and not self._pieces_may_stay():
                self._probe.forget()
                stays = False
        if not stays:
            self._plan_again()
            self._patterns = patterns

    def _check_apart(self) -> None:
        """Raise if a trial of three parameters shows that the step now depends on several parameters at once."""
        params = list(filter(self._is_stepped, self._shapes))
        tried = list(dict.fromkeys([*params[:1], *params[len(params) // 2 :][:1], *params[-1:]]))
        if len(tried) < 2 or self._probe.gradients != "any":
            return
        self._probe.record_initial_state(
            {param: shape_of_state(self._pieces[param][0][1]) for param in tried}
        )
        if not self._probe.may_step_apart(tried):
            raise NotSeparableError(
                f"{type(self._inner).__name__} can no longer be stepped exactly: its step now depends on several "
                "parameters at once, or on random numbers, which it did not in the test steps when it was offloaded. "
                "This step has not begun, and nothing has changed"
            )

    def _pieces_may_stay(self) -> bool:
        """Return whether pieces of parameters may still be stepped separately.

        Try one parameter of each kind, and one more, which is a different one in each step.
        """
        cut = [
            param
            for param, pieces in self._pieces.items()
            if pieces[0][1].stop is not None and self._is_stepped(param)
        ]
        if not cut:
            return True
        of_kind = {
            (self._shapes[param][0], param.dim(), param.dtype, attributes_of(param)): param
            for param in cut
        }
        for param in dict.fromkeys([*of_kind.values(), cut[self._steps % len(cut)]]):
            self._probe.record_initial_state({param: shape_of_state(self._pieces[param][0][1])})
            if not self._probe.may_step_in_pieces(param):
                return False
        return True

    def _check_gradients(self) -> None:
        """Raise if parameters lack gradients that the optimizer needs when it steps parameters separately."""
        if self._probe.gradients == "any":
            return
        with_state = {id(param) for param in self._params_with_state()}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                late = id(param) not in with_state and with_state
                lacks = self._gradient_of(param) is None
                if lacks and (self._probe.gradients == "always" or not with_state):
                    what = "has no gradient"
                elif not lacks and late:
                    what = "got its first gradient in a later step than other parameters"
                else:
                    continue
                raise ValueError(
                    f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} {what}. "
                    f"{type(self._inner).__name__} then raises, or gives other results than in memory. Remedy: a "
                    "gradient of zeros, or foreach=False and fused=False if the optimizer has these options"
                )

    def _is_stepped(self, param: torch.Tensor) -> bool:
        """Return whether the next step involves a parameter."""
        return self._lender.alone or self._gradient_of(param) is not None

    def _gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, or the object that represents it."""
        return param.grad

    def _bring(self, bucket: Bucket | None) -> None:
        """Bring a bucket's parameters and gradients into memory; in this class they are always in memory.

        With None, release those of the bucket that was brought last, because no other bucket is stepped now.
        """

    def _patterns_now(self) -> list[Any]:
        """Return the properties of the groups' values on which the layout of the state may depend."""
        return [pattern(group, numbers=True) for group in self.param_groups]

    def _plan_again(self) -> None:
        """Plan the layout again for the groups' new values, and move the state if the layout differs."""
        planned = self._planned()
        if _layout_key(planned) == _layout_key(self._buckets):
            return
        before = self._buckets
        states = self._mapped_state()
        # _mapped_state() has put the state into buckets. If the state was in memory and had tensors that the user put
        # there, the layout was planned once more with them. Then `planned` lacks them, so plan it again, too.
        if self._buckets is not before:
            planned = self._planned()
        self._install(planned)
        self._fill(lambda param: states.get(param))

    def _go_on(self, residency: Residency, sweep: Sweep) -> None:
        """Step the remaining buckets of a sweep. With ``sweep.ends``, no more buckets will follow, so end the step."""
        with self._interrupts.deferred(), self._timing(residency), self._with_scaling(sweep):
            self._sweep = sweep
            try:
                if self._in_memory:
                    sweep.broken = True  # a failed call cannot be repeated
                    self._lender.call_in_memory(sweep.function)
                else:
                    with self._limited_threads():
                        self._step_buckets(residency, sweep)
            except StorageError as error:
                raise self._half_done(str(error)) from error
            except BaseException:
                if sweep.done == 0 and not sweep.broken:
                    self._sweep = None  # no bucket has been stepped
                raise
            if not sweep.ends:
                return
            self._sweep = None
            self._patterns = self._patterns_now()
            if sweep.is_step:
                self._steps += 1
                self._committed = False

    def _limited_threads(self) -> contextlib.AbstractContextManager[None]:
        if not self._by_elements:
            return contextlib.nullcontext()
        return self._threads.limited(
            max((unit.numel for bucket in self._buckets for unit in bucket.units), default=0)
        )

    def _step_buckets(self, residency: Residency, sweep: Sweep) -> None:
        lender = self._lender
        whole = False
        try:
            sweep.snapshot = lender.begin(sweep.snapshot)
            sweep.note_gradients(lender.gradients())
            left = sweep.order[sweep.done :]
            if sweep.ends:
                residency.begin(left)
            try:
                for index in left:
                    bucket = self._buckets[index]
                    self._bring(bucket)
                    memory = residency.acquire(index)
                    here = memory if self._staging is None else self._staging.load(memory)
                    sweep.broken = True
                    lender.call(
                        bucket.units, here, sweep.function, check=sweep.is_checked(self._steps)
                    )
                    sweep.broken = False
                    sweep.done += 1
                    sweep.note_gradients(lender.gradients(bucket.units))
                    if self._staging is None:
                        residency.release(index, dirty=True)
                        continue
                    self._staging.store(index, here, memory)
                    for stored in self._staging.stored(but=1):
                        residency.release(stored, dirty=True)
            finally:
                for stored in self._staging.stored() if self._staging is not None else ():
                    residency.release(stored, dirty=True)
            # If no parameter has a gradient, there is no bucket to step. Call the optimizer nevertheless: it may count
            # the step in its groups.
            if not sweep.order:
                sweep.broken = True
                lender.call([], torch.empty(0, dtype=torch.uint8, device="cpu"), sweep.function)
            whole = True
        finally:
            self._bring(None)
            lender.end(undone=not whole or not sweep.ends)

    @contextlib.contextmanager
    def _with_scaling(self, sweep: Sweep) -> Iterator[None]:
        """Set the attributes that GradScaler leaves for optimizers that unscale gradients themselves."""
        vars(self._inner).update(sweep.scaling)
        try:
            yield
        finally:
            for name in sweep.scaling:
                vars(self._inner).pop(name, None)

    @contextlib.contextmanager
    def _timing(self, residency: Residency) -> Iterator[None]:
        """Add the time of the block to the steps' time, and the waiting in it to the waiting time."""
        began, waited = time.perf_counter(), residency.counters.wait_seconds
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            waited = residency.counters.wait_seconds - waited
            self._threads.note(seconds, waited)
            self._seconds += seconds
            self._waited_seconds += waited

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
            residency = self._readable()
            self._settle_and_store(residency)
            record = self._record()
            self._store.snapshot(of_this_rank(path), record)

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
            The checkpoint has other parameters, or the state of a different optimizer; nothing has changed.
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
        return to_record(
            *(self._steps, type(self._inner).__name__, groups, list(self._shapes), self._buckets),
            extra=self._extra_entries,
            slabs=self._slabs_of_params(),
        )

    def _slabs_of_params(self) -> list[tuple[str, int]] | None:
        """Return the name of the tensor in the store, and the offset in it, for each parameter.

        Return None if parameters are in the store only in commits.
        """
        return None

    def _store_params(self) -> None:
        """Write parameters into the store."""
        tickets = []
        for name, members in packed_params(list(self._shapes)):
            # At most two writes are in flight: small parameters are written as packed copies, which need memory.
            tickets.append(self._store.write(name, pack(members)))
            if len(tickets) > 1:
                tickets.pop(0).result()
        for ticket in tickets:
            ticket.result()

    def _commit_step(self, residency: Residency) -> None:
        """Commit the state and the current parameters, which hooks may have changed after the step."""
        if self._commit == "none" or self._committed or self._sweep is not None:
            return
        self._settle_and_store(residency)
        try:
            with self._interrupts.deferred():
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
        saved.check_groups(self.param_groups)
        twin = twin_of(self._inner, list(self.param_groups))
        twin.load_state_dict({"state": {}, "param_groups": saved.groups})
        saved.check_values(twin)
        if with_params:
            saved.check_places(in_slabs=self._stores_params)
        params = list(params_in(twin.param_groups))
        saved.check_params(params, [self._lender.step_dtype(param) for param in params])
        with self._groups_replaced(twin.param_groups):
            if saved.optimizer == type(self._inner).__name__:
                self._probe.record_initial_state(
                    {param: saved.state_like(index) for index, param in enumerate(params)}
                )
            planned = self._planned()
            group_of = {param: group for group in twin.param_groups for param in group["params"]}
            buckets = saved.layout(
                params,
                planned,
                lambda param: self._probe.may_be_cut(group_of[param], param),
                type(self._inner).__name__,
            )
            plan.check_budget(self._budget_nbytes, buckets, self._at_once(), usual=False)
        self._sweep = None
        self._extra_entries = saved.extra
        self._install(buckets)
        residency = self._usable(loading=True)
        self._incomplete = True
        with self._interrupts.deferred():
            residency.begin([bucket.index for bucket in buckets], fresh=True)
            for bucket in buckets:
                memory = residency.acquire(bucket.index)
                saved.read(bucket, memory)
                residency.release(bucket.index, dirty=True)
            if with_params:
                self._load_params(saved, params)
            self._load_into_memory()
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

    def _warn_of_drive(self) -> None:
        if self._warned or self._steps < 5 or self._in_memory:
            return
        total = self._total_nbytes()
        if total < _WARNING_MIN_NBYTES:
            return
        share = self._waited_seconds / max(self._seconds, 1e-9)
        if share > 0.5:
            self._warned = True
            warnings.warn(
                f"{share:.0%} of the time in optimizer steps is spent waiting for the drive: the state has {total} "
                f"bytes, and memory_budget is {self._budget_nbytes} bytes. A larger budget reduces reads and writes; "
                f"with {total} bytes there are none",
                RuntimeWarning,
                stacklevel=5,
            )

    # State

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The state by parameter. ``state[param]`` reads one parameter's state; "master" is its master, if it has one.

        Until the next step, changes to a parameter's state have the same effect as in memory, in-place changes of its
        tensors included. After that step, the same tensors have the values of an earlier step, and a write to one of
        them makes the following step raise RuntimeError. If states of more than 32 MiB have been read since the last
        step, the read of another parameter's state already ends this period: changes up to then are kept, and a later
        write to these states makes the next step raise.
        """
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        if self._residency is not None:
            with self._locked():
                StateView(self).replace(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's optimizers: a snapshot with tensors mapped from the drive.

        The tensors need no additional memory, and training does not change them.
        """
        with self._locked():
            self._maps_state = True
            own, kept = type(self._inner).state_dict, self._inner.state
            try:
                if own is torch.optim.Optimizer.state_dict:
                    return super().state_dict()
                self._inner.state = defaultdict(dict, self._mapped_state())
                return own(self._inner)
            finally:
                self._maps_state = False
                self._inner.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of the original one.

        Parameters are loaded one after the other. Values are cast as by the optimizer's own ``load_state_dict``.

        Raises
        ------
        ValueError, MemoryBudgetError
            The state dict has other parameters, or needs a larger memory budget; nothing has changed.
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
            params = list(params_in(twin.param_groups))
            for number in numbers:
                if not isinstance(saved.get(number, {}), dict):
                    raise ValueError(
                        f"state_dict: the state of parameter {number} is a {type(saved[number]).__name__}, not a dict"
                    )
            states = {
                param: saved[number]
                for number, param in zip(numbers, params, strict=True)
                if number in saved
            }
            with self._groups_replaced(twin.param_groups):
                planned = self._planned()
                pieces = _units_by_param(planned)
                known = [
                    is_planned(number, pieces[param], saved[number])
                    for number, param in zip(numbers, params, strict=True)
                    if number in saved
                ]
                # The state dict has state for which the trials did not plan: an optimizer may create state only in
                # certain steps. Plan for it, too.
                if not all(known):
                    self._probe.record_initial_state(states)
                    planned = self._planned()
            number_of = dict(zip(params, numbers, strict=True))

            def loaded(param: torch.Tensor) -> Any:
                state = saved.get(number_of[param])
                return None if not state else self._cast(param, state, state_dict)

            self._sweep = None
            vars(self._inner).update(own)
            self._install(planned)
            self._fill(loaded)
            self._extra_entries = {
                key: value for key, value in saved.items() if key not in number_of.values()
            }
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

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
        target = self._lender.target_of(param)
        alike = torch.empty((), dtype=target.dtype, device=target.device)
        if target is param:
            alike = param
        state = {
            key: local_of(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        master = state.pop(MASTER, None) if self._lender.step_dtype(param) != param.dtype else None
        group_number, *_ = self._shapes[param]
        group = self.param_groups[group_number]
        cast = cast_like_torch(self._inner, group, alike, state, other_entries)
        return {**cast, MASTER: master} if master is not None else cast

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :class:`torch.optim.Optimizer`.

        Raises
        ------
        NotSeparableError, MemoryBudgetError, StorageError
            The group cannot be offloaded, or memory or space for its state is missing; nothing has changed.
        """
        if self._residency is None:  # called by the constructor of torch's class
            super().add_param_group(param_group)
            return
        with self._locked():
            residency = self._readable()
            self._handed_out.settle()
            # With the new group, the state may no longer fit in memory, and then it stays in buckets. Put it into
            # buckets before the group is added: tensors that the user has put into it may need another layout of them.
            if self._in_memory:
                with self._storing():
                    self._store_from_memory(residency)
            type(self._inner).add_param_group(self._inner, param_group)
            group = self.param_groups[-1]
            try:
                check_params(self.param_groups)
                self._probe.record_initial_state(
                    {param: self._inner.state.get(param) for param in group["params"]}
                )
                with self._interrupts.deferred():
                    self._probe.try_together(self.param_groups)
                    added = self._planner.pack([group], len(self._shapes), len(self._buckets))
                buckets = [*self._buckets, *added]
                self._check_budget(buckets)
                stays = self._in_memory and self._fits_at_home(buckets)
                staging = self._staging_for(buckets)
                with self._interrupts.deferred():
                    residency.resize(self._memory_for(buckets, in_memory=stays))
                    residency.add(added)
            except BaseException:
                self.param_groups.pop()
                for param in group["params"]:
                    self._inner.state.pop(param, None)
                raise
            begun = {param: self._inner.state.pop(param, None) for param in group["params"]}
            if self._in_memory and not stays:
                self._in_memory = False
                self._inner.state = defaultdict(dict)
                self._lender.masters.clear()
            self._buckets, self._staging = buckets, staging
            self._index_params()
            self._fill(begun.get, [bucket.index for bucket in added])

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
        with self._locked():
            residency = self._usable()
            with self._storing():
                residency.drain()

    def close(self) -> None:
        """Release the memory and the space on drives; state that has not been saved is lost."""
        if self.is_parents:
            return  # memory and files belong to the parent process
        with self._lock:
            residency, self._residency = self._residency, None
            self.discard_committed()
            if residency is None:
                return
            try:
                residency.settle()
            finally:
                for bucket in self._buckets:
                    for unit in bucket.units:
                        unit.forget_views()
                self._inner.state = defaultdict(dict)
                self._store.close()

    # Where state is

    def _planned(self) -> list[Bucket]:
        """Plan the layout of the state for the current groups."""
        check_params(self.param_groups)
        # During a trial, parameters have trial data: a signal must not leave them so.
        with self._interrupts.deferred():
            self._probe.try_together(self.param_groups)
            buckets = self._planner.pack(self.param_groups)
        self._check_budget(buckets)
        return buckets

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        plan.check_budget(self._budget_nbytes, buckets, self._at_once())

    def _at_once(self) -> int:
        """Return how many buckets must fit into memory together.

        With a GPU it is three: one is copied to the GPU, one is stepped there, and one is copied back.
        """
        return 1 if self._device_to_stage_on() is None else plan.MIN_BUCKETS

    def _memory_for(self, buckets: Sequence[Bucket], *, in_memory: bool) -> int:
        """Return the bytes of memory for buckets: the budget, or with ``in_memory`` enough to save the state."""
        needed = plan.needed_nbytes(buckets, self._at_once())
        if in_memory:
            return needed
        total = sum(round_to_pages(bucket.nbytes) for bucket in buckets)
        return min(self._budget_nbytes // plan.PAGE_NBYTES * plan.PAGE_NBYTES, total)

    def _fits_at_home(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether the original optimizer can keep the whole state in memory, in its own ``state``."""
        total = sum(bucket.nbytes for bucket in buckets)
        needed = plan.needed_nbytes(buckets)
        return (
            self._device_to_stage_on() is None
            and total + max(needed - _MAX_EXCESS_NBYTES, 0) <= self._budget_nbytes
        )

    def _total_nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets)

    def _install(self, buckets: list[Bucket]) -> None:
        """Replace the layout of the state; previous state is lost."""
        # Free the old memory before allocating the new one. If that allocation fails, the optimizer stays closed.
        before, self._residency = self._residency, None
        if before is not None:
            before.forget()
            self._inner.state = defaultdict(dict)
            self._lender.masters.clear()
        del before
        self._handed_out.forget()
        device = self._device_to_stage_on()
        self._in_memory = self._fits_at_home(buckets)
        residency = Residency(
            self._store,
            self._memory_for(buckets, in_memory=self._in_memory),
            all_in_flight=self._commit != "none",
            gpu=-1 if device is None or device.type != "cuda" else device.index or 0,
        )
        if not self._in_memory:
            residency.touch()
        self._staging = self._staging_for(buckets)
        residency.interrupted = self._interrupts.was_repeated
        residency.add(buckets)
        self._buckets, self._residency = buckets, residency
        self._index_params()

    def _staging_for(self, buckets: Sequence[Bucket]) -> Staging | None:
        device = self._device_to_stage_on()
        if device is None or not buckets:
            return None
        return Staging(device, max(bucket.nbytes for bucket in buckets))

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
        self._shapes = {
            param: (number, param.shape, param.dtype, param.stride())
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        self._patterns = self._patterns_now()
        self._pieces = _units_by_param(self._buckets)
        # Whether each element is stepped independently. Then the number of threads that share the work does not change
        # the result, and `_threads` may limit it.
        self._by_elements = (
            not self._in_memory
            and self._staging is None
            and all(
                self._probe.may_be_cut(group, param)
                for group in self.param_groups
                for param in group["params"]
                if local_of(param).numel() > 1
            )
        )

    def _fill(
        self, states: Callable[[torch.Tensor], Any], indices: Iterable[int] | None = None
    ) -> None:
        """Set the state of each parameter to what ``states`` returns for it; None stands for no state."""
        residency = self._usable(loading=True)
        buckets = self._buckets if indices is None else [self._buckets[at] for at in indices]
        self._incomplete = True
        with self._interrupts.deferred():
            if self._in_memory:
                for param in _units_by_param(buckets):
                    self._set_in_memory(param, states(param))
            else:
                self._fill_buckets(residency, buckets, states)
            self._incomplete = False

    def _fill_buckets(
        self,
        residency: Residency,
        buckets: Sequence[Bucket],
        states: Callable[[torch.Tensor], Any],
    ) -> None:
        """Put states into buckets; a bucket in which no unit has state stays unchanged."""
        current: tuple[Any, Any] = (None, None)
        residency.begin([bucket.index for bucket in buckets], fresh=True)
        for bucket in buckets:
            memory = residency.acquire(bucket.index)
            filled = False
            for unit in bucket.units:
                if current[0] is not unit.param:
                    current = unit.param, states(unit.param)
                if current[1] is None:
                    unit.forget()
                    continue
                filled = True
                put_state(unit, current[1], memory)
            residency.release(bucket.index, dirty=filled)

    # State in memory: if all of it fits, the original optimizer keeps it, and buckets are used only to save it.

    def _set_in_memory(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        target = self._lender.target_of(param)
        self._inner.state.pop(target, None)
        self._inner.state.pop(param, None)
        self._lender.masters.discard(param)
        if not state:
            return
        state = dict(state)
        if self._lender.step_dtype(param) != param.dtype:
            self._lender.set_master(param, state.pop(MASTER, None))
        if state:
            self._inner.state[target] = _pytree.tree_map(_owned_copy, state)

    def _state_in_memory(self, param: torch.Tensor) -> dict[Any, Any] | None:
        target = self._lender.target_of(param)
        state = self._inner.state.get(target)
        if param in self._lender.masters:
            return {**(state or {}), MASTER: target.detach()}
        return state or None

    def _store_from_memory(self, residency: Residency) -> None:
        """Put the state that is in memory into buckets, and store them."""
        try:
            self._fill_buckets(residency, self._buckets, self._state_in_memory)
        except UnplannedError:
            # The state has tensors that were not planned, for example from a user.
            self._probe.record_initial_state(
                {param: self._state_in_memory(param) for param in self._shapes}
            )
            planned = self._planner.pack(self.param_groups)
            residency.forget()
            residency.resize(self._memory_for(planned, in_memory=True))
            residency.add(planned)
            self._buckets = planned
            self._index_params()
            self._fill_buckets(residency, planned, self._state_in_memory)

    def _load_into_memory(self) -> None:
        """Move state that was just put into buckets into the original optimizer."""
        if self._in_memory:
            for param, pieces in self._pieces.items():
                self._set_in_memory(param, state_of(pieces, self._bucket_reader()))

    def _settle_and_store(self, residency: Residency) -> None:
        self._handed_out.settle()
        with self._storing():
            if self._in_memory:
                self._store_from_memory(residency)
            residency.flush()

    # Access of users to the state

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

    def _params_with_state(self) -> list[torch.Tensor]:
        if self._in_memory:
            return [param for param in self._shapes if self._state_in_memory(param)]
        return [
            param for param, pieces in self._pieces.items() if any(unit.kept for _, unit in pieces)
        ]

    def _bucket_reader(self) -> Callable[[Bucket], torch.Tensor]:
        """Return a function that returns a bucket's bytes, in memory or read from the store.

        The function keeps the bytes of the last bucket for the next call, because parameters share buckets.
        """
        residency = self._usable(loading=True)
        held: dict[int, torch.Tensor] = {}

        def read(bucket: Bucket) -> torch.Tensor:
            if bucket.index not in held:
                held.clear()
                memory = residency.bytes_of(bucket.index)
                if memory is None:
                    memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
                    with self._storing():
                        residency.drain()
                    if bucket.nbytes:
                        self._store.read(bucket.name, memory).result()
                held[bucket.index] = memory
            return held[bucket.index]

        return read

    def _state_of_one(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a parameter; changes to it are stored before the next step."""
        with self._locked():
            self._readable()
            if param not in self._shapes:
                return {}
            if self._in_memory and self._lender.is_direct(param):
                state: dict[Any, Any] = self._inner.state[param]
                return state
            return self._handed_out.state_of(param, self._read_one)

    def _read_one(self, param: torch.Tensor) -> dict[Any, Any]:
        if self._in_memory:
            local = local_of(param)
            copied: dict[Any, Any] = _pytree.tree_map(
                lambda leaf: like_param(_owned_copy(leaf), param, local),
                self._state_in_memory(param) or {},
            )
            return copied
        pieces = self._pieces[param]
        if not any(unit.kept for _, unit in pieces):
            return {}
        return state_of(pieces, self._bucket_reader())

    def _put_back(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Store a state that a user has changed, or delete it."""
        residency = self._usable()
        if self._in_memory:
            self._set_in_memory(param, state)
            return
        buckets = [bucket for bucket, _ in self._pieces[param]]
        with self._interrupts.deferred():
            residency.begin([bucket.index for bucket in buckets])
            for bucket, unit in self._pieces[param]:
                memory = residency.acquire(bucket.index)
                try:
                    if state:
                        put_state(unit, state, memory)
                    else:
                        unit.forget()
                except UnplannedError as error:
                    raise ValueError(
                        f"state: {error}, was put into the state of a parameter of shape {tuple(param.shape)}; only "
                        "tensors with the name, dtype and shape of those that the optimizer creates, and other tensors "
                        f"below {plan.SMALL_NBYTES} bytes, can be stored"
                    ) from None
                finally:
                    residency.release(bucket.index, dirty=True)

    def _mapped_state(self) -> dict[Any, Any]:
        with self._locked():
            residency = self._readable()
            self._settle_and_store(residency)
            read = self._bucket_reader()
            mapped = {
                param: state_of(self._pieces[param], read, self._store)
                for param in self._params_with_state()
            }
            return {**mapped, **self._extra_entries}

    # Checks and errors

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock; raise in a child process after fork(), where a thread of the parent may hold it forever."""
        self._check_process()
        return self._lock

    def _usable(self, *, loading: bool = False) -> Residency:
        """Return the residency; raise if the optimizer is closed, or (unless ``loading``) partly loaded."""
        if self._residency is None:
            raise ValueError("the offloaded optimizer is closed")
        if self._incomplete and not loading:
            raise RuntimeError(
                "only a part of a state has been loaded because loading failed; call restore() or load_state_dict() "
                "again"
            )
        return self._residency

    def _readable(self) -> Residency:
        """Return the residency as :meth:`_usable` does; raise also if a step is half done."""
        residency = self._usable()
        if self._sweep is not None:
            raise self._half_done("a previous step failed")
        return residency

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Defer signals, and convert a StorageError into an OffloadError: no state is lost."""
        try:
            with self._interrupts.deferred():
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


def _owned_copy(leaf: Any) -> Any:
    """Return a copy of a leaf of a state, in separate memory."""
    return local_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _describe(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value) if isinstance(value, torch.Size) else value}"
        for name, value in zip(names, values, strict=True)
    )


def _units_by_param(buckets: Sequence[Bucket]) -> dict[torch.Tensor, list[tuple[Bucket, Unit]]]:
    """Return the buckets and units of each parameter."""
    found: dict[torch.Tensor, list[tuple[Bucket, Unit]]] = {}
    for bucket in buckets:
        for unit in bucket.units:
            found.setdefault(unit.param, []).append((bucket, unit))
    return found


def _layout_key(buckets: Sequence[Bucket]) -> list[Any]:
    """Return the properties that two layouts must have in common for the state to stay where it is.

    They are, for each parameter: whether it is cut into pieces, and the names, dtypes and shapes of its fields.
    """
    return [
        (
            unit.index,
            unit.stop is None,
            [
                (each.name, each.dtype, each.shape if unit.stop is None else ())
                for each in unit.fields
            ],
        )
        for bucket in buckets
        for unit in bucket.units
        if not unit.start
    ]


@dataclass(eq=False)
class Sweep:
    """One pass over buckets, in which each is stepped once; its progress allows a retry."""

    order: list[int]
    function: Callable[[], Any]
    scaling: dict[str, Any]
    is_step: bool = True
    # Whether the step is complete after the buckets in `order`. If not, more buckets will be appended to `order`.
    ends: bool = True
    done: int = 0  # the number of buckets that have been stepped
    # Whether the optimizer raised in the middle of a bucket: set before each call, and cleared after it.
    broken: bool = False
    snapshot: Any = None  # the values that the step began with
    _gradients: dict[torch.Tensor, Any] = field(default_factory=dict)

    def is_checked(self, steps: int) -> bool:
        """Return whether the next bucket is stepped in two ways to compare the results."""
        # One bucket per step after 0, 1, 2, 4, 8, ... complete steps, and a different bucket each time.
        return (
            bool(self.order)
            and not steps & (steps - 1)
            and (self.done == steps.bit_length() % len(self.order))
        )

    def note_gradients(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Record the identity and version of gradients, which must be unchanged for a retry."""
        for param, grad in gradients:
            self._gradients[param] = None if grad is None else (weakref.ref(grad), grad._version)

    def changed_gradient(
        self,
        buckets: Sequence[Bucket],
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Return a parameter in the remaining buckets with another or a modified gradient, or None."""
        for index in self.order[self.done :]:
            for unit in buckets[index].units:
                noted, grad = self._gradients.get(unit.param), gradient_of(unit.param)
                if (noted is None) != (grad is None):
                    return unit.param
                if noted is not None and grad is not None:
                    known, version = noted
                    if known() is not grad or grad._version != version:
                        return unit.param
        return None


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
    if master_dtype is not None:
        check_master(optimizer, master_dtype)
    options = {
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
