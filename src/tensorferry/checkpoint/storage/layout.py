"""The distribution of a plan's items over files: the same as in torch's writer, so files have the same contents.

An item (torch's WriteItem) is one tensor, one part of a tensor, or one object to save.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from tensorferry.checkpoint.zipformat.archive import MAX_OVERHEAD_NBYTES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


def files_of(
    items: list[WriteItem], *, single_file_per_rank: bool, thread_count: int, copies_ahead: bool
) -> list[list[WriteItem]]:
    """Return the items of each file, in the order in which torch writes them; a file may have no items.

    Parameters
    ----------
    items : list of WriteItem
        The items of one rank.
    single_file_per_rank, thread_count
        As in torch's FileSystemWriter.
    copies_ahead : bool
        Whether torch would copy from an accelerator ahead of writing; in that case it sorts items by size.
    """
    if not single_file_per_rank:
        return [[item] for item in items]
    custom = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    has_accelerator = torch.cuda.is_available() or bool(custom and custom.is_available())
    by_size = thread_count == 1 and copies_ahead and has_accelerator
    files = []
    for bucket in _spread(items, thread_count):
        tensors = [item for item in bucket if item.type != WriteItemType.BYTE_IO]
        if by_size:
            tensors.sort(key=_global_nbytes)
        files.append([item for item in bucket if item.type == WriteItemType.BYTE_IO] + tensors)
    return files


def max_nbytes(item: WriteItem) -> int:
    """Return the maximum size of an item in a file; an object of unknown size counts as 0 bytes."""
    return content_nbytes(item) + (0 if item.tensor_data is None else MAX_OVERHEAD_NBYTES)


def content_nbytes(item: WriteItem) -> int:
    """Return the size of a tensor or object in bytes, which is 0 for an object of unknown size."""
    if item.tensor_data is None:
        data = getattr(item, "bytes_io_data", None)  # torch 2.8 and later
        return max(0, data.nbytes) if data is not None else 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _spread(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Spread items over files as torch does: objects in turn, then tensors, largest first, to the smallest file."""
    if count == 1:
        return [items]
    files: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for number, item in enumerate(i for i in items if i.type == WriteItemType.BYTE_IO):
        files[number % count].append(item)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for item in sorted(tensors, key=_global_nbytes, reverse=True):
        emptiest = filled.index(min(filled))
        files[emptiest].append(item)
        filled[emptiest] += _global_nbytes(item)
    return files


def _global_nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.size) * item.tensor_data.properties.dtype.itemsize
