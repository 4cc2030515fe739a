"""Comparison of values bit for bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from tensorferry.transfer.arrays import tensor_bytes


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal; tensors and floating-point numbers are compared bit for bit."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and same_bits(left, right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)) and isinstance(right, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()
    equal = left == right
    return bool(equal.all() if hasattr(equal, "all") else equal)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape have the same bytes: NaN equals NaN, 0.0 is not -0.0."""
    return torch.equal(tensor_bytes(left.contiguous()), tensor_bytes(right.contiguous()))
