"""Tensors whose values are not in memory: they have shape, dtype and device, and every other use raises.

A tensor on the meta device would not be safe: torch (2.13) multiplies a CPU tensor by a meta tensor without an error
and returns uninitialized memory, and inputs that are moved to a model's device would lose their values.
``__torch_function__`` refuses the operations that Python calls, including access to memory (``data_ptr``). For the
operations that it does not see, such as those of TorchScript, there are two kinds of absent tensors. Streamed weights
and gradients are other objects than those in memory: they have no memory at all, and ``__torch_dispatch__`` refuses.
The parameters of a training are the user's own objects, whose class alternates: they consist of a single NaN.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

# Methods whose results depend only on a tensor's shape, dtype and device.
_METADATA_METHODS = {
    *("__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "is_inference", "is_signed", "nelement", "ndimension", "numel", "size"),
    *("storage_offset", "stride", "_has_compatible_shallow_copy_type"),
}
# Attributes that need values or memory.
_VALUE_ATTRIBUTES = {"H", "T", "__cuda_array_interface__", "imag", "mH", "mT", "real"}
# Functions that make a tensor of the same shape, strides, dtype and device.
_LIKE = {"empty_like", "full_like", "ones_like", "zeros_like"}
# Conversions that are allowed if they change neither dtype nor device, such as `model.to(device)` for the same device.
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}


class Absent:
    """A tensor without values.

    A subclass says in :meth:`refusal` why an operation is impossible. It names the methods that work as usual in
    ``harmless``, and the attributes that may be set in ``settable``.
    """

    __slots__ = ()
    harmless: frozenset[str] = frozenset()
    settable: frozenset[str] = frozenset()

    def refusal(self, operation: str) -> str:
        """Return the message of the error for an operation."""
        raise NotImplementedError

    def alias(self) -> Any:
        """Return what ``detach()`` and ``data`` are: a tensor with the same values, of which none require gradients."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Perform operations that do not need values, and raise for all others."""
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        is_absent = isinstance(first, Absent)
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if not is_absent:
                pass
            elif name in ("__get__", "__set__"):
                of: Any = getattr(func, "__self__", None)
                name = getattr(of, "__name__", "__cuda_array_interface__")
                if len(args) == 1:
                    if name == "data":
                        return first.alias()
                    if name not in _VALUE_ATTRIBUTES:
                        return func(*args, **kwargs)
                elif name == "data":
                    if args[1] is first:
                        return None
                elif name in first.settable or args[1] is getattr(first, name):
                    return func(*args)
                name = f"{name} =" if len(args) > 1 else name
            elif name in _METADATA_METHODS or name in first.harmless:
                return func(*args, **kwargs)
            elif name in _LIKE:
                like = torch.empty_strided(
                    first.shape, first.stride(), dtype=first.dtype, device="meta"
                )
                return func(like, *args[1:], **{"device": first.device, **kwargs})
            elif name == "detach":
                return first.alias()
            elif (
                (name == "detach_" and not first.requires_grad)
                or (name == "requires_grad_" and first.requires_grad == _first(args, kwargs))
                or (name in _CONVERSIONS and _changes_nothing(first, name, args[1:], kwargs))
            ):
                return first
        found = next(each for each in tensors_in((args, kwargs)) if isinstance(each, Absent))
        raise RuntimeError(found.refusal(name))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: without values the tensor cannot be pickled or copied."""
        raise RuntimeError(self.refusal("saving or copying"))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise: without values the tensor cannot be copied."""
        self.__reduce_ex__(None)


class AbsentWrapper(Absent, torch.Tensor):
    """An absent tensor that never gets memory; made by :meth:`made`."""

    @classmethod
    def made(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> Any:
        """Return a new tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        found = make(cls, shape, stride, dtype=dtype, device=device, requires_grad=False)
        # Its address is null, and an export of it by DLPack would end the process when it is read.
        torch._C._set_throw_on_mutable_data_ptr(found)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise for operations that C++ or TorchScript calls, which ``__torch_function__`` does not see."""
        found = next(each for each in tensors_in((args, kwargs)) if isinstance(each, Absent))
        raise RuntimeError(found.refusal(str(func)))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return the argument of requires_grad_()."""
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def _changes_nothing(absent: Any, name: str, args: Any, kwargs: Any) -> bool:
    like = torch.empty(0, dtype=absent.dtype, device=absent.device)
    return getattr(like, name)(*args, **kwargs) is like


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    leaves = _pytree.tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` does not trace."""
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


class Around:
    """A function around a method of a module, which ``torch.compile`` does not trace.

    Parameters
    ----------
    module : torch.nn.Module
        The module; it has this method until :meth:`remove`.
    name : str
        ``forward``, or ``_call_impl`` to include the module's hooks.
    run : callable
        Called with the module's own method, the arguments and the keyword arguments.
    refusal : str
        The message of the error for pickling or copying the module.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any], refusal: str) -> None:
        self.original: Callable[..., Any] = getattr(module, name)
        self._module, self._name, self._had_own = module, name, name in vars(module)
        functools.update_wrapper(self, self.original, updated=())
        # torch.export reads this attribute of a module's `forward`.
        self.__code__ = getattr(self.original, "__code__", None)
        self._run = outside_of_graphs(run)
        self._refusal = refusal
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``run`` with the module's own method."""
        return self._run(self.original, args, kwargs)

    def remove(self) -> None:
        """Restore the module's own method, unless another one has replaced this one."""
        if vars(self._module).get(self._name) is not self:
            return
        if self._had_own:
            setattr(self._module, self._name, self.original)
        else:
            delattr(self._module, self._name)

    def __reduce__(self) -> NoReturn:
        """Raise: the module cannot be pickled or copied."""
        raise RuntimeError(self._refusal)


def recorded() -> bool:
    """Return whether torch.jit.trace(), make_fx() or torch.export records the operations."""
    jit: Any = torch.jit
    if jit.is_tracing():
        return True
    modes: Any = torch.utils._python_dispatch
    if not modes._len_torch_dispatch_stack():
        return False
    names = {type(mode).__name__ for mode in modes._get_current_dispatch_mode_stack()}
    return bool(names & {"FakeTensorMode", "ProxyTorchDispatchMode"})
