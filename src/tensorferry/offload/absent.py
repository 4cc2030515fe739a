"""What a model has for a weight that is not in memory: its shape, dtype and device, and an error for all uses of it.

A tensor on the meta device would not do. Torch (2.13) multiplies one of the CPU with one of the meta device without an
error, and the result is what happened to be in memory; and inputs that are moved to the model's device would be lost.
So this is a tensor on the device where the weight will be, without memory, whose operations end in an error: those that
Python calls in ``__torch_function__``, which also sees those that read memory at once (``data_ptr``), and all others,
such as those of TorchScript, in ``__torch_dispatch__``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.offload.training import Training
    from tensorferry.offload.weights import WeightStream

# Shape, dtype and device answer these.
_ASKED = {
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
# Attributes that need values, or memory.
_NOT_ASKED = {"H", "T", "__cuda_array_interface__", "imag", "mH", "mT", "real"}


class Absent(nn.Parameter):
    """A parameter without memory that no operation takes; made by :func:`absent`."""

    weight_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what can be told without values, and refuse the rest."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        name, asked, is_attribute = question(func)
        if is_attribute and len(args) > 1:  # a value
            return _set(first, name, args[1])
        if is_attribute and name == "data":
            return first
        if isinstance(first, Absent):
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
        """Refuse whatever has not come through Python."""
        _refuse(args, kwargs or {}, str(func))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise RuntimeError(
            f"the weight {self.weight_name} is not in memory and cannot be saved or copied: its model is streamed, and "
            "the files that it is streamed from have it"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied."""
        self.__reduce_ex__(None)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what is not here."""
        return (
            f"<the weight {self.weight_name}, not in memory: {list(self.shape)}, {self.dtype}, "
            f"{self.device}>"
        )


def question(func: Callable[..., Any]) -> tuple[str, bool, bool]:
    """Return the name of what ``__torch_function__`` is asked, whether it needs no values, and is an attribute."""
    name = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__"):
        return name, name in _ASKED, False
    name = getattr(getattr(func, "__self__", None), "__name__", "__cuda_array_interface__")
    return name, name not in _NOT_ASKED, True


def absent(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Return what stands for a weight that will be on a device."""
    make: Any = torch.Tensor._make_wrapper_subclass
    found: Any = make(Absent, shape, dtype=dtype, device=device, requires_grad=False)
    found.weight_name = name
    return found  # type: ignore[no-any-return]


def _set(weight: Any, name: str, value: Any) -> None:
    if isinstance(weight, Absent):
        if (name == "data" and value is weight) or (name == "grad" and value is None):
            return
        if name == "requires_grad":
            _check_no_gradients(weight, value)
            return
        raise RuntimeError(
            f"the weight {weight.weight_name} cannot get another {name}: its model is streamed, and its weights are "
            "those of the files; close() the stream first"
        )
    _refuse((value,), {}, f"{name} =")


def _check_no_gradients(weight: Absent, requires_grad: bool = True) -> None:
    if requires_grad:
        raise RuntimeError(
            f"the weight {weight.weight_name} is streamed, and streamed weights are for inference: it cannot require "
            "gradients"
        )


def _check_conversion(weight: Absent, args: Any, kwargs: Any) -> None:
    wanted = torch.empty(0, dtype=weight.dtype, device=weight.device).to(*args, **kwargs)
    if (wanted.dtype, wanted.device) != (weight.dtype, weight.device):
        raise RuntimeError(
            f"the weight {weight.weight_name} is not in memory: it is streamed as {weight.dtype} to {weight.device} "
            f"and cannot become {wanted.dtype} on {wanted.device}: the files give the dtype, device= the device"
        )


def _refuse(args: tuple[Any, ...], kwargs: dict[str, Any], operation: str) -> NoReturn:
    name = next((one.weight_name for one in _flat((*args, *kwargs.values()))), "")
    raise RuntimeError(
        f"the weight {name} is not in memory: it is while its module runs, and something else ({operation}) uses it. "
        "A module whose forward() uses parameters of modules below it is to be given to stream_weights() as one of "
        "blocks="
    )


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, Absent):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _flat(value)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` does not look into."""
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


class Forward:
    """What a module has as its ``forward`` meanwhile. It is outside of the graphs of ``torch.compile``.

    Parameters
    ----------
    module : torch.nn.Module
        Its ``forward`` is replaced, until :meth:`remove`.
    owner : WeightStream or Training
        Who has replaced it, and refuses to be pickled or copied: the module cannot be either.
    run : callable
        Is called with the module's own ``forward``, arguments and keyword arguments.
    """

    def __init__(
        self, module: nn.Module, owner: WeightStream | Training, run: Callable[..., Any]
    ) -> None:
        self.owner = owner
        self.forward: Callable[..., Any] = module.forward
        self._of, self._was_own = module, "forward" in vars(module)
        functools.update_wrapper(self, self.forward, updated=())
        self.__code__ = getattr(self.forward, "__code__", None)  # torch.export looks for it first
        self._run = outside_of_graphs(run)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._run(self.forward, args, kwargs)

    def remove(self) -> None:
        """Give the module its own back, if it still has this one."""
        if vars(self._of).get("forward") is not self:
            return
        if self._was_own:
            self._of.forward = self.forward
        else:
            del self._of.forward

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, and with it the module."""
        self.owner.__reduce__()


def recorded() -> bool:
    """Return whether operations are recorded: by torch.jit.trace(), make_fx() or torch.export."""
    jit: Any = torch.jit
    if jit.is_tracing():
        return True
    modes: Any = torch.utils._python_dispatch
    if not modes._len_torch_dispatch_stack():
        return False
    names = {type(mode).__name__ for mode in modes._get_current_dispatch_mode_stack()}
    return bool(names & {"FakeTensorMode", "ProxyTorchDispatchMode"})
