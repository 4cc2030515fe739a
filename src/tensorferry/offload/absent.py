"""Stand-ins for weights that are not in memory: they have shape, dtype and device, and every other use raises.

A tensor on the meta device would not be safe. Torch (2.13) multiplies a CPU tensor by a meta tensor without an error
and returns uninitialized memory; and inputs that are moved to the model's device would lose their values. Therefore a
stand-in is a tensor without memory on the weight's future device, and every operation on it raises.
``__torch_function__`` catches the operations that Python calls, including direct access to memory (``data_ptr``), and
``__torch_dispatch__`` catches all others, such as those of TorchScript.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.offload.training import Training
    from tensorferry.offload.weights import WeightStream

# Functions whose results depend only on a tensor's shape, dtype and device.
_METADATA_FUNCTIONS = {
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_signed",
    "nelement",
    "ndimension",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "_has_compatible_shallow_copy_type",
}
# Attributes that need values or memory.
_VALUE_ATTRIBUTES = {"H", "T", "__cuda_array_interface__", "imag", "mH", "mT", "real"}


class AbsentParameter(nn.Parameter):
    """A parameter without memory on which no operation works; made by :func:`absent_parameter`."""

    weight_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Perform operations that need only shape, dtype and device, and raise for all others."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        name, asked, is_attribute = question(func)
        if is_attribute and len(args) > 1:  # __set__: args[1] is the value
            return _set(first, name, args[1])
        if is_attribute and name == "data":
            return first
        if isinstance(first, AbsentParameter):
            if name == "detach":
                return first
            if name == "requires_grad_":
                _check_no_gradients(first, *args[1:], **kwargs)
                return first
            if name == "to":  # `model.to(model.device)` changes nothing
                _check_conversion(first, args[1:], kwargs)
                return first
        if not asked:
            _refuse(args, kwargs, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise for operations that C++ or TorchScript calls, which ``__torch_function__`` does not see."""
        _refuse(args, kwargs or {}, str(func))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: the weight cannot be pickled or copied."""
        raise RuntimeError(
            f"the weight {self.weight_name} is not in memory and cannot be saved or copied: its model is streamed, and "
            "the weight is in the model's files"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise: the weight cannot be copied."""
        self.__reduce_ex__(None)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the weight; nn.Parameter's own method would read its values."""
        return (
            f"<the weight {self.weight_name}, not in memory: {list(self.shape)}, {self.dtype}, "
            f"{self.device}>"
        )


def question(func: Callable[..., Any]) -> tuple[str, bool, bool]:
    """Return the name of an operation that torch passes to ``__torch_function__``, and two flags.

    The first flag is whether shape, dtype and device suffice to perform the operation, without the tensor's values. The
    second one is whether the operation reads or sets an attribute.
    """
    name = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__"):
        return name, name in _METADATA_FUNCTIONS, False
    name = getattr(getattr(func, "__self__", None), "__name__", "__cuda_array_interface__")
    return name, name not in _VALUE_ATTRIBUTES, True


def absent_parameter(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Return a stand-in for a weight that will be on ``device``."""
    make: Any = torch.Tensor._make_wrapper_subclass
    found: Any = make(AbsentParameter, shape, dtype=dtype, device=device, requires_grad=False)
    found.weight_name = name
    return found  # type: ignore[no-any-return]


def _set(weight: Any, name: str, value: Any) -> None:
    if isinstance(weight, AbsentParameter):
        if (name == "data" and value is weight) or (name == "grad" and value is None):
            return
        if name == "requires_grad":
            _check_no_gradients(weight, value)
            return
        raise RuntimeError(
            f"the weight {weight.weight_name}: {name} cannot be replaced: its model is streamed, and its weights are "
            "those of the files; close() the stream first"
        )
    _refuse((value,), {}, f"{name} =")


def _check_no_gradients(weight: AbsentParameter, requires_grad: bool = True) -> None:
    if requires_grad:
        raise RuntimeError(
            f"the weight {weight.weight_name} is streamed and cannot require gradients: streamed weights are for "
            "inference"
        )


def _check_conversion(weight: AbsentParameter, args: Any, kwargs: Any) -> None:
    wanted = torch.empty(0, dtype=weight.dtype, device=weight.device).to(*args, **kwargs)
    if (wanted.dtype, wanted.device) != (weight.dtype, weight.device):
        raise RuntimeError(
            f"the weight {weight.weight_name} is not in memory: it is streamed as {weight.dtype} to {weight.device} "
            f"and cannot become {wanted.dtype} on {wanted.device}; the files determine the dtype, device= the device"
        )


def _refuse(args: tuple[Any, ...], kwargs: dict[str, Any], operation: str) -> NoReturn:
    leaves = _pytree.tree_leaves((args, kwargs))
    name = next((one.weight_name for one in leaves if isinstance(one, AbsentParameter)), "")
    raise RuntimeError(
        f"the weight {name} is not in memory: it is there only while its module runs, and {operation} uses it at "
        "another time. If a module's forward() uses parameters of modules below it, pass the module's class to "
        "stream_weights() in blocks="
    )


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` does not trace."""
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


class Forward:
    """A replacement for a module's ``forward``, which ``torch.compile`` does not trace.

    Parameters
    ----------
    module : torch.nn.Module
        The module; it has this ``forward`` until :meth:`remove`.
    owner : WeightStream or Training
        The object that replaces ``forward``. Its ``__reduce__`` raises, so the module cannot be pickled or copied.
    run : callable
        Called with the module's own ``forward``, the arguments and the keyword arguments.
    """

    def __init__(
        self, module: nn.Module, owner: WeightStream | Training, run: Callable[..., Any]
    ) -> None:
        self.owner = owner
        self.forward: Callable[..., Any] = module.forward
        self._module, self._had_own_forward = module, "forward" in vars(module)
        functools.update_wrapper(self, self.forward, updated=())
        # torch.export reads this attribute of a module's `forward`.
        self.__code__ = getattr(self.forward, "__code__", None)
        self._run = outside_of_graphs(run)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``run`` with the module's own ``forward``."""
        return self._run(self.forward, args, kwargs)

    def remove(self) -> None:
        """Restore the module's own ``forward``, unless another ``forward`` has replaced this one."""
        if vars(self._module).get("forward") is not self:
            return
        if self._had_own_forward:
            self._module.forward = self.forward
        else:
            del self._module.forward

    def __reduce__(self) -> NoReturn:
        """Raise as the owner does: the module cannot be pickled or copied."""
        self.owner.__reduce__()


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
