"""Tests of checkpoints; adds functions to older versions of torch, here and in the processes that tests start."""

import functools
import importlib
import importlib.util
import inspect
from typing import Any


def _complete_torch() -> None:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    if "no_dist" not in inspect.signature(dcp.save).parameters:  # before 2.7, where it is inferred
        dcp.save, dcp.load = _taking_no_dist(dcp.save), _taking_no_dist(dcp.load)


def _taking_no_dist(function: Any) -> Any:
    import torch.distributed as dist

    @functools.wraps(function)
    def call(*arguments: Any, no_dist: bool = False, **options: Any) -> Any:
        assert not (no_dist and dist.is_initialized()), "this torch would ask the other ranks"
        return function(*arguments, **options)

    return call


if importlib.util.find_spec("torch"):
    _complete_torch()
