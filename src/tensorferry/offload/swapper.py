"""Parameters that have their values in memory only while their modules run.

The parameters of a model are in slabs (``slabs.py``), of which some are in memory (``holder.py``). The objects in the
model stay the same. While a parameter's module does not run, the parameter is *absent*: it has a class that refuses
every operation that needs values (``absent.py``), and a single NaN in place of its values. While the module runs, it is
a plain ``nn.Parameter``, a view of its slab.

A *pass* is a forward pass of the whole model; parts of the model may also be called outside of one. An interruption by
a signal may leave parameters with values; the next call ends that (:meth:`Swapper.clean`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tensorferry.offload.absent import Absent, AbsentWrapper, Around
from tensorferry.offload.matching import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tensorferry.offload.holder import Holder
    from tensorferry.offload.slabs import ModuleUse, Plan, Slab

_ONE_THREAD = "another thread runs the model: only one thread at a time can call parts of it"


class Swapper:
    """Gives the parameters of a model their values while their modules run.

    Subclasses say how slabs are accessed, and what a pass is. One thread at a time uses the model: passes take turns,
    and a call of a part while another thread runs the model raises RuntimeError.
    """

    absent: type[AbsentParameter]
    #: Why an operation on an absent parameter is impossible, after "the parameter NAME ".
    refusal: str
    #: Why a model cannot be pickled or copied.
    refused_copy: str

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.holder: Holder
        self._hooks: list[Any] = []
        self._running: list[ModuleUse] = []  # the innermost last
        self._make_locks()
        self._nans: dict[torch.dtype, torch.Tensor] = {}
        self._slab_at: dict[int, Slab] = {}  # slabs whose parameters have values, by address
        self.absent = type("AbsentParameter", (self.absent,), {"swapper": weakref.ref(self)})

    def _make_locks(self) -> None:
        # The second lock is held by the thread that runs the model or a part of it.
        self._pass_lock, self._lock = threading.RLock(), threading.RLock()
        self._turns = 0  # how often the thread holds the second lock
        self._is_in_pass = False

    def access(self, *, defers: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for work with slabs; with ``defers``, signals are deferred meanwhile."""
        raise NotImplementedError

    def check_process(self) -> None:
        """Prepare for a use in a forked child, or raise."""

    def begin_pass(self) -> None:
        """Begin a pass."""
        raise NotImplementedError

    def end_pass(self, *, complete: bool) -> None:
        """End a pass, which may have failed."""

    def check_run(self, name: str, args: Any, kwargs: Any) -> None:
        """Raise if a module cannot run now."""
        raise NotImplementedError

    def install(self) -> None:
        """Install what gives parameters their values."""
        for use in self.plan.uses:
            if use.module is not self.plan.model:
                self.install_around(use)
        self.around(self.plan.model, "forward", self._run)

    def install_around(self, use: ModuleUse) -> None:
        """Install what gives a module's parameters their values: also to its own hooks, which may use them."""
        self.around(use.module, "_call_impl", functools.partial(self.run_module, use))

    def around(self, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        """Run a function around a method of a module."""
        self._hooks.append(Around(module, name, run, self.refused_copy))

    def uninstall(self) -> None:
        """Remove what has been installed; parameters stay without values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> NoReturn:
        """Raise: the model cannot be pickled or copied, which reaches this object."""
        raise RuntimeError(self.refused_copy)

    # Values

    def put_away(self, param: torch.Tensor) -> None:
        """Make a parameter absent."""
        param.__class__ = nn.Parameter
        # Take dtype and shape from the plan: a user may have assigned data with others.
        _, field = self.plan.place_of[param]
        nan = self._nans.get(field.dtype)
        if nan is None:
            value = math.nan if field.dtype.is_floating_point or field.dtype.is_complex else 0
            nan = torch.full((), value, dtype=field.dtype, device=self.device)
            torch._C._set_throw_on_mutable_data_ptr(nan)
            self._nans[field.dtype] = nan
        param.data = nan.expand(field.shape)
        param.__class__ = self.absent

    def give(self, slabs: Iterable[Slab], *, change: bool = False) -> None:
        """Bring slabs into memory, and give their parameters their values."""
        slabs = [slab for slab in slabs if not slab.is_given]
        for slab, memory in zip(slabs, self.holder.hold(slabs, change=change), strict=True):
            slab.lent = self.on_device(memory)
            slab.versions, slab.is_given = slab.versions_now(), True
            self._slab_at[slab.lent.data_ptr()] = slab
            for param, field in slab.fields.items():
                param.__class__ = nn.Parameter
                param.data = field.view(slab.lent)

    def on_device(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a slab's memory, or a copy on the device where the model computes."""
        return memory

    def take(self, slab: Slab) -> None:
        """Make a slab's parameters absent."""
        memory, slab.lent, slab.is_given = slab.lent, None, False
        assert memory is not None
        self._slab_at.pop(memory.data_ptr(), None)
        has_changed = slab.versions != slab.versions_now()
        for param in slab.fields:
            self.put_away(param)
        self.taken(slab, memory, has_changed=has_changed)

    def taken(self, slab: Slab, memory: torch.Tensor, *, has_changed: bool) -> None:  # noqa: ARG002
        """Keep the changes of parameters that had their values in ``memory``."""
        if has_changed:
            raise self.unchangeable(slab)

    def unchangeable(self, slab: Slab) -> RuntimeError:
        """Return the error for changes of parameters that are in the user's files."""
        names = told([self.plan.names[param] for param in slab.fields])
        return RuntimeError(f"{names}: parameters that are read from files cannot be changed")

    @contextlib.contextmanager
    def present(self, use: ModuleUse) -> Iterator[None]:
        """Give a module's parameters their values for a ``with`` block."""
        with self.turn():
            self._running.append(use)
            try:
                with self.access():
                    self.give(use.slabs)
                yield
            finally:
                self._running.pop()
                self.release(use)

    def release(self, use: ModuleUse) -> None:
        """Make the parameters of a module absent that has run, unless another one still needs them."""
        needed = {slab for each in self._running for slab in each.slabs}
        with self.access():
            for slab in use.slabs:
                if slab.is_given and slab not in needed:
                    self.take(slab)
            self.holder.read_ahead()

    def clean(self) -> None:
        """End what an interruption has left."""
        self._running.clear()
        for slab in self.plan.slabs:
            if slab.is_given:
                self.take(slab)

    # Runs of modules

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only thread that runs the model; raise RuntimeError if another one does."""
        self.check_process()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(_ONE_THREAD)
        try:
            if not self._turns and self._running:
                self.clean()
            self._turns += 1
            yield
        finally:
            self._turns -= 1
            self._lock.release()

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a pass."""
        self.check_process()
        with self._pass_lock, self.turn():
            if self._is_in_pass:  # the model calls itself
                return forward(*args, **kwargs)
            complete = False
            self._is_in_pass = True
            try:
                self.begin_pass()
                for use in self.plan.uses:
                    if use.module is self.plan.model:
                        result = self.run_module(use, forward, args, kwargs)
                        break
                else:
                    self.check_run("the model", args, kwargs)
                    result = forward(*args, **kwargs)
                complete = True
                return result
            finally:
                self._is_in_pass = False
                self.end_pass(complete=complete)

    def run_module(self, use: ModuleUse, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module with its parameters."""
        self.check_run(use.name, args, kwargs)
        with self.present(use):
            return call(*args, **kwargs)


class AbsentParameter(Absent, nn.Parameter):
    """A parameter while it has no values: an ordinary parameter, with this class."""

    swapper: weakref.ref[Swapper]

    def refusal(self, operation: str) -> str:
        """Return the message of the error for an operation."""
        there = self.swapper()
        if there is None or self not in there.plan.names:
            return f"{operation}: what had the values of this parameter is closed"
        return f"the parameter {there.plan.names[self]} {there.refusal.format(operation)}"

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides that the parameter has when it has values."""
        there = self.swapper()
        strides = (0,) * self.dim() if there is None else there.plan.place_of[self][1].stride
        return strides if dim is None else strides[dim]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the parameter is contiguous when it has values."""
        like = torch.empty_strided(self.shape, self.stride(), device="meta")
        return like.is_contiguous(*args, **kwargs)

    def alias(self) -> AbsentAlias:
        """Return a tensor without values that does not require gradients."""
        place = tuple(self.shape), self.dtype, self.device, self.stride()
        found: AbsentAlias = AbsentAlias.made(*place)
        found.param = self
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a parameter that is not in memory: {list(self.shape)}, {self.dtype}>"


class AbsentAlias(AbsentWrapper):
    """What ``detach()`` and ``data`` of an absent parameter return."""

    param: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Set values, perform operations that do not need values, and raise for all others."""
        if func is torch.Tensor.copy_ and isinstance(args[0], AbsentAlias):
            with torch.no_grad():
                args[0].param.copy_(*args[1:], **(kwargs or {}))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def refusal(self, operation: str) -> str:
        """Return the message of the error for an operation."""
        if isinstance(self.param, AbsentParameter):
            return self.param.refusal(operation)
        return (
            f"{operation}: this tensor was taken from a parameter that had no values; take it anew"
        )
