"""What training and inference keep on drives, in a number of bytes of memory: optimizers' state, models' weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import checked_nbytes, one_of
from tensorferry.offload.errors import MemoryBudgetError, NotSeparableError, OffloadError
from tensorferry.offload.optimizer import OffloadedOptimizer, check_optimizer, opened_store
from tensorferry.offload.plan import check_master, check_params
from tensorferry.offload.trained import TrainingOptimizer, offload_training
from tensorferry.offload.weights import WeightsMap, WeightStream, stream_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tensorferry.base.checks import Path
    from tensorferry.offload.embedding import TableEmbedding, TableEmbeddingBag
    from tensorferry.offload.optimizer import Commit, StepDevice

__all__ = [
    "MemoryBudgetError",
    "NotSeparableError",
    "OffloadError",
    "OffloadedOptimizer",
    "TableEmbedding",
    "TableEmbeddingBag",
    "TrainingOptimizer",
    "WeightStream",
    "WeightsMap",
    "offload_optimizer",
    "offload_training",
    "stream_weights",
]


def __getattr__(name: str) -> Any:
    if name in ("TableEmbedding", "TableEmbeddingBag"):  # need NumPy, as nothing else here
        from tensorferry.offload import embedding

        return getattr(embedding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    directories: Path | Sequence[Path],
    *,
    memory_budget: int | str,
    master_dtype: torch.dtype | None = None,
    commit: Commit = "none",
    weights: Sequence[float] | None = None,
    endurance: int | str | None = None,
    step_device: StepDevice = "param",
) -> OffloadedOptimizer:
    """Return an optimizer that does what another does, bit for bit, with its state on drives.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any whose step treats each parameter by itself; from now on it is used by what is returned, alone.
    directories : path, or a list of paths
        Where the state goes, in files without names that are gone with the process; several should be on several
        drives.
    memory_budget : int or str
        Bytes of memory for state: ``8 << 30``, or ``"8GiB"``. What fits stays in memory; with enough for all nothing is
        moved.
    master_dtype : torch.dtype, optional
        Parameters of another dtype are stepped as copies of this one (``torch.float32``, for bfloat16 parameters),
        which are state, too: ``state[param]["master"]``.
    commit : "none", "step" or "fsync"
        With "step" each step is committed before ``step()`` returns: however the process ends, ``resume()`` of the next
        one finds parameters, state and groups' values as the last whole step has left them. That takes files with
        names, twice the space, and a write of everything in each step; the directories are for one process alone.
        "fsync" makes steps last through a power cut, too.
    weights : sequence of positive numbers, optional
        How much of the bytes each directory takes, for drives that are not equally fast.
    step_device : "param" or "cpu"
        Where the arithmetic is done: where the parameters are, or in host memory, with copies of parameters and
        gradients. With parameters on a GPU and "param", three buckets are there beside them, and ``memory_budget`` is
        page-locked host memory.
    endurance : int or str, optional
        Bytes that the drives are rated to be written (TBW): ``"1200T"``. Then :meth:`OffloadedOptimizer.stats` says how
        much of it has been used.

    Raises
    ------
    NotSeparableError
        The optimizer cannot be stepped piece by piece with the same result; the message says why.
    MemoryBudgetError
        The budget is too small; ``needed_nbytes`` would do.
    StorageError
        The directories have no space for all state, or cannot be used.
    ValueError, TypeError
        An argument is not usable.
    """
    check_optimizer(optimizer)
    nbytes = checked_nbytes(memory_budget, "memory_budget")
    endurance_nbytes = None if endurance is None else checked_nbytes(endurance, "endurance")
    check_params(optimizer.param_groups)
    if master_dtype is not None:
        check_master(optimizer, master_dtype)
    one_of(step_device, "step_device", ("param", "cpu"))
    one_of(commit, "commit", ("none", "step", "fsync"))
    with contextlib.ExitStack() as undo:
        store, earlier = opened_store(directories, weights, commit, undo)
        offloaded = OffloadedOptimizer(
            optimizer,
            store,
            nbytes,
            master_dtype=master_dtype,
            commit=commit,
            earlier=earlier,
            endurance_nbytes=endurance_nbytes,
            step_device=step_device,
        )
        undo.pop_all()
    return offloaded
