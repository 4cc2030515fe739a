"""Training and inference with optimizer state and model weights on drives, within a memory budget."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import one_of
from tensorferry.offload.checking import check
from tensorferry.offload.errors import MemoryBudgetError, NotSeparableError, OffloadError
from tensorferry.offload.kinds import register
from tensorferry.offload.optimizer import OffloadedOptimizer, checked_options, opened_store
from tensorferry.offload.plan import check_params
from tensorferry.offload.training_optimizer import TrainingOptimizer, offload_training
from tensorferry.offload.weights import WeightsMap, WeightStream, stream_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tensorferry.base.checks import Path
    from tensorferry.offload.embedding import TableEmbedding, TableEmbeddingBag
    from tensorferry.offload.kinds import Kind
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
    "check",
    "offload_optimizer",
    "offload_training",
    "register",
    "stream_weights",
]


def __getattr__(name: str) -> Any:
    if name in ("TableEmbedding", "TableEmbeddingBag"):  # imported lazily: only they need NumPy
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
    kind: Kind | None = None,
    master_dtype: torch.dtype | None = None,
    commit: Commit = "none",
    weights: Sequence[float] | None = None,
    endurance: int | str | None = None,
    step_device: StepDevice = "param",
) -> OffloadedOptimizer:
    """Return an optimizer that computes bit for bit what ``optimizer`` computes, with its state on drives.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer of torch or of a package that is known to step each parameter independently of the others, or any
        other one with ``kind``. From now on, use only the returned optimizer.
    directories : path, or a list of paths
        Directories for the state. The files have no names, and the system deletes them when the process ends. Several
        directories should be on different drives.
    memory_budget : int or str
        Bytes of memory for state: ``8 << 30``, or ``"8GiB"``. State that fits stays in memory; with a budget for the
        whole state, steps read and write nothing.
    kind : "elementwise" or "per_parameter", optional
        Your word for a class that tensorferry does not know, subclasses of known ones included. "per_parameter": the
        update of a parameter depends only on that parameter, its gradient, its state and the values of its group, and
        the step changes these values in the same way whichever parameters it gets. "elementwise": this holds for each
        element, too. :func:`check` compares such steps with steps in memory.
    master_dtype : torch.dtype, optional
        Step parameters of another dtype as copies in this dtype (``torch.float32`` for bfloat16 parameters). The
        copies are part of the state: ``read_state(param)["master"]``.
    commit : "none", "step" or "fsync"
        "step" commits each step before ``step()`` returns. However the process ends, ``resume()`` in the next process
        restores parameters, state and the values in ``param_groups`` as they were after the last complete step. This
        needs named files, twice the space, and a write of the whole state in each step; only one process may use the
        directories. With "fsync", steps also survive a power failure.
    weights : sequence of positive numbers, optional
        The share of the bytes that each directory gets, for drives of different speeds.
    step_device : "param" or "cpu"
        Where the arithmetic runs: on the device of the parameters, or in host memory on copies of parameters and
        gradients. With parameters on a GPU and "param", the GPU also holds the state of three buckets (groups of
        parameters that are stepped together), and ``memory_budget`` is page-locked host memory.
    endurance : int or str, optional
        Bytes that the drives are rated to be written (TBW): ``"1200T"``. :meth:`OffloadedOptimizer.stats` then reports
        the share that has been used.

    Raises
    ------
    NotSeparableError
        The class is not known and ``kind`` is missing, or the optimizer cannot be stepped in parts.
    MemoryBudgetError
        The budget is too small; ``needed_nbytes`` is the smallest one that works.
    StorageError
        The directories lack space for the state, or cannot be used.
    ValueError, TypeError
        An argument is invalid.
    """
    nbytes, options = checked_options(
        optimizer, memory_budget, kind, master_dtype, commit, endurance
    )
    one_of(step_device, "step_device", ("param", "cpu"))
    check_params(optimizer.param_groups)
    with contextlib.ExitStack() as undo:
        store, earlier = opened_store(directories, weights, commit, undo)
        offloaded = OffloadedOptimizer(
            optimizer, store, nbytes, earlier=earlier, step_device=step_device, **options
        )
        undo.pop_all()
    return offloaded
