"""A comparison of offloaded steps with steps in memory, for classes that need a user's word.

The tests prove the table of ``kinds.py`` with the same function.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from typing import TYPE_CHECKING

import torch

from tensorferry.base.checks import positive
from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.equality import same
from tensorferry.offload.optimizer import OffloadedOptimizer, checked_options, opened_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.base.checks import Path
    from tensorferry.offload.kinds import Kind
    from tensorferry.offload.plan import Bucket

# The factors of gradients in successive steps: some optimizers treat a gradient that is larger or smaller than all
# before in another way.
_FACTORS = (1.0, 0.1, 10.0, 1.0, 1e4, 0.0, 1e-6, 1.0)


def check(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    params: Iterable[torch.Tensor],
    *,
    kind: Kind | None = None,
    steps: int = 12,
    missing: bool = True,
    master_dtype: torch.dtype | None = None,
    seed: int = 0,
    directory: Path | None = None,
) -> list[str]:
    """Compare steps of an offloaded optimizer with the same steps in memory, bit for bit.

    Both optimizers step copies of the parameters with the same random gradients: of changing size, sometimes missing,
    and not finite in the last steps. A group's "lr" changes in each step. The offloaded optimizer has memory for its
    largest bucket only. Equal results do not prove that a class is exact: its step may do other things for other
    values.

    Parameters
    ----------
    make_optimizer : callable
        Returns an optimizer for a list of parameters.
    params : iterable of torch.Tensor
        Parameters with the shapes, dtypes and values to try. An element-wise optimizer steps parameters with more than
        64 KiB of state in pieces.
    kind, master_dtype
        As for :func:`offload_optimizer`.
    steps : int
        The number of steps.
    missing : bool
        Whether gradients are sometimes missing. Some optimizers need all of them.
    seed : int
        Determines the gradients.
    directory : path, optional
        Where the state is stored; by default the system's temporary directory.

    Returns
    -------
    list of str
        What differs after the first step with differences; empty if all is equal.

    Raises
    ------
    NotSeparableError, TypeError, ValueError
        As :func:`offload_optimizer` and the optimizer's step raise them.
    """
    steps = positive(steps, "steps")
    given = list(params)
    expected, stepped = ([_copy(param) for param in given] for _ in range(2))
    masters = [
        param if master_dtype in (None, param.dtype) else _copy(param.to(master_dtype))
        for param in expected
    ]
    random = torch.Generator().manual_seed(seed)
    memory = make_optimizer(masters)
    inner = make_optimizer(stepped)
    _, options = checked_options(inner, 1, kind, master_dtype, "none", None)
    with tempfile.TemporaryDirectory(dir=directory) as folder, contextlib.ExitStack() as undo:
        store, _ = opened_store(folder, None, "none", undo)
        with contextlib.closing(_OnDrives(inner, store, 1, **options)) as offloaded:
            for step in range(steps):
                grads = [
                    None
                    if missing and _is_missing(step, at)
                    else _gradient(step, at, steps, param, random)
                    for at, param in enumerate(given)
                ]
                for master, other, grad in zip(masters, stepped, grads, strict=True):
                    other.grad = grad
                    master.grad = None if grad is None else grad.clone().to(master.dtype)
                for group in itertools.chain(memory.param_groups, offloaded.param_groups):
                    if isinstance(group.get("lr"), float):
                        group["lr"] *= 0.9
                memory.step()
                for param, master in zip(expected, masters, strict=True):
                    if master is not param:
                        param.data.copy_(master.data)
                offloaded.step()
                found = _differences(expected, stepped, memory, offloaded)
                if found:
                    return [f"step {step + 1}: {each}" for each in found]
    return []


class _OnDrives(OffloadedOptimizer):
    """An optimizer whose state is on drives, however small it is, with memory for its largest bucket."""

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        self._budget_nbytes = max(round_to_pages(bucket.nbytes) for bucket in buckets)

    def _fits_at_home(self, _: Sequence[Bucket]) -> bool:
        return False


def _copy(param: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(param.detach().clone(), requires_grad=param.is_floating_point())


def _is_missing(step: int, index: int) -> bool:
    late = index % 4 == 1 and step < 2
    return late or (step > 0 and (step + index) % 5 == 4)


def _gradient(
    step: int, index: int, steps: int, param: torch.Tensor, random: torch.Generator
) -> torch.Tensor:
    grad = torch.empty_like(param, requires_grad=False)
    grad.copy_(torch.randn(param.shape, generator=random, dtype=torch.float32))
    grad *= _FACTORS[(step + index // 3) % len(_FACTORS)]
    if step >= steps - 2 and index % 3 == step % 3 and grad.numel():
        grad[(0,) * grad.dim()] = math.inf if step % 2 else math.nan
    return grad


def _differences(
    expected: Sequence[torch.Tensor],
    stepped: Sequence[torch.Tensor],
    memory: torch.optim.Optimizer,
    offloaded: torch.optim.Optimizer,
) -> list[str]:
    found = []
    for index, (one, other) in enumerate(zip(expected, stepped, strict=True)):
        if not same(one.detach(), other.detach()):
            count = int((one != other).sum())
            found.append(
                f"parameter {index} of shape {tuple(one.shape)} differs in {count} of {one.numel()} elements"
            )
    ours, theirs = offloaded.state_dict(), memory.state_dict()
    for index in {**theirs["state"], **ours["state"]}:
        want, got = theirs["state"].get(index, {}), dict(ours["state"].get(index, {}))
        got = {key: value for key, value in got.items() if key in want or key != "master"}
        for key in {**want, **got}:
            if key not in want or key not in got or not same(want[key], got[key]):
                found.append(f"{key!r} in the state of parameter {index} differs")
    if not same(theirs["param_groups"], ours["param_groups"]):
        found.append("the values of param_groups differ")
    return found
