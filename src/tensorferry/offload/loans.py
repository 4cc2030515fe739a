"""Parameters and gradients as the optimizer gets them for a step.

A whole parameter in its own dtype is stepped itself. For a *stand-in*, a new parameter object is made for the step: for
a piece of a parameter, for its *master* (a copy in another dtype, which is part of the state), for a copy in host
memory, and for this rank's part of a DTensor. Assigning such data to the user's own parameter instead would drop the
hooks that DistributedDataParallel has put on its gradient, and an exception would leave it changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensorferry.offload.plan import local_of

if TYPE_CHECKING:
    from tensorferry.offload.plan import Unit


# A dtype in which elements of a size are compared by their bits: 0.0 equals -0.0, and a NaN equals nothing.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Loan(NamedTuple):
    """A parameter, or a part of one, that the optimizer has for a step."""

    target: torch.Tensor  # the tensor that the optimizer steps
    piece: torch.Tensor  # the stepped elements of the user's parameter
    gradient: Any  # the parameter's `grad` before the loan

    def settle(self, master: torch.Tensor | None) -> None:
        """Copy the stepped values into the parameter, and into its master if it has one."""
        stepped = self.target.detach()
        if master is not None and stepped.data_ptr() != master.data_ptr():
            master.copy_(stepped)
        if stepped.data_ptr() != self.piece.data_ptr():
            self.piece.copy_(stepped)


class Lender:
    """Lends parameters to the optimizer.

    Parameters
    ----------
    master_dtype : torch.dtype or None
        The dtype in which parameters are stepped; None: their own.
    on_host : bool
        Step parameters of other devices as copies in host memory.
    """

    def __init__(self, master_dtype: torch.dtype | None, *, on_host: bool) -> None:
        self._master_dtype = master_dtype
        self._on_host = on_host

    def step_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is stepped."""
        return self._master_dtype or param.dtype

    def step_device(self, param: torch.Tensor) -> torch.device:
        """Return the device on which a parameter is stepped."""
        return torch.device("cpu") if self._on_host else param.device

    def lend(
        self,
        param: torch.Tensor,
        grad: torch.Tensor | None,
        *,
        unit: Unit | None = None,
        master: torch.Tensor | None = None,
        known: bool = False,
    ) -> Loan:
        """Lend a parameter with its gradient; :meth:`take_back` must follow.

        Parameters
        ----------
        param, grad : torch.Tensor
            The user's parameter, and its gradient or None.
        unit : Unit, optional
            The part to step; None: all of it.
        master : torch.Tensor, optional
            The master of this part, which is stepped in its place.
        known : bool
            Whether the master has values already.
        """
        local = local_of(param).detach()
        is_cut = unit is not None and unit.stop is not None
        if local_of(param) is param and not is_cut and master is None and not self._is_moved(param):
            loan = Loan(param, local, param.grad)
            if param.grad is not grad:
                param.grad = grad
            return loan
        piece = elements_of(unit, local)
        data = piece
        if master is not None:
            renew_master(master, piece, known=known)
            data = master
        data = data.to(self.step_device(param))
        target = torch.nn.Parameter(
            data, requires_grad=param.requires_grad and data.is_floating_point()
        )
        target.__dict__.update(param.__dict__)  # attributes that a step may read
        if grad is not None:
            part = elements_of(unit, local_of(grad).detach())
            part = part.to(data.device, data.dtype if master is not None else part.dtype)
            if part.dtype != data.dtype and hasattr(target, "grad_dtype"):
                target.grad_dtype = part.dtype
            target.grad = part
        return Loan(target, piece, None)

    def take_back(self, param: torch.Tensor, grad: torch.Tensor | None, loan: Loan) -> None:
        """End a loan, also after an exception; ``grad`` is the gradient that was lent."""
        if loan.target is param and loan.gradient is not grad:
            param.grad = loan.gradient

    def _is_moved(self, param: torch.Tensor) -> bool:
        return self._on_host and param.device.type != "cpu"


def elements_of(unit: Unit | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a unit's elements of a parameter's local tensor, or of its gradient, as a view."""
    if unit is None or unit.stop is None:
        return tensor
    return tensor.view(-1)[unit.start : unit.stop]


def renew_master(master: torch.Tensor, value: torch.Tensor, *, known: bool) -> None:
    """Copy those elements of a parameter into its master that have been written since the master's last step.

    Without such a write, an element of the parameter has the bits of the master's, rounded to the parameter's dtype.
    If ``known`` is false, the master has no values yet, and gets all elements.
    """
    value = value.to(master.device)
    if not known:
        master.copy_(value)
        return
    bits = _INTEGERS[value.itemsize]
    written = master.to(value.dtype).view(bits) != value.view(bits)
    if bool(written.any()):
        master.copy_(torch.where(written, value.to(master.dtype), master))
