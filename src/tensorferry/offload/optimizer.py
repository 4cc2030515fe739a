"""An optimizer whose state is on drives: any of torch's, stepped bucket by bucket, with the result it has in memory."""

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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree

from tensorferry.base.processes import Interrupts, Owned
from tensorferry.errors import StorageError
from tensorferry.offload import plan
from tensorferry.offload.counted import HOOKS
from tensorferry.offload.errors import NotSeparableError, OffloadError
from tensorferry.offload.lending import Lender, class_method
from tensorferry.offload.plan import MASTER, Bucket, Planner, Unit, check_params, local_of
from tensorferry.offload.probe import Probe, attributes_of, pattern
from tensorferry.offload.residency import Residency
from tensorferry.offload.saved import Saved, committed, pack, packed_params, to_record
from tensorferry.offload.staging import Staging
from tensorferry.offload.states import (
    Copied,
    MappedFields,
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
from tensorferry.offload.view import Given, StateView
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tensorferry.base.checks import Path

# Below, steps are too short for a warning to matter.
_WORTH_TELLING_NBYTES = 64 << 20

# What passes through memory while all state is there already: more than this beside the budget is too much.
_MAX_BESIDE_NBYTES = 64 << 20

Commit: TypeAlias = Literal["none", "step", "fsync"]
StepDevice: TypeAlias = Literal["param", "cpu"]


class OffloadedOptimizer(Owned, torch.optim.Optimizer):
    """An optimizer whose state is on drives; made by :func:`offload_optimizer`.

    It is a ``torch.optim.Optimizer``: schedulers, ``GradScaler``, clipping, hooks and closures take it as it is, and
    ``param_groups`` are those of the optimizer it was made of. It has the same state, too, by :attr:`state` and
    :meth:`state_dict`.
    """

    _refusal = "this optimizer is the parent process's: its state cannot be used after fork()"
    _params_nbytes = math.inf  # of the units of a bucket
    _stores_params = False  # the store has parameters all the time, and not in commits alone

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
        self._belong_here()
        self._interrupts = Interrupts()
        self._commit = commit
        self._endurance_nbytes = endurance_nbytes
        self._committed = True  # whether the last whole step is
        self._earlier = list(earlier)  # what was committed here before, the last commit first
        self._keeps_previous = False  # this rank and others can go back by one commit
        self._threads = StepThreads()
        self._warned = False
        self._buckets: list[Bucket] = []
        self._pieces: dict[torch.Tensor, list[tuple[Bucket, Unit]]] = {}
        self._residency: Residency | None = None
        self._staging: Staging | None = None
        self._at_home = False  # all state is the optimizer's own, in memory
        self._sweep: Sweep | None = None
        self._given = Given(self._put_back)
        self._patterns: list[Any] = []
        self._others: dict[Any, Any] = {}  # entries of a loaded state that are of no parameter
        self._maps_state = False
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0
        self._incomplete = False  # a load has failed half way
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._lender = Lender(
            optimizer,
            lambda param: master_dtype or param.dtype,
            on_host=step_device == "cpu",
        )
        self._step_device = step_device
        self._probe = Probe(optimizer, self._lender)
        self._planner = Planner(self._probe, master_dtype, params_nbytes=self._params_nbytes)
        # One list and one set of hooks: what was registered before is called once a step.
        kept = optimizer.param_groups
        optimizer.param_groups = self.param_groups
        try:
            self._install(self._planned())
            self._fill(self._state_before)
        except BaseException:
            optimizer.param_groups = kept
            raise
        for name in HOOKS:
            if hasattr(optimizer, name):  # the same: handles of hooks must be able to remove them
                setattr(self, name, getattr(optimizer, name))
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            self._step_supports_amp_scaling = optimizer._step_supports_amp_scaling
        if not self._at_home:
            optimizer.state = defaultdict(dict)
        self._take_over()
        self._is_made = True

    def _take_over(self) -> None:
        """Let the methods of the optimizer itself act on what is offloaded, or raise."""
        own = weakref.ref(self)

        def forwarded(name: str, *arguments: Any, **more: Any) -> Any:
            there = own()
            if there is None:
                raise RuntimeError(
                    f"{name}(): the offloaded optimizer that this one was made into is gone"
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
        """Step all parameters that have gradients. What it changes is written behind, while training goes on.

        Ctrl-C, and other signals that have handlers in Python, are heard when the step is whole; a second Ctrl-C ends
        the wait for a drive that does not answer. With ``commit="step"`` what hooks of the step have changed is
        committed, too.

        Raises
        ------
        OffloadError
            Something could not be read or written: :meth:`retry` goes on.
        NotSeparableError
            The optimizer did what its trial did not show; the step is half done.
        TypeError, ValueError
            A gradient is sparse, or a parameter has another size than when it was added.
        """
        loss = self._hooked_step(*(() if closure is None else (closure,)))
        if self._commit != "none" and not self._committed:
            with self._locked():
                self._commit_step(self._usable())
        return loss

    # torch puts hooks around what is not marked so: here they are inside, before the commit.
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
            vars(self._inner)["_opt_called"] = True  # for schedulers that were made of it
            self._warn_of_drive()
        return loss

    def _begun_step(self) -> Sweep | None:
        """Return a step that has begun; None where GradScaler has found that it is to be left out."""
        self._usable()
        if self._sweep is not None:
            raise self._half_done("a step before it failed")
        if self._earlier:
            raise RuntimeError(
                f"step {self.committed_step} is committed in these directories, and a step would replace it: call "
                "resume() to go on from it, or discard_committed()"
            )
        scaling = {
            name: getattr(self, name)
            for name in ("grad_scale", "found_inf")
            if getattr(self, name, None) is not None
        }
        if "found_inf" in scaling and scaling["found_inf"].item():
            return None
        with self._storing():
            # Gradients of all ranks are in this step's, so all of them have committed the step before.
            self._store.drop_previous()
        self._given.settle()
        with self._interrupts.deferred():
            self._check_step()
        with self._storing():
            self._usable().check()
        return Sweep(self._order(self._is_stepped), class_method(self._inner), scaling)

    def _apply(self, name: str) -> None:
        """Call another method of the optimizer's for all parameters: train(), eval()."""
        with self._locked():
            residency = self._readable()
            self._given.settle()
            order = self._order(lambda _: True)
            alone, self._lender.alone = self._lender.alone, True
            try:
                sweep = Sweep(order, class_method(self._inner, name), {}, is_step=False)
                self._go_on(residency, sweep)
            finally:
                self._lender.alone = alone

    def retry(self) -> None:
        """Go on where a failure stopped: finish the step that is half done, and write what could not be written.

        Gradients must be as they were.

        Raises
        ------
        OffloadError
            It failed again; or gradients have changed, so that the step cannot be finished.
        """
        with self._locked():
            residency = self._usable()
            with contextlib.suppress(StorageError), self._interrupts.deferred():
                residency.drain()  # what has failed since is tried again here
            if self._sweep is not None:
                if self._sweep.broken:
                    raise self._half_done("the optimizer raised in the middle of it")
                changed = self._sweep.changed_gradient(self._buckets, self._gradient_of)
                if changed is not None:
                    raise self._half_done(
                        f"the gradient of a parameter of shape {tuple(changed.shape)} is not the one that it had"
                    )
                self._go_on(residency, self._sweep)
            with self._storing():
                residency.flush()
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
            ``memory_nbytes`` (what of it may be in memory at a time), ``buckets``, and the ``store``'s own.
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
                "memory_nbytes": total if self._at_home else residency.nbytes,
                "buckets": len(self._buckets),
                "store": self._store.stats(),
            }

    def _order(self, wanted: Callable[[torch.Tensor], bool]) -> list[int]:
        """Return the buckets of parameters, forwards and backwards in turns: the last ones are still in memory."""
        if self._at_home:
            return []
        order = [
            bucket.index
            for bucket in self._buckets
            if any(wanted(unit.param) for unit in bucket.units)
        ]
        return order[::-1] if self._steps % 2 else order

    def _check_step(self) -> None:
        """Refuse a step before anything has changed."""
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                planned = self._shapes.get(param)
                now = number, param.shape, param.dtype, param.stride()
                if planned != now:
                    names = ("group", "shape", "dtype", "strides")
                    was = "not in param_groups" if planned is None else _described(names, planned)
                    raise ValueError(
                        f"param_groups[{number}]: a parameter has changed: {_described(names, now)}; it was {was} when "
                        "it was added; make a new optimizer, or add_param_group()"
                    )
                grad = self._gradient_of(param)
                placements: Any = getattr(grad, "placements", None)
                if placements not in (None, getattr(param, "placements", None)):
                    self._probe.check_placed(group, param, grad)
                if grad is not None and grad.layout != torch.strided:
                    raise TypeError(
                        f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} has a sparse gradient; "
                        "offloaded optimizers step dense ones (remedy: sparse=False in nn.Embedding)"
                    )
        if sum(len(group["params"]) for group in self.param_groups) != len(self._shapes):
            raise ValueError(
                "param_groups: parameters have been taken away; make a new optimizer without them"
            )
        self._check_gradients()
        patterns = self._patterns_now()
        stays = patterns == self._patterns
        if not self._at_home:  # there all parameters are stepped at once, and whole
            self._check_apart()
            if stays and not self._pieces_may_stay():
                self._probe.forget()
                stays = False
        if not stays:
            self._plan_anew()
            self._patterns = patterns

    def _check_apart(self) -> None:
        """Refuse a step that would depend on several parameters at once: a few of them are tried."""
        params = list(filter(self._is_stepped, self._shapes))
        tried = list(dict.fromkeys([*params[:1], *params[len(params) // 2 :][:1], *params[-1:]]))
        if len(tried) < 2 or self._probe.gradients != "any":
            return
        self._probe.note_begun(
            {param: shape_of_state(self._pieces[param][0][1]) for param in tried}
        )
        if not self._probe.acts_apart(tried):
            raise NotSeparableError(
                f"{type(self._inner).__name__} cannot be stepped exactly any more: it depends on several parameters at "
                "once now, or on random numbers, which its trial did not show; nothing has changed"
            )

    def _pieces_may_stay(self) -> bool:
        """Return whether what is stepped in pieces may still be: a parameter of each kind is tried, and one in turn."""
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
            self._probe.note_begun({param: shape_of_state(self._pieces[param][0][1])})
            if not self._probe.acts_on_elements(param):
                return False
        return True

    def _check_gradients(self) -> None:
        """Refuse a step for which parameters lack gradients that the optimizer needs to step them one by one."""
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
                    what = "has its first gradient after others have had theirs"
                else:
                    continue
                raise ValueError(
                    f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} {what}, and then a step of "
                    f"{type(self._inner).__name__} fails, or treats others otherwise; what would help: a gradient of "
                    "zeros, or foreach=False and fused=False where the optimizer has these"
                )

    def _is_stepped(self, param: torch.Tensor) -> bool:
        """Return whether the next step has to do with a parameter."""
        return self._lender.alone or self._gradient_of(param) is not None

    def _gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, or what stands for it."""
        return param.grad

    def _bring(self, bucket: Bucket | None) -> None:
        """Have a bucket's parameters and gradients in memory, and no others; here all are."""

    def _patterns_now(self) -> list[Any]:
        return [pattern(group, numbers=True) for group in self.param_groups]

    def _plan_anew(self) -> None:
        """Lay state out as the groups' new values want it, if they want another state than before."""
        planned = self._planned()
        if _kinds(planned) == _kinds(self._buckets):
            return
        states = self._mapped_state()
        self._install(planned)
        self._fill(lambda param: states.get(param))

    def _go_on(self, residency: Residency, sweep: Sweep) -> None:
        """Step the buckets that are left, if need be without ending the step."""
        with self._interrupts.deferred(), self._timed(residency), self._scaled(sweep):
            self._sweep = sweep
            try:
                if self._at_home:
                    sweep.broken = True
                    self._lender.call_at_home(sweep.function)
                else:
                    limited = (
                        self._threads.limited() if self._by_elements else contextlib.nullcontext()
                    )
                    with limited:
                        self._step_buckets(residency, sweep)
            except StorageError as error:
                raise self._half_done(str(error)) from error
            except BaseException:
                if sweep.done == 0 and not sweep.broken:
                    self._sweep = None  # nothing has changed
                raise
            if not sweep.ends:
                return
            self._sweep = None
            self._patterns = self._patterns_now()
            if sweep.is_step:
                self._steps += 1
                self._committed = False

    def _step_buckets(self, residency: Residency, sweep: Sweep) -> None:
        lender = self._lender
        sweep.snapshot = lender.begin(sweep.snapshot)
        whole = False
        try:
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
            if not sweep.order:  # there are no gradients, but groups may count their steps
                sweep.broken = True
                lender.call([], torch.empty(0, dtype=torch.uint8, device="cpu"), sweep.function)
            whole = True
        finally:
            self._bring(None)
            lender.end(undone=not whole or not sweep.ends)

    @contextlib.contextmanager
    def _scaled(self, sweep: Sweep) -> Iterator[None]:
        """Let the optimizer have what GradScaler leaves for those that unscale gradients themselves."""
        vars(self._inner).update(sweep.scaling)
        try:
            yield
        finally:
            for name in sweep.scaling:
                vars(self._inner).pop(name, None)

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
            self._settle_and_store(residency)
            record = self._record()
            self._store.snapshot(of_this_rank(path), record)

    def restore(self, path: Path | Sequence[Path]) -> int:
        """Have the state, and the groups' values, of a :meth:`checkpoint`; parameters stay as they are.

        Every byte is verified. It takes no memory beside the budget, which may be another than that of then.

        Returns
        -------
        int
            How many steps had been done.

        Raises
        ------
        ValueError
            It is of other parameters, or of an optimizer with another state; nothing has changed.
        MemoryBudgetError
            It has pieces of state for which the budget is too small; nothing has changed.
        StorageError
            It is not there, cannot be read or is damaged. If that shows late, the state is not usable before another
            restore() or load_state_dict().
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
        """The step that an earlier run has committed in these directories, for :meth:`resume`; None if none."""
        return self._earlier[0].steps if self._earlier else None

    def resume(self) -> int | None:
        """Go on from what an earlier run has committed: parameters, state and groups' values are those of that step.

        Where ``torch.distributed`` is in use, all ranks call it, and go on from the newest step that all have: a kill
        may have come when some had committed a step, and others had not.

        Returns
        -------
        int or None
            The step; None, and nothing has changed, where nothing was committed, or ``commit`` is "none" here.

        Raises
        ------
        ValueError
            It is of other parameters, or of another optimizer; nothing has changed.
        RuntimeError
            Ranks have no committed step in common; nothing has changed on any of them.
        StorageError
            It cannot be read, or is damaged; it is still there.
        """
        with self._locked():
            self._usable(loading=True)
            steps = self.committed_step
            if self._commit != "none" and ranks() > 1:
                steps = _common_step([earlier.steps for earlier in self._earlier])
            if steps is None:
                return None
            if self._earlier[0].steps != steps:
                with self._interrupts.deferred():
                    self._store.go_back()
                    self._earlier.pop(0).close()
            self._load(self._earlier[0], with_params=True)
            self.discard_committed()
            self._keeps_previous = True
            return steps

    def discard_committed(self) -> None:
        """Do without what an earlier run has committed: the next commit replaces it."""
        with self._locked():
            earlier, self._earlier = self._earlier, []
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
            slabs=self._slabs_of_params(),
        )

    def _slabs_of_params(self) -> list[tuple[str, int]] | None:
        """Return where in the store parameters are, by tensor and offset, if that has them all the time."""
        return None

    def _store_params(self) -> None:
        """Write parameters into the store."""
        tickets = []
        for name, members in packed_params(list(self._shapes)):
            # Two on their way at a time: some are copies.
            tickets.append(self._store.write(name, pack(members)))
            if len(tickets) > 1:
                tickets.pop(0).result()
        for ticket in tickets:
            ticket.result()

    def _commit_step(self, residency: Residency) -> None:
        """Commit state, and parameters as they are now: hooks may have changed them since they were stepped."""
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
                f"step {self._steps} is whole, but could not be committed; retry() tries it again",
                step=self._steps,
                finished=True,
            ) from error
        self._committed = True

    def _load(self, saved: Saved, *, with_params: bool) -> int:
        saved.check_groups(self.param_groups)
        twin = twin_of(self._inner, list(self.param_groups))
        twin.load_state_dict({"state": {}, "param_groups": saved.groups})
        saved.check_values(twin)
        params = [param for group in twin.param_groups for param in group["params"]]
        saved.check_params(params, [self._planner.step_dtype(param) for param in params])
        with self._groups_of(twin):
            if saved.optimizer == type(self._inner).__name__:
                self._probe.note_begun(
                    {param: saved.state_like(index) for index, param in enumerate(params)}
                )
            planned = self._planned()
            group_of = {param: group for group in twin.param_groups for param in group["params"]}
            buckets = saved.layout(
                params,
                planned,
                lambda param: self._probe.may_be_cut(
                    group_of[param], param, self._planner.step_dtype(param)
                ),
                type(self._inner).__name__,
            )
            plan.check_budget(self._budget_nbytes, buckets, self._at_once(), usual=False)
        self._have_groups(twin)
        self._sweep = None
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
            self._bring_home()
            self._incomplete = False
        self._steps = saved.steps
        return saved.steps

    def _load_params(self, saved: Saved, params: Sequence[torch.Tensor]) -> None:
        saved.set_params(params)

    @contextlib.contextmanager
    def _groups_of(self, twin: torch.optim.Optimizer) -> Iterator[None]:
        """Plan with other groups, for a while."""
        kept = self.param_groups
        self.param_groups = self._inner.param_groups = twin.param_groups
        try:
            yield
        finally:
            self.param_groups = self._inner.param_groups = kept

    def _have_groups(self, twin: torch.optim.Optimizer) -> None:
        self.param_groups = self._inner.param_groups = twin.param_groups

    def _warn_of_drive(self) -> None:
        if self._warned or self._steps < 5 or self._at_home:
            return
        total = self._total_nbytes()
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
                stacklevel=5,
            )

    # State

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The state by parameter. ``state[param]`` reads one parameter's, with its master, if it has one, as "master".

        What is written into it, in place too, counts as in memory, if it is written before the next step; later the
        same tensors are an earlier step's, and a write to one of them makes the next step raise RuntimeError.
        """
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        if self._residency is not None:
            with self._locked():
                StateView(self).replace(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers have it: a snapshot, whose tensors are mapped from the drive.

        They take no memory of their own, and stay as they are while training goes on.
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
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            saved = state_dict["state"]
            # Groups as torch does it, without any state.
            twin = twin_of(self._inner, list(self.param_groups))
            before = dict(vars(twin))
            twin.load_state_dict({**state_dict, "state": {}})
            own = {
                name: value
                for name, value in vars(twin).items()
                if name not in ("state", "param_groups") and before.get(name) is not value
            }
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            params = [param for group in twin.param_groups for param in group["params"]]
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
            with self._groups_of(twin):
                planned = self._planned()
                pieces = _by_param(planned)
                known = [
                    is_planned(number, pieces[param], saved[number])
                    for number, param in zip(numbers, params, strict=True)
                    if number in saved
                ]
                if not all(known):  # it is made once, in the first step, say
                    self._probe.note_begun(states)
                    planned = self._planned()
            self._have_groups(twin)
            of_group = {param: group for group in self.param_groups for param in group["params"]}
            number_of = dict(zip(params, numbers, strict=True))

            def loaded(param: torch.Tensor) -> Any:
                state = saved.get(number_of[param])
                return None if not state else self._cast(of_group[param], param, state, state_dict)

            self._sweep = None
            vars(self._inner).update(own)  # what the optimizer's own class has loaded beside
            self._install(planned)
            self._fill(loaded)
            self._others = {
                key: value for key, value in saved.items() if key not in number_of.values()
            }
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

    def _state_before(self, param: torch.Tensor) -> Any:
        """Return a parameter's state in memory as what is stepped for it has it."""
        state = self._inner.state.get(param)
        if not state or self._planner.step_dtype(param) == param.dtype:
            return state
        group = next(
            group for group in self.param_groups if any(each is param for each in group["params"])
        )
        return self._cast(group, param, state, {})

    def _cast(
        self,
        group: dict[str, Any],
        param: torch.Tensor,
        state: dict[str, Any],
        beside: Mapping[str, Any],
    ) -> Any:
        target = self._lender.target_of(param)
        alike = torch.empty((), dtype=target.dtype, device=target.device)
        if target is param:
            alike = param
        state = {
            key: local_of(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        master = state.pop(MASTER, None) if self._planner.step_dtype(param) != param.dtype else None
        cast = cast_like_torch(self._inner, group, alike, state, beside)
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
            residency = self._readable()
            self._given.settle()
            type(self._inner).add_param_group(self._inner, param_group)
            group = self.param_groups[-1]
            try:
                check_params(self.param_groups)
                self._probe.note_begun(
                    {param: self._inner.state.get(param) for param in group["params"]}
                )
                with self._interrupts.deferred():
                    self._probe.try_together(self.param_groups)
                    added = self._planner.pack([group], len(self._shapes), len(self._buckets))
                buckets = [*self._buckets, *added]
                self._check_budget(buckets)
                leaves_home = self._at_home and not self._fits_at_home(buckets)
                with self._interrupts.deferred():
                    if leaves_home:
                        self._store_home(residency)
                    stays = self._at_home and not leaves_home
                    residency.resize(self._memory_for(buckets, at_home=stays))
                    residency.add(added)
            except BaseException:
                self.param_groups.pop()
                for param in group["params"]:
                    self._inner.state.pop(param, None)
                raise
            begun = {param: self._inner.state.pop(param, None) for param in group["params"]}
            if leaves_home:
                self._at_home = False
                self._inner.state = defaultdict(dict)
                self._lender.masters.clear()
            self._buckets = buckets
            self._note_params()
            self._fill(begun.get, [bucket.index for bucket in added])

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
            with self._storing():
                residency.drain()

    def close(self) -> None:
        """Give the memory and the space on drives back; the state is lost unless it has been saved."""
        if self.is_parents:
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
                    for unit in bucket.units:
                        unit.forget_views()
                self._inner.state = defaultdict(dict)
                self._store.close()

    # Where state is

    def _planned(self) -> list[Bucket]:
        """Decide which state lies where, for the groups as they are now."""
        check_params(self.param_groups)
        with self._interrupts.deferred():  # parameters have other data while the optimizer is tried
            self._probe.try_together(self.param_groups)
            buckets = self._planner.pack(self.param_groups)
        self._check_budget(buckets)
        return buckets

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        plan.check_budget(self._budget_nbytes, buckets, self._at_once())

    def _at_once(self) -> int:
        """Return how many buckets are in memory at a time, at least: copies of them may be on their way to a GPU."""
        return 1 if self._device_to_stage_on() is None else plan.MIN_BUCKETS

    def _memory_for(self, buckets: Sequence[Bucket], *, at_home: bool) -> int:
        needed = plan.needed_nbytes(buckets, self._at_once())
        if at_home:
            return needed
        total = sum(plan.paged(bucket.nbytes) for bucket in buckets)
        return min(self._budget_nbytes // plan.PAGE_NBYTES * plan.PAGE_NBYTES, total)

    def _fits_at_home(self, buckets: Sequence[Bucket]) -> bool:
        total = sum(bucket.nbytes for bucket in buckets)
        beside = plan.needed_nbytes(buckets)
        return (
            self._device_to_stage_on() is None
            and total + max(beside - _MAX_BESIDE_NBYTES, 0) <= self._budget_nbytes
        )

    def _total_nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets)

    def _install(self, buckets: list[Bucket]) -> None:
        """Let state lie so; what there was is forgotten."""
        # Its memory must be free before there is other; where that cannot be had the optimizer is closed.
        before, self._residency = self._residency, None
        if before is not None:
            before.forget()
            self._inner.state = defaultdict(dict)
            self._lender.masters.clear()
        del before
        self._given.forget()
        device = self._device_to_stage_on()
        self._at_home = self._fits_at_home(buckets)
        residency = Residency(
            self._store,
            self._memory_for(buckets, at_home=self._at_home),
            all_in_flight=self._commit != "none",
            gpu=-1 if device is None or device.type != "cuda" else device.index or 0,
        )
        if not self._at_home:
            residency.touch()
        if device is not None and buckets:
            self._staging = Staging(device, max(bucket.nbytes for bucket in buckets))
        residency.interrupted = self._interrupts.insisted
        residency.add(buckets)
        self._buckets, self._residency = buckets, residency
        self._note_params()

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
        self._shapes = {
            param: (number, param.shape, param.dtype, param.stride())
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        self._patterns = self._patterns_now()
        self._pieces = _by_param(self._buckets)
        # Then how the work is divided among threads changes no result.
        self._by_elements = (
            not self._at_home
            and self._staging is None
            and all(
                self._probe.may_be_cut(group, param, self._planner.step_dtype(param))
                for group in self.param_groups
                for param in group["params"]
                if local_of(param).numel() > 1
            )
        )

    def _fill(
        self, states: Callable[[torch.Tensor], Any], indices: Iterable[int] | None = None
    ) -> None:
        """Give parameters the states that they are to have; one without has none."""
        residency = self._usable(loading=True)
        buckets = self._buckets if indices is None else [self._buckets[at] for at in indices]
        self._incomplete = True
        with self._interrupts.deferred():
            if self._at_home:
                for param in _by_param(buckets):
                    self._put_home(param, states(param))
            else:
                self._fill_buckets(residency, buckets, states)
            self._incomplete = False

    def _fill_buckets(
        self,
        residency: Residency,
        buckets: Sequence[Bucket],
        states: Callable[[torch.Tensor], Any],
    ) -> None:
        """Put states into buckets; those that no unit has anything in stay as they are."""
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

    # At home: the state is the optimizer's own, and is put into buckets only to be saved

    def _put_home(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        target = self._lender.target_of(param)
        self._inner.state.pop(target, None)
        self._inner.state.pop(param, None)
        if not state:
            return
        state = dict(state)
        if self._planner.step_dtype(param) != param.dtype:
            self._lender.set_master(param, state.pop(MASTER, None))
        if state:
            self._inner.state[target] = _pytree.tree_map(_own, state)

    def _state_at_home(self, param: torch.Tensor) -> dict[Any, Any] | None:
        target = self._lender.target_of(param)
        state = self._inner.state.get(target)
        if param in self._lender.masters:
            return {**(state or {}), MASTER: target.detach()}
        return state or None

    def _store_home(self, residency: Residency) -> None:
        """Put the state that is in memory into buckets, and store these."""
        try:
            self._fill_buckets(residency, self._buckets, self._state_at_home)
        except UnplannedError:  # there is other state than was planned: a user's, say
            self._probe.note_begun({param: self._state_at_home(param) for param in self._shapes})
            planned = self._planner.pack(self.param_groups)
            residency.forget()
            residency.resize(self._memory_for(planned, at_home=True))
            residency.add(planned)
            self._buckets = planned
            self._note_params()
            self._fill_buckets(residency, planned, self._state_at_home)

    def _bring_home(self) -> None:
        """Have state in memory that has just been put into buckets."""
        if self._at_home:
            for param, pieces in self._pieces.items():
                self._put_home(param, state_of(pieces, self._copied()))

    def _settle_and_store(self, residency: Residency) -> None:
        self._given.settle()
        with self._storing():
            if self._at_home:
                self._store_home(residency)
            residency.flush()

    # What users see of it, and write into it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do what the optimizer's own ``zero_grad`` does."""
        self._inner.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer that this one was made of."""
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: one that the optimizer had, and its step may go by, is still that one's."""
        is_own = name in vars(self) or hasattr(type(self), name)
        if vars(self).get("_is_made") and not is_own and name in vars(self._inner):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)

    def _params_with_state(self) -> list[torch.Tensor]:
        if self._at_home:
            return [param for param in self._shapes if self._state_at_home(param)]
        return [
            param for param, pieces in self._pieces.items() if any(unit.kept for _, unit in pieces)
        ]

    def _copied(self) -> Copied:
        """Return what reads fields of buckets, one bucket at a time."""
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

        return Copied(read)

    def _state_of_one(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a parameter, to be written into."""
        with self._locked():
            self._readable()
            if param not in self._shapes:
                return {}
            if self._at_home and self._lender.is_direct(param):
                state: dict[Any, Any] = self._inner.state[param]
                return state
            return self._given.state_of(param, self._read_one)

    def _read_one(self, param: torch.Tensor) -> dict[Any, Any]:
        if self._at_home:
            local = local_of(param)
            copied: dict[Any, Any] = _pytree.tree_map(
                lambda leaf: like_param(_own(leaf), param, local), self._state_at_home(param) or {}
            )
            return copied
        pieces = self._pieces[param]
        if not any(unit.kept for _, unit in pieces):
            return {}
        return state_of(pieces, self._copied())

    def _put_back(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Have a state that a user has written, or none."""
        residency = self._usable()
        if self._at_home:
            self._put_home(param, state)
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
                        f"state: that of a parameter of shape {tuple(param.shape)} has been given {error}, and the "
                        "optimizer makes no such state"
                    ) from None
                finally:
                    residency.release(bucket.index, dirty=True)

    def _mapped_state(self) -> dict[Any, Any]:
        with self._locked():
            residency = self._readable()
            self._settle_and_store(residency)
            source = MappedFields(self._store, self._copied())
            mapped = {
                param: state_of(self._pieces[param], source) for param in self._params_with_state()
            }
            return {**mapped, **self._others}

    # Steps

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock, unless a thread of the parent process may hold it for ever."""
        self._check_process()
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

    def _readable(self) -> Residency:
        residency = self._usable()
        if self._sweep is not None:
            raise self._half_done("a step before failed")
        return residency

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Hold signals back, and say of a failure that nothing is lost."""
        try:
            with self._interrupts.deferred():
                yield
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


def refused_step(*_: Any, **__: Any) -> Any:
    """Raise: it is the step() of an optimizer that has been offloaded."""
    raise RuntimeError(
        "step(): this optimizer has been offloaded; call step() of what offload_optimizer() has returned"
    )


# Schedulers that were made of the optimizer itself look for this.
refused_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _own(leaf: Any) -> Any:
    """Return a leaf of a state that has memory of its own."""
    return local_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _described(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value) if isinstance(value, torch.Size) else value}"
        for name, value in zip(names, values, strict=True)
    )


def _by_param(buckets: Sequence[Bucket]) -> dict[torch.Tensor, list[tuple[Bucket, Unit]]]:
    """Return the units of each parameter."""
    found: dict[torch.Tensor, list[tuple[Bucket, Unit]]] = {}
    for bucket in buckets:
        for unit in bucket.units:
            found.setdefault(unit.param, []).append((bucket, unit))
    return found


def _kinds(buckets: Sequence[Bucket]) -> list[Any]:
    """Return what of a plan decides whether state can stay where it is."""
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


class Sweep:
    """A step's way through buckets."""

    def __init__(
        self,
        order: list[int],
        function: Callable[[], Any],
        scaling: dict[str, Any],
        *,
        is_step: bool = True,
    ) -> None:
        self.order = order
        self.function = function
        self.scaling = scaling
        self.is_step = is_step
        self.ends = True  # with the buckets of its order; others may follow
        self.done = 0
        self.broken = False  # in the middle of a bucket
        self.snapshot: Any = None  # of what the step began with
        self._gradients: dict[torch.Tensor, Any] = {}

    def is_checked(self, steps: int) -> bool:
        """Return whether the next bucket is one of those that are stepped twice, in two ways, and compared."""
        # One bucket in the steps 1, 2, 4, 8, ... and another one each time.
        return (
            bool(self.order)
            and not steps & (steps - 1)
            and (self.done == steps.bit_length() % len(self.order))
        )

    def note_gradients(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Note gradients as they are, which those of a retry must be."""
        for param, grad in gradients:
            self._gradients[param] = None if grad is None else (weakref.ref(grad), grad._version)

    def changed_gradient(
        self,
        buckets: Sequence[Bucket],
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Return a parameter of what is left whose gradient is another one, or was written to."""
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
    """Return how many ranks there are."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _common_step(steps: list[int]) -> int | None:
    """Return the newest of the committed steps that all ranks have; None where no rank has any.

    Raises
    ------
    RuntimeError
        There is none, and some ranks have committed steps; it has those of each rank, and is raised on all of them.
    """
    of_ranks: list[Any] = [None] * ranks()
    torch.distributed.all_gather_object(of_ranks, steps)
    common = set(steps).intersection(*of_ranks)
    if common or not any(of_ranks):
        return max(common, default=None)
    told = ", ".join(f"rank {rank}: {each or None}" for rank, each in enumerate(of_ranks))
    raise RuntimeError(
        f"ranks have no committed step in common ({told}), and cannot go on together. What helps: restore a "
        "checkpoint that all have, or discard_committed() on all of them"
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is not an optimizer, or is offloaded already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if isinstance(optimizer, OffloadedOptimizer) or vars(optimizer).get("step") is refused_step:
        raise ValueError("optimizer: it is offloaded already")


def opened_store(
    directories: Path | Sequence[Path],
    weights: Sequence[float] | None,
    commit: Commit,
    undo: contextlib.ExitStack,
) -> tuple[TensorStore, list[Saved]]:
    """Return a store in directories, and what an earlier run has committed there; ``undo`` closes both."""
    paths = directories if commit == "none" else of_this_rank(directories)
    store = TensorStore(paths, weights=weights, temporary=commit == "none")
    undo.callback(store.close)
    earlier = [] if commit == "none" else committed(of_this_rank(directories))
    for each in earlier:
        undo.callback(each.close)
    return store, earlier


def of_this_rank(path: Path | Sequence[Path]) -> list[str]:
    """Return the paths that are this rank's, where there are several ranks."""
    paths: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    names: list[str] = [os.fsdecode(each) for each in paths]
    if not _is_distributed():
        return names
    return [str(pathlib.Path(name) / f"rank-{torch.distributed.get_rank():05d}") for name in names]
